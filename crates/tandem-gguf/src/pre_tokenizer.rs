//! Pre-tokenizers that `tokenizer.ggml.pre` names.

use serde_json::{Value as Json, json};

/// Pre-tokenizer and normalizer of a `tokenizer.json`.
pub(crate) struct PreTokenizer {
    pub(crate) pre_tokenizer: Json,
    pub(crate) normalizer: Json,
    /// Whether a word of the vocabulary is one token, whatever the merges.
    pub(crate) ignore_merges: bool,
    /// Whether a BOS comes first where the metadata do not say.
    pub(crate) adds_bos: bool,
}

/// Names of `tokenizer.ggml.pre` that are known.
pub(crate) const KNOWN: [&str; 5] = ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"];

/// Finds the pre-tokenizer of that name.
pub(crate) fn named(pre: &str) -> Option<PreTokenizer> {
    let byte_level = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let sequence = |first: Json, second: Json| json!({"type": "Sequence", "pretokenizers": [first, second]});
    let plain = |pre_tokenizer: Json| PreTokenizer {
        pre_tokenizer,
        normalizer: Json::Null,
        ignore_merges: false,
        adds_bos: false,
    };
    Some(match pre {
        "default" | "gpt-2" => plain(byte_level(true)),
        "smollm" => plain(sequence(json!({"type": "Digits", "individual_digits": true}), byte_level(true))),
        "llama-bpe" => PreTokenizer {
            ignore_merges: true,
            adds_bos: true,
            ..plain(sequence(split(r"\p{N}{1,3}"), byte_level(false)))
        },
        "qwen2" => PreTokenizer {
            normalizer: json!({"type": "NFC"}),
            ..plain(sequence(split(r"\p{N}"), byte_level(false)))
        },
        _ => return None,
    })
}

/// Splits as GPT-4's tokenizer and its descendants, with this pattern for numbers.
fn split(numbers: &str) -> Json {
    let alternatives = [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        numbers,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ];
    json!({
        "type": "Split",
        "pattern": {"Regex": alternatives.join("|")},
        "behavior": "Isolated",
        "invert": false,
    })
}
