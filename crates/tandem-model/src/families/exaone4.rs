//! Exaone 4: OLMo 2's order of norms, a norm on each query and key head, and layers with a window that
//! alone rotate.

use super::{Family, llama, olmo2};
use crate::Result;
use crate::spec::{Config, DecoderSpec, NormPlacement, QkNorm, Residual, RotaryKeys};

pub(super) const FAMILY: Family = Family {
    model_type: "exaone4",
    architecture: "Exaone4ForCausalLM",
    read,
    modules: olmo2::MODULES,
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::unrotated(config, None, 1e-5)?;
    spec.residual = Residual::Sequential { norms: NormPlacement::After, scale: 1.0 };
    spec.attention.qk_norm = Some(QkNorm::PerHead);
    let window = config.sliding_window(Some(4096))?;
    // Released folders have a word such as "LLLG" for the pattern, which only `layer_types` spells out.
    let listed = config.has("layer_types");
    // Without a window every layer is full, and rotates.
    let pattern = match window {
        Some(_) if !listed => config.count_or_zero("sliding_window_pattern")?.unwrap_or(4),
        _ => 0,
    };
    let slides = |layer: usize| window.is_some() && !(layer + 1).is_multiple_of(pattern);
    let windows = config.windows(spec.num_layers, window, slides)?;
    let rotary = config.rotary(spec.attention.head_dim, RotaryKeys::whole(10_000.0))?;
    let rotates = |w: &Option<u32>| (window.is_none() || w.is_some()).then(|| rotary.clone());
    spec.rotary = windows.iter().map(rotates).collect();
    spec.attention.windows = windows;
    Ok(spec)
}
