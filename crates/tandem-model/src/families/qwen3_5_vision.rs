//! Qwen 3.5 with images: its text model is [`super::qwen3_5`]. Of text alone, the three positions of a
//! token are one.

use super::{Family, llama, qwen3_5};
use crate::Result;
use crate::spec::{Config, DecoderSpec};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_5",
    architecture: "Qwen3_5ForConditionalGeneration",
    base_prefix: "",
    read,
    modules: qwen3_5::MODULES,
    prefixes: &[("model", "model.language_model")],
    has_scorer: false,
    beside: &["model.visual.", "visual.", "mtp."],
    ..llama::FAMILY
};

fn read(config: &Config) -> Result<DecoderSpec> {
    let mut spec = qwen3_5::read(&config.text_config()?)?;
    spec.head.tied = config.flag("tie_word_embeddings", false)?;
    Ok(spec)
}
