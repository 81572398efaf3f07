//! Qwen 2 and 2.5: Llama with biases on queries, keys and values, and optional sliding windows.

use super::{Family, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family =
    Family { model_type: "qwen2", architecture: "Qwen2ForCausalLM", read, ..llama::FAMILY };

pub(super) fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::descendant(config, None)?;
    spec.attention.qkv_bias = true;
    spec.attention.windows = windows(config, spec.num_layers)?;
    Ok(spec)
}

/// Reads the windows of Qwen 2 and 3, which slide from `max_window_layers` on if they are used at all.
pub(super) fn windows(config: &Config, layers: usize) -> Result<Vec<Option<u32>>> {
    let used = config.flag("use_sliding_window", false)?;
    let window = config.sliding_window(Some(4096))?.filter(|_| used);
    let first = config.count_or_zero("max_window_layers")?.unwrap_or(28);
    config.windows(layers, window, |layer| window.is_some() && layer >= first)
}
