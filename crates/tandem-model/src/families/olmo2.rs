//! OLMo 2: Llama with norms after each half instead of before, and one norm over all query heads and
//! one over all key heads.

use super::{Family, Modules, Padding, attention_bias, llama};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, NormPlacement, QkNorm, Residual, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "olmo2",
    architecture: "Olmo2ForCausalLM",
    read,
    modules: MODULES,
    padding: Padding::Default(1),
    ..llama::FAMILY
};

/// OLMo 2's modules, which OLMo 3 and Exaone 4 share.
pub(super) const MODULES: &Modules = &[
    (PostNorm1Weight, &["model.layers.{}.post_attention_layernorm"]),
    (PostNorm2Weight, &["model.layers.{}.post_feedforward_layernorm"]),
];

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = unrotated(config)?;
    spec.rotate_all(&config.rotary(spec.attention.head_dim, RotaryKeys::whole(10_000.0))?);
    Ok(spec)
}

/// Reads all but the rotary embedding.
pub(super) fn unrotated(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::unrotated(config, None, 1e-5)?;
    spec.residual = Residual::Sequential { norms: NormPlacement::After, scale: 1.0 };
    let (queries, keys) = (spec.attention.query_width(), spec.attention.kv_width());
    spec.attention.qk_norm = Some(QkNorm::Full { queries, keys });
    attention_bias(config, &mut spec)?;
    Ok(spec)
}
