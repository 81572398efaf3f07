//! Llama 1–3: RMSNorm, grouped-query attention, gated feed-forward, every rotary scaling.

use super::{Family, Padding, Sizes, attention_bias, decoder, mlp_bias};
use crate::Result;
use crate::spec::{Config, DecoderSpec, NormKind, NormSpec, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    base_prefix: "model.",
    read,
    modules: &[],
    prefixes: &[],
    order: &[],
    renamed: &[],
    stem: None,
    has_scorer: true,
    beside: &[],
    padding: Padding::Named,
};

fn read(config: &Config) -> Result<DecoderSpec> {
    with_biases(config)
}

/// Reads a [`descendant`] with the biases that `attention_bias` and `mlp_bias` name.
pub(super) fn with_biases(config: &Config) -> Result<DecoderSpec> {
    let mut spec = descendant(config, None)?;
    attention_bias(config, &mut spec)?;
    mlp_bias(config, &mut spec)?;
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
    let eps = config.epsilon("rms_norm_eps", default_eps)? as f32;
    let norm = NormSpec { kind: NormKind::Rms { offset: 0.0 }, eps };
    let mut spec = decoder(config, sizes, norm, config.activation("hidden_act", "silu")?)?;
    spec.mlp.gated = true;
    Ok(spec)
}
