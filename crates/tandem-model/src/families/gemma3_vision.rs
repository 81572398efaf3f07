//! Gemma 3 with a vision tower: its text model is [`super::gemma3`]. Names are as in [`super::mistral3`].

use super::{Family, gemma2, gemma3, mistral3};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "gemma3",
    architecture: "Gemma3ForConditionalGeneration",
    read,
    modules: gemma2::MODULES,
    ..mistral3::FAMILY
};

/// Sizes that the text config leaves out where they are those of `Gemma3TextConfig`.
const DEFAULTS: &[(&str, u64)] = &[
    ("vocab_size", 262_208),
    ("hidden_size", 2304),
    ("intermediate_size", 9216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("max_position_embeddings", 131_072),
];

fn read(config: &Config) -> Result<DecoderSpec> {
    let text = config.text_config()?.with_defaults(DEFAULTS);
    text.expect_word("model_type", &["gemma3_text"])?;
    let mut spec = gemma3::FAMILY.spec(&text)?;
    // The class of transformers puts no cap on its logits, whatever the text config says.
    spec.head.shape.softcap = None;
    spec.head.tied = config.flag("tie_word_embeddings", true)?;
    Ok(spec)
}
