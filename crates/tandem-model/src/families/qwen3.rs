//! Qwen 3 (dense): Llama with a norm on each query and key head, and optional sliding windows.

use super::{Family, llama};
use crate::Result;
use crate::layout::Part;
use crate::spec::Config;
use crate::spec::DecoderSpec;

/// `Qwen3ForCausalLM`.
pub struct Qwen3;

impl Family for Qwen3 {
    fn model_type(&self) -> &'static str {
        "qwen3"
    }

    fn architecture(&self) -> &'static str {
        "Qwen3ForCausalLM"
    }

    fn base_prefix(&self) -> &'static str {
        "model."
    }

    fn spec(&self, config: &Config) -> Result<DecoderSpec> {
        let mut spec = llama::spec(config, self.model_type(), Some(128))?;
        let bias = config.flag("attention_bias", false)?;
        (spec.attention.qkv_bias, spec.attention.out_bias) = (bias, bias);
        spec.attention.qk_norm = true;
        spec.attention.windows = config.windows(spec.num_layers)?;
        Ok(spec)
    }

    fn names(&self, part: Part) -> &'static [&'static str] {
        llama::names(part)
    }
}
