//! GPT-2: learned positions, LayerNorm, weights stored as `Conv1D` (`[in, out]`), tied head.

use super::{Family, HfLayout, Padding, Sizes, decoder};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, NormKind, NormSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "gpt2",
    architecture: "GPT2LMHeadModel",
    base_prefix: "transformer.",
    read,
    modules: &[
        (TokenTable, &["transformer.wte"]),
        (PositionTable, &["transformer.wpe"]),
        (Norm1Weight, &["transformer.h.{}.ln_1"]),
        (QkvWeight, &["transformer.h.{}.attn.c_attn"]),
        (OutWeight, &["transformer.h.{}.attn.c_proj"]),
        (Norm2Weight, &["transformer.h.{}.ln_2"]),
        (UpWeight, &["transformer.h.{}.mlp.c_fc"]),
        (DownWeight, &["transformer.h.{}.mlp.c_proj"]),
        (FinalNormWeight, &["transformer.ln_f"]),
        (HeadWeight, &["lm_head"]),
    ],
    prefixes: &[],
    order: &[
        (QkvWeight, HfLayout::Transposed),
        (OutWeight, HfLayout::Transposed),
        (UpWeight, HfLayout::Transposed),
        (DownWeight, HfLayout::Transposed),
    ],
    renamed: &[],
    stem: None,
    has_scorer: true,
    beside: &[],
    padding: Padding::Unused,
};

fn read(config: &Config) -> Result<DecoderSpec> {
    config.refuse_flag("scale_attn_by_inverse_layer_idx")?;
    config.refuse_flag("add_cross_attention")?;
    let (hidden, heads) = (config.count("n_embd")?, config.count("n_head")?);
    if !hidden.is_multiple_of(heads) {
        return Err(config.error(format!("n_embd {hidden} is not a multiple of n_head {heads}")));
    }
    let sizes = Sizes {
        hidden,
        num_layers: config.num_layers("n_layer")?,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        mlp: config.count_if("n_inner")?.unwrap_or(4 * hidden),
        positions: config.count_if("n_positions")?.unwrap_or(1024),
    };
    let norm = NormSpec { kind: NormKind::LAYER, eps: config.epsilon("layer_norm_epsilon", 1e-5)? as f32 };
    let activation = config.activation("activation_function", "gelu_new")?;
    let mut spec = decoder(config, sizes, norm, activation)?.with_biases();
    spec.embedding.learned_positions = Some(spec.max_positions);
    if !config.flag("scale_attn_weights", true)? {
        spec.attention.scale = 1.0;
    }
    spec.head.tied = config.flag("tie_word_embeddings", true)?;
    spec.init.residual_std = spec.init.std / (2.0 * spec.num_layers as f32).sqrt();
    Ok(spec)
}
