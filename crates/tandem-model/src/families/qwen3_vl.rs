//! Qwen 3 VL: its text model is [`super::qwen3`] without windows. Of text alone, the three positions of a
//! token are one.

use super::{Family, llama};
use crate::Result;
use crate::layout::ParamKind::*;
use crate::spec::{Config, DecoderSpec, QkNorm};

pub(super) const FAMILY: Family = Family {
    model_type: "qwen3_vl",
    architecture: "Qwen3VLForConditionalGeneration",
    base_prefix: "",
    read,
    modules: llama::modules!("model.language_model", "lm_head"),
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
    let mut spec = llama::descendant(&text, Some(128))?;
    let bias = text.flag("attention_bias", false)?;
    (spec.attention.qkv_bias, spec.attention.out_bias) = (bias, bias);
    spec.attention.qk_norm = Some(QkNorm::PerHead);
    spec.head.tied = config.flag("tie_word_embeddings", false)?;
    Ok(spec)
}
