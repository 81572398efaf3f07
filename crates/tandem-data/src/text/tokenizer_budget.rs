//! Bounds on a tokenizer: lengths of added tokens, and how much longer a text may become.
//!
//! A tokenizer comes with a model from anywhere. Looking for added tokens takes memory and time by the
//! square of their lengths, and a normaliser may write a thousand letters for one, again and again.

use serde::Deserialize;
use serde_json::Value;

/// Longest added or special token, in bytes.
const MAX_TOKEN: usize = 1024;

/// Bytes of all added tokens.
const MAX_TOKENS: usize = 16 << 20;

/// Factor by which all steps of a normaliser, or of a decoder, may lengthen a text. One that writes `▁` for a
/// space and before the text has 12.
const MAX_GROWTH: f64 = 256.0;

/// Pieces of a template that is put around a text.
const MAX_PIECES: usize = 64;

/// Values of a `tokenizer.json`. A vocabulary of 262,144 with twice as many merges has 1.4 million; the
/// library holds each in some hundred bytes while it reads.
const MAX_VALUES: usize = 3_000_000;

/// Added tokens.
const MAX_ADDED: usize = 100_000;

/// Part of a `tokenizer.json`.
#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
}

/// Checks the size of a `tokenizer.json` and its added tokens, before a tokenizer is made of it.
pub(super) fn check_size(json: &[u8]) -> Result<(), String> {
    let values = 1 + json.iter().filter(|byte| **byte == b',').count();
    if values > MAX_VALUES {
        return Err(format!("about {values} values, expected at most {MAX_VALUES}"));
    }
    let AddedTokens { added_tokens } = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    check_tokens(added_tokens.iter().map(|token| &*token.content))
}

/// Checks tokens that are searched for in each text.
pub(super) fn check_tokens<'a>(tokens: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let (mut all, mut count) = (0, 0);
    for token in tokens {
        count += 1;
        if token.len() > MAX_TOKEN {
            let beginning: String = token.chars().take(40).collect();
            return Err(format!(
                "the special token {beginning:?}… has {} bytes, expected at most {MAX_TOKEN}",
                token.len()
            ));
        }
        all += token.len();
    }
    if all > MAX_TOKENS {
        return Err(format!("the added tokens have {all} bytes, expected at most {} MiB", MAX_TOKENS >> 20));
    }
    if count > MAX_ADDED {
        return Err(format!("{count} added tokens, expected at most {MAX_ADDED}"));
    }
    Ok(())
}

/// Checks how much a tokenizer's steps may lengthen a text.
pub(super) fn check_growth(tokenizer: &tokenizers::Tokenizer) -> Result<(), String> {
    let json = |part: serde_json::Result<Value>| part.unwrap_or_default();
    let parts = [
        ("normalizer", json(serde_json::to_value(tokenizer.get_normalizer()))),
        ("decoder", json(serde_json::to_value(tokenizer.get_decoder()))),
    ];
    for (name, part) in parts {
        let growth = growth(&part);
        if growth > MAX_GROWTH {
            return Err(format!(
                "its {name} may make a text {growth:.0} times as long, expected at most {MAX_GROWTH} times"
            ));
        }
    }
    let template = json(serde_json::to_value(tokenizer.get_post_processor()));
    match pieces(&template) {
        pieces if pieces <= MAX_PIECES => Ok(()),
        pieces => {
            Err(format!("its post_processor puts {pieces} pieces together, expected at most {MAX_PIECES}"))
        }
    }
}

/// Returns a bound on the factor by which a step, or a sequence of them, lengthens a text.
fn growth(step: &Value) -> f64 {
    let len = |key: &str| step[key].as_str().map_or(0, str::len) as f64;
    match step["type"].as_str() {
        Some("Sequence") => {
            let steps = ["normalizers", "decoders"].iter().filter_map(|key| step[*key].as_array()).flatten();
            steps.map(growth).product()
        }
        Some("Replace") => {
            let content = len("content");
            match step["pattern"]["String"].as_str() {
                Some(pattern) => (content / pattern.len().max(1) as f64).max(1.0),
                // A regular expression may match each letter, or between them.
                None => 1.0 + content,
            }
        }
        Some("Prepend") => 1.0 + len("prepend"),
        // The characters of Unicode that decompose most.
        Some("NFKC" | "NFKD" | "NFC" | "NFD") => 2.0,
        _ => 1.0,
    }
}

/// Returns the number of pieces that a post-processor puts together: copies of the text, and tokens.
fn pieces(processor: &Value) -> usize {
    let count = |value: &Value| value.as_array().map_or(0, Vec::len);
    match processor["type"].as_str() {
        Some("Sequence") => {
            processor["processors"].as_array().into_iter().flatten().map(pieces).fold(0, usize::max)
        }
        Some("TemplateProcessing") => {
            let tokens =
                processor["special_tokens"].as_object().into_iter().flat_map(serde_json::Map::values);
            let ids = tokens.map(|token| count(&token["ids"])).fold(1, usize::max);
            count(&processor["single"]).saturating_mul(ids)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn growth_is_that_of_all_steps() {
        let replace = |pattern: Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
        let llama = json!({ "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": "▁" },
            replace(json!({ "String": " " }), "▁"),
        ] });
        assert_eq!(growth(&llama), 12.0);
        assert_eq!(growth(&replace(json!({ "String": "``" }), "\"")), 1.0);
        assert_eq!(growth(&replace(json!({ "Regex": "a?" }), "aaa")), 4.0);
        let bomb = json!({ "type": "Sequence", "normalizers": vec![replace(json!({ "String": "a" }), "aaaaaaaaaa"); 12] });
        assert_eq!(growth(&bomb), 1e12);
    }

    #[test]
    fn pieces_count_with_the_ids_of_a_token() {
        let template = json!({
            "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "special_tokens": { "<s>": { "id": "<s>", "ids": [1, 1, 1], "tokens": ["<s>", "<s>", "<s>"] } },
        });
        assert_eq!(pieces(&template), 6);
        assert_eq!(
            pieces(&json!({ "type": "Sequence", "processors": [template, { "type": "ByteLevel" }] })),
            6
        );
        assert_eq!(pieces(&Value::Null), 0);
    }

    #[test]
    fn long_tokens_are_refused_by_their_beginning() {
        let long = "ü".repeat(600);
        let error = check_tokens(["<s>", &long].into_iter()).unwrap_err();
        assert!(
            error.starts_with("the special token \"üüü")
                && error.ends_with("has 1200 bytes, expected at most 1024")
        );
        check_tokens(["<s>", &"a".repeat(1024)].into_iter()).unwrap();
        let json = json!({ "added_tokens": [{ "id": 3, "content": long }], "model": [[[]]] });
        check_size(json.to_string().as_bytes()).unwrap_err();
        let many = vec![0; MAX_VALUES + 1];
        check_size(json!({ "model": many }).to_string().as_bytes()).unwrap_err();
    }
}
