//! Mistral: Llama with one sliding window in every layer.

use super::{Family, llama};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family =
    Family { model_type: "mistral", architecture: "MistralForCausalLM", read, ..llama::FAMILY };

pub(super) fn read(config: &Config) -> Result<DecoderSpec> {
    // transformers ignores the key in this family, and windows every layer.
    config.refuse_key("layer_types")?;
    let mut spec = llama::descendant(config, None)?;
    spec.attention.windows = vec![config.sliding_window(Some(4096))?; spec.num_layers];
    Ok(spec)
}
