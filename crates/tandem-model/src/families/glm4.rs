//! GLM-4: norms before and after each half, interleaved rotation of half of a head, fused gate and up.

use tandem_kernels::ops::RopePairs;

use super::{Family, Padding, llama};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, NormPlacement, Residual, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "glm4",
    architecture: "Glm4ForCausalLM",
    read,
    modules: &[
        (PostNorm1Weight, &["model.layers.{}.post_self_attn_layernorm"]),
        (UpWeight, &["model.layers.{}.mlp.gate_up_proj"]),
        (PostNorm2Weight, &["model.layers.{}.post_mlp_layernorm"]),
    ],
    padding: Padding::Default(151_329),
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::unrotated(config, Some(128), 0.000_000_156_25)?;
    spec.residual = Residual::Sequential { norms: NormPlacement::Both, scale: 1.0 };
    spec.attention.qkv_bias = config.flag("attention_bias", true)?;
    let mut rotary = config.rotary(spec.attention.head_dim, RotaryKeys::partial(0.5))?;
    rotary.pairs = RopePairs::Interleaved;
    spec.rotate_all(&rotary);
    Ok(spec)
}
