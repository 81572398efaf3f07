//! Qwen 3 (dense): Llama with a norm on each query and key head, and optional sliding windows.

use super::{Family, attention_bias, llama, qwen2};
use crate::Result;
use crate::spec::{Config, DecoderSpec, QkNorm};

pub(super) const FAMILY: Family =
    Family { model_type: "qwen3", architecture: "Qwen3ForCausalLM", read, ..llama::FAMILY };

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = without_windows(config)?;
    spec.attention.windows = qwen2::windows(config, spec.num_layers)?;
    Ok(spec)
}

/// Reads all but the windows, which Qwen 3 VL has not.
pub(super) fn without_windows(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::descendant(config, Some(128))?;
    attention_bias(config, &mut spec)?;
    spec.attention.qk_norm = Some(QkNorm::PerHead);
    Ok(spec)
}
