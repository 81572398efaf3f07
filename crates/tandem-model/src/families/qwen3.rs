//! Qwen 3 (dense): Llama with a norm on each query and key head, and optional sliding windows.

use super::{Family, llama, qwen2};
use crate::Result;
use crate::spec::{Config, DecoderSpec, QkNorm};

pub(super) const FAMILY: Family =
    Family { model_type: "qwen3", architecture: "Qwen3ForCausalLM", read, ..llama::FAMILY };

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = llama::descendant(config, Some(128))?;
    let bias = config.flag("attention_bias", false)?;
    (spec.attention.qkv_bias, spec.attention.out_bias) = (bias, bias);
    spec.attention.qk_norm = Some(QkNorm::PerHead);
    spec.attention.windows = qwen2::windows(config, spec.num_layers)?;
    Ok(spec)
}
