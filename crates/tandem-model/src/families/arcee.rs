//! Arcee: Llama with a plain feed-forward of squared ReLU.

use super::{Family, SEPARATE_QKV, Sizes, decoder};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, NormKind, NormSpec, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "arcee",
    architecture: "ArceeForCausalLM",
    base_prefix: "model.",
    read,
    modules: &[
        (TokenTable, &["model.embed_tokens"]),
        (Norm1Weight, &["model.layers.{}.input_layernorm"]),
        (QkvWeight, SEPARATE_QKV),
        (OutWeight, &["model.layers.{}.self_attn.o_proj"]),
        (Norm2Weight, &["model.layers.{}.post_attention_layernorm"]),
        (UpWeight, &["model.layers.{}.mlp.up_proj"]),
        (DownWeight, &["model.layers.{}.mlp.down_proj"]),
        (FinalNormWeight, &["model.norm"]),
        (HeadWeight, &["lm_head"]),
    ],
    order: &[],
    renamed: &[],
    stem: None,
    has_scorer: true,
    beside: &[],
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let eps = config.number("rms_norm_eps", 1e-5)? as f32;
    let norm = NormSpec { kind: NormKind::Rms { offset: 0.0 }, eps };
    let activation = config.activation("hidden_act", "relu2")?;
    let mut spec = decoder(config, Sizes::read(config, None)?, norm, activation)?;
    let (attention_bias, mlp_bias) = (config.flag("attention_bias", false)?, config.flag("mlp_bias", false)?);
    (spec.attention.qkv_bias, spec.attention.out_bias) = (attention_bias, attention_bias);
    (spec.mlp.up_bias, spec.mlp.down_bias) = (mlp_bias, mlp_bias);
    spec.rotate_all(&config.rotary(spec.attention.head_dim, RotaryKeys::whole(10_000.0))?);
    Ok(spec)
}
