//! Qwen 3 VL: its text model is [`super::qwen3`] without windows. Of text alone, the three positions of a
//! token are one.

use super::{Family, llama, qwen3};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_vl",
    architecture: "Qwen3VLForConditionalGeneration",
    base_prefix: "",
    read,
    prefixes: &[("model", "model.language_model")],
    has_scorer: false,
    beside: &["model.visual.", "visual."],
    ..llama::FAMILY
};

/// Sizes that the text config leaves out where they are those of `Qwen3VLTextConfig`.
const DEFAULTS: &[(&str, u64)] = &[
    ("vocab_size", 151_936),
    ("hidden_size", 4096),
    ("intermediate_size", 22_016),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 32),
    ("max_position_embeddings", 128_000),
    ("rope_theta", 500_000),
];

fn read(config: &Config) -> Result<DecoderSpec> {
    let text = config.text_config()?.without_mrope().with_defaults(DEFAULTS);
    let mut spec = qwen3::without_windows(&text)?;
    spec.head.tied = config.flag("tie_word_embeddings", false)?;
    Ok(spec)
}
