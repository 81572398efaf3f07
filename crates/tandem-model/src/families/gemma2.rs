//! Gemma 2: Gemma with norms before and after each half, soft caps, and a window in every other layer.

use super::{Family, Modules, Padding, gemma, llama};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, NormPlacement, Residual};

pub(super) const FAMILY: Family = Family {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    read,
    modules: MODULES,
    padding: Padding::Default(0),
    ..llama::FAMILY
};

/// Gemma 2's modules, which Gemma 3 kept.
pub(super) const MODULES: &Modules = &[
    (PostNorm1Weight, &["model.layers.{}.post_attention_layernorm"]),
    (Norm2Weight, &["model.layers.{}.pre_feedforward_layernorm"]),
    (PostNorm2Weight, &["model.layers.{}.post_feedforward_layernorm"]),
];

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::descendant(config, Some(256))?;
    common(config, &mut spec, [Some(50.0), Some(30.0)])?;
    let window = config.sliding_window(Some(4096))?;
    spec.attention.windows = config.windows(spec.num_layers, window, |layer| layer % 2 == 0)?;
    Ok(spec)
}

/// Reads what Gemma 2 and 3 share: `caps` are the defaults on scores and logits.
pub(super) fn common(config: &Config, spec: &mut DecoderSpec, caps: [Option<f64>; 2]) -> Result<()> {
    gemma::common(config, spec, "hidden_activation")?;
    spec.residual = Residual::Sequential { norms: NormPlacement::Both, scale: 1.0 };
    spec.attention.scale = (1.0 / config.positive("query_pre_attn_scalar", 256.0)?.sqrt()) as f32;
    spec.attention.softcap = config.cap("attn_logit_softcapping", caps[0])?;
    spec.head.shape.softcap = config.cap("final_logit_softcapping", caps[1])?;
    Ok(())
}
