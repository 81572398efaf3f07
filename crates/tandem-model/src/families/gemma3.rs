//! Gemma 3 (text): Gemma 2 without caps, with a norm on each query and key head, and rotary bases by
//! kind of layer.

use super::{Family, Padding, gemma2, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec, QkNorm, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    read,
    modules: gemma2::MODULES,
    stem: Some("Gemma3Text"),
    padding: Padding::Default(0),
    ..llama::FAMILY
};

pub(super) fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::unrotated(config, Some(256), 1e-6)?;
    gemma2::common(config, &mut spec, [None, None])?;
    // transformers reads attn_logit_softcapping in this family and does not apply it.
    spec.attention.softcap = None;
    spec.attention.qk_norm = Some(QkNorm::PerHead);
    let pattern = config.count_if("sliding_window_pattern")?.unwrap_or(6);
    let window = config.sliding_window(Some(4096))?;
    let windows = config.windows(spec.num_layers, window, |layer| !(layer + 1).is_multiple_of(pattern))?;
    let keys = [1_000_000.0, 10_000.0].map(RotaryKeys::whole);
    let [full, sliding] =
        config.rotary_by_type(spec.attention.head_dim, keys, Some("rope_local_base_freq"))?;
    spec.rotary =
        windows.iter().map(|w| Some(if w.is_some() { sliding.clone() } else { full.clone() })).collect();
    spec.attention.windows = windows;
    Ok(spec)
}
