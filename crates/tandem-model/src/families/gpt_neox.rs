//! GPT-NeoX and Pythia: parallel residual with two LayerNorms, partial rotary embedding, q, k and v
//! fused by head.

use super::{Family, HfLayout, Padding, Sizes, decoder};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, NormKind, NormSpec, Residual, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "gpt_neox",
    architecture: "GPTNeoXForCausalLM",
    base_prefix: "gpt_neox.",
    read,
    modules: &[
        (TokenTable, &["gpt_neox.embed_in"]),
        (Norm1Weight, &["gpt_neox.layers.{}.input_layernorm"]),
        (QkvWeight, &["gpt_neox.layers.{}.attention.query_key_value"]),
        (OutWeight, &["gpt_neox.layers.{}.attention.dense"]),
        (Norm2Weight, &["gpt_neox.layers.{}.post_attention_layernorm"]),
        (UpWeight, &["gpt_neox.layers.{}.mlp.dense_h_to_4h"]),
        (DownWeight, &["gpt_neox.layers.{}.mlp.dense_4h_to_h"]),
        (FinalNormWeight, &["gpt_neox.final_layer_norm"]),
        (HeadWeight, &["embed_out"]),
    ],
    prefixes: &[],
    order: &[(QkvWeight, HfLayout::HeadInterleaved), (QkvBias, HfLayout::HeadInterleaved)],
    renamed: &[("embed_out", "lm_head")],
    stem: None,
    has_scorer: true,
    beside: &[],
    padding: Padding::Unused,
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let norm = NormSpec { kind: NormKind::LAYER, eps: config.epsilon("layer_norm_eps", 1e-5)? as f32 };
    let activation = config.activation("hidden_act", "gelu")?;
    let sizes = Sizes::read(config, None)?;
    // The class has no keys for these.
    let sizes = Sizes { kv_heads: sizes.heads, head_dim: sizes.hidden / sizes.heads, ..sizes };
    let mut spec = decoder(config, sizes, norm, activation)?.with_biases();
    if config.flag("use_parallel_residual", true)? {
        spec.residual = Residual::Parallel { shared_norm: false };
    }
    let keys = RotaryKeys {
        theta_key: Some("rotary_emb_base"),
        fraction_key: "rotary_pct",
        ..RotaryKeys::partial(0.25)
    };
    spec.rotate_all(&config.rotary(spec.attention.head_dim, keys)?);
    let attention_bias = config.flag("attention_bias", true)?;
    (spec.attention.qkv_bias, spec.attention.out_bias) = (attention_bias, attention_bias);
    Ok(spec)
}
