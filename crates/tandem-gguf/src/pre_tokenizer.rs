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
pub(crate) const KNOWN: [&str; 19] = [
    "default",
    "gpt-2",
    "phi-2",
    "exaone4",
    "smollm",
    "starcoder",
    "refact",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "dbrx",
    "smaug-bpe",
    "chatglm-bpe",
    "glm4",
    "qwen2",
    "deepseek-r1-qwen",
    "tekken",
    "gpt-4o",
    "llama4",
];

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
        // llama.cpp's own: one list of patterns after another.
        "default" => plain(json!({"type": "Sequence", "pretokenizers": [
            isolated(&[r"[\p{P}\$\+<=>\^~\|]+"]),
            isolated(&[r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"]),
            isolated(&[r"\p{N}+"]),
            isolated(&[r"[0-9][0-9][0-9]"]),
            byte_level(false),
        ]})),
        "gpt-2" | "phi-2" | "exaone4" => plain(byte_level(true)),
        "smollm" | "starcoder" | "refact" => {
            plain(sequence(json!({"type": "Digits", "individual_digits": true}), byte_level(true)))
        }
        "llama-bpe" | "llama3" | "llama-v3" => PreTokenizer {
            ignore_merges: true,
            adds_bos: true,
            ..plain(sequence(split(r"\p{N}{1,3}"), byte_level(false)))
        },
        "dbrx" | "smaug-bpe" | "chatglm-bpe" => plain(sequence(split(r"\p{N}{1,3}"), byte_level(false))),
        "glm4" => {
            PreTokenizer { ignore_merges: true, ..plain(sequence(split(r"\p{N}{1,3}"), byte_level(false))) }
        }
        "deepseek-r1-qwen" => plain(sequence(split(r"\p{N}"), byte_level(false))),
        "tekken" => PreTokenizer {
            ignore_merges: true,
            adds_bos: true,
            ..plain(sequence(split_by_case("", r"\p{N}"), byte_level(false)))
        },
        "gpt-4o" | "llama4" => {
            let suffix = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?";
            plain(sequence(split_by_case(suffix, r"\p{N}{1,3}"), byte_level(false)))
        }
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
    isolated(&alternatives)
}

/// Splits as GPT-4o's tokenizer and Mistral's, where a capital begins a word: with this end of words,
/// and this pattern for numbers.
fn split_by_case(suffix: &str, numbers: &str) -> Json {
    let (upper, lower) = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]");
    let before = r"[^\r\n\p{L}\p{N}]?";
    isolated(&[
        &format!("{before}{upper}*{lower}+{suffix}"),
        &format!("{before}{upper}+{lower}*{suffix}"),
        numbers,
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ])
}

/// Splits at the matches of any of the patterns, each a piece of its own.
fn isolated(alternatives: &[&str]) -> Json {
    json!({
        "type": "Split",
        "pattern": {"Regex": alternatives.join("|")},
        "behavior": "Isolated",
        "invert": false,
    })
}
