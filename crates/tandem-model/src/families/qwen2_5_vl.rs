//! Qwen 2.5 VL: its text model is [`super::qwen2`]. Of text alone, the three positions of a token are
//! one.

use super::{Family, llama, qwen2};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen2_5_vl",
    architecture: "Qwen2_5_VLForConditionalGeneration",
    base_prefix: "",
    read,
    renamed: &[("model", "model.language_model")],
    has_scorer: false,
    beside: &["visual.", "model.visual."],
    ..llama::FAMILY
};

/// Sizes that the text config leaves out where they are those of `Qwen2_5_VLTextConfig`.
const DEFAULTS: &[(&str, u64)] = &[
    ("vocab_size", 152_064),
    ("hidden_size", 8192),
    ("intermediate_size", 29_568),
    ("num_hidden_layers", 80),
    ("num_attention_heads", 64),
    ("num_key_value_heads", 8),
    ("max_position_embeddings", 32_768),
    ("max_window_layers", 80),
    ("rope_theta", 1_000_000),
];

fn read(config: &Config) -> Result<DecoderSpec> {
    let text = config.text_config()?.without_mrope().with_defaults(DEFAULTS);
    let mut spec = qwen2::read(&text)?;
    spec.norm.eps = text.epsilon("rms_norm_eps", 1e-5)? as f32;
    spec.head.tied = config.flag("tie_word_embeddings", false)? || text.flag("tie_word_embeddings", false)?;
    Ok(spec)
}
