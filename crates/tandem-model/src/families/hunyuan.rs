//! Hunyuan (dense): Llama with a norm on each query and key head, after they have rotated.

use super::{Family, Padding, attention_bias, llama};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, QkNorm, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "hunyuan_v1_dense",
    architecture: "HunYuanDenseV1ForCausalLM",
    read,
    modules: &[
        (QNormWeight, &["model.layers.{}.self_attn.query_layernorm"]),
        (KNormWeight, &["model.layers.{}.self_attn.key_layernorm"]),
    ],
    padding: Padding::Default(0),
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::unrotated(config, None, 1e-5)?;
    attention_bias(config, &mut spec)?;
    spec.attention.qk_norm = Some(QkNorm::PerHeadRotated);
    let keys = RotaryKeys { alpha_stretches: true, ..RotaryKeys::whole(10_000.0) };
    spec.rotate_all(&config.rotary(spec.attention.head_dim, keys)?);
    Ok(spec)
}
