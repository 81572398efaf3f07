//! Llama 1–3: RMSNorm, grouped-query attention, gated feed-forward, every rotary scaling.

use super::{Family, Sizes, decoder};
use crate::Result;
use crate::layout::ParamKind::{self, *};
use crate::spec::{Config, DecoderSpec, NormKind, NormSpec, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    base_prefix: "model.",
    read,
    modules: MODULES,
    order: &[],
    renamed: &[],
    stem: None,
    has_scorer: true,
    beside: &[],
};

fn read(config: &Config) -> Result<DecoderSpec> {
    with_biases(config)
}

/// Reads a [`descendant`] with the biases that `attention_bias` and `mlp_bias` name.
pub(super) fn with_biases(config: &Config) -> Result<DecoderSpec> {
    let mut spec = descendant(config, None)?;
    let (attention_bias, mlp_bias) = (config.flag("attention_bias", false)?, config.flag("mlp_bias", false)?);
    (spec.attention.qkv_bias, spec.attention.out_bias) = (attention_bias, attention_bias);
    (spec.mlp.up_bias, spec.mlp.down_bias) = (mlp_bias, mlp_bias);
    Ok(spec)
}

/// Reads the keys that Llama and its descendants share: no biases, full attention, untied head, heads
/// that rotate whole.
pub(super) fn descendant(config: &Config, default_head_dim: Option<usize>) -> Result<DecoderSpec> {
    let mut spec = unrotated(config, default_head_dim, 1e-6)?;
    spec.rotate_all(&config.rotary(spec.attention.head_dim, RotaryKeys::whole(10_000.0))?);
    Ok(spec)
}

/// Reads what [`descendant`] reads but the rotary embedding.
pub(super) fn unrotated(
    config: &Config,
    default_head_dim: Option<usize>,
    default_eps: f64,
) -> Result<DecoderSpec> {
    let sizes = Sizes::read(config, default_head_dim)?;
    let eps = config.number("rms_norm_eps", default_eps)? as f32;
    let norm = NormSpec { kind: NormKind::Rms { offset: 0.0 }, eps };
    let mut spec = decoder(config, sizes, norm, config.activation("hidden_act", "silu")?)?;
    spec.mlp.gated = true;
    Ok(spec)
}

/// Lists Llama's modules where the body is called `$body` and the head `$head`.
macro_rules! modules {
    ($body:literal, $head:literal) => {
        &[
            (TokenTable, &[concat!($body, ".embed_tokens")]),
            (Norm1Weight, &[concat!($body, ".layers.{}.input_layernorm")]),
            (
                QkvWeight,
                &[
                    concat!($body, ".layers.{}.self_attn.q_proj"),
                    concat!($body, ".layers.{}.self_attn.k_proj"),
                    concat!($body, ".layers.{}.self_attn.v_proj"),
                ],
            ),
            (OutWeight, &[concat!($body, ".layers.{}.self_attn.o_proj")]),
            (QNormWeight, &[concat!($body, ".layers.{}.self_attn.q_norm")]),
            (KNormWeight, &[concat!($body, ".layers.{}.self_attn.k_norm")]),
            (Norm2Weight, &[concat!($body, ".layers.{}.post_attention_layernorm")]),
            (
                UpWeight,
                &[concat!($body, ".layers.{}.mlp.gate_proj"), concat!($body, ".layers.{}.mlp.up_proj")],
            ),
            (DownWeight, &[concat!($body, ".layers.{}.mlp.down_proj")]),
            (FinalNormWeight, &[concat!($body, ".norm")]),
            (HeadWeight, &[$head]),
        ]
    };
}
pub(super) use modules;

/// Llama's modules, which its descendants kept.
pub(super) const MODULES: &[(ParamKind, &[&str])] = modules!("model", "lm_head");
