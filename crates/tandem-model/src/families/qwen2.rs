//! Qwen 2 and 2.5: Llama with biases on queries, keys and values, and optional sliding windows.

use super::{Family, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family =
    Family { model_type: "qwen2", architecture: "Qwen2ForCausalLM", read, ..llama::FAMILY };

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::descendant(config, None)?;
    spec.attention.qkv_bias = true;
    spec.attention.windows = config.windows(spec.num_layers)?;
    Ok(spec)
}
