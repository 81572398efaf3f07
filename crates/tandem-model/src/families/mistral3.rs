//! Mistral Small 3.1 and Ministral 3 with a vision tower: the text model is [`super::mistral`] or
//! [`super::ministral3`].

use super::{Family, llama, ministral3, mistral};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "mistral3",
    architecture: "Mistral3ForConditionalGeneration",
    base_prefix: "",
    read,
    prefixes: &[("model", "language_model.model"), ("lm_head", "language_model.lm_head")],
    renamed: &[("language_model.model", "model.language_model"), ("language_model.lm_head", "lm_head")],
    has_scorer: false,
    beside: &[
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ],
    ..llama::FAMILY
};

/// Sizes that the text config leaves out where they are those of `MistralConfig` and
/// `Ministral3Config`.
const DEFAULTS: &[(&str, u64)] = &[
    ("hidden_size", 4096),
    ("intermediate_size", 14_336),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 8),
];
/// Those of `MistralConfig` alone.
const MISTRAL: &[(&str, u64)] =
    &[("vocab_size", 32_000), ("num_hidden_layers", 32), ("max_position_embeddings", 131_072)];
/// Those of `Ministral3Config` alone.
const MINISTRAL: &[(&str, u64)] =
    &[("vocab_size", 131_072), ("num_hidden_layers", 34), ("max_position_embeddings", 262_144)];

fn read(config: &Config) -> Result<DecoderSpec> {
    let text = config.text_config()?.with_defaults(DEFAULTS);
    let mut spec = match text.expect_word("model_type", &["mistral", "ministral3"])? {
        "ministral3" => ministral3::FAMILY.spec(&text.with_defaults(MINISTRAL))?,
        _ => mistral::FAMILY.spec(&text.with_defaults(MISTRAL))?,
    };
    spec.head.tied = config.flag("tie_word_embeddings", true)?;
    Ok(spec)
}
