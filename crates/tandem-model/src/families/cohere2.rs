//! Cohere 2 (Command R7B, Command A): Cohere with windows in three of four layers, which alone rotate.

use super::{Family, Padding, cohere, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "cohere2",
    architecture: "Cohere2ForCausalLM",
    read,
    has_scorer: false,
    padding: Padding::Default(0),
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = cohere::unrotated(config)?;
    let pattern = config.count_if("sliding_window_pattern")?.unwrap_or(4);
    let window = config.sliding_window(Some(4096))?;
    let windows = config.windows(spec.num_layers, window, |layer| !(layer + 1).is_multiple_of(pattern))?;
    let rotary = cohere::rotary(config, &spec, 10_000.0)?;
    spec.rotary = windows.iter().map(|window| window.map(|_| rotary.clone())).collect();
    spec.attention.windows = windows;
    Ok(spec)
}
