//! Qwen 2 and 2.5: Llama with biases on queries, keys and values, and optional sliding windows.

use super::{Family, llama};
use crate::Result;
use crate::layout::Part;
use crate::spec::Config;
use crate::spec::DecoderSpec;

/// `Qwen2ForCausalLM`.
pub struct Qwen2;

impl Family for Qwen2 {
    fn model_type(&self) -> &'static str {
        "qwen2"
    }

    fn architecture(&self) -> &'static str {
        "Qwen2ForCausalLM"
    }

    fn base_prefix(&self) -> &'static str {
        "model."
    }

    fn spec(&self, config: &Config) -> Result<DecoderSpec> {
        let mut spec = llama::spec(config, self.model_type(), None)?;
        spec.attention.qkv_bias = true;
        spec.attention.windows = config.windows(spec.num_layers)?;
        Ok(spec)
    }

    fn names(&self, part: Part) -> &'static [&'static str] {
        llama::names(part)
    }
}
