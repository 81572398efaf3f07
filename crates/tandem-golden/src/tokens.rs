//! Token ids of every row and edge case: exactly.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use tandem_data::error::Place;
use tandem_data::record::{Kind, Record};
use tandem_data::row::{RowOptions, TokenRow, tokenise};
use tandem_data::tokenizer::Tokenizer;

use crate::numbers::data_file;
use crate::numbers::{ids, read_json};
use crate::report::Report;

/// Checks `tokens.json` and `tokenization.json`.
///
/// # Errors
/// If the folder's own files cannot be read.
pub fn check(folder: &Path, report: &mut Report) -> Result<()> {
    let rows = read_json(&folder.join("tokens.json"))?;
    let tokenizer = Tokenizer::from_folder(folder.join("tokenizer"))?;
    for (data, expected) in rows.as_object().into_iter().flatten() {
        let path = data_file(folder, data);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let expected = expected["rows"].as_array().context("tokens.json holds no rows")?;
        for (i, (line, expected)) in text.lines().zip(expected).enumerate() {
            let outcome = tokens(line, &tokenizer, Some(1024));
            report.same(format!("tokens {data} row {i}"), outcome.and_then(|row| same(row, expected)));
        }
    }
    let cases = read_json(&folder.join("tokenization.json"))?;
    for (name, by_case) in cases.as_object().into_iter().flatten() {
        let tokenizer = Tokenizer::from_folder(folder.join(name))?;
        for (case, expected) in by_case.as_object().into_iter().flatten() {
            let label = format!("tokens {name} {case}");
            let max_length = match case.split('|').skip(1).collect::<Vec<_>>()[..] {
                [] => None,
                [max, "keep_start"] => max.strip_prefix("max").and_then(|n| n.parse().ok()),
                _ => {
                    report.not_implemented(label, "truncation that keeps the end");
                    continue;
                }
            };
            let outcome = tokens(&expected["input"].to_string(), &tokenizer, max_length);
            report.same(label, outcome.and_then(|row| same(row, expected)));
        }
    }
    Ok(())
}

fn tokens(row: &str, tokenizer: &Tokenizer, max_length: Option<usize>) -> Result<Option<TokenRow>, String> {
    let place = Place { path: "golden".into(), line: 1 };
    let options = RowOptions { max_length, ..RowOptions::new(Kind::Preference) };
    let record = Record::parse(row.as_bytes(), Kind::Preference, &place).map_err(|e| e.to_string())?;
    Ok(tokenise(&record, tokenizer, &options).map_err(|e| e.to_string())?.row)
}

fn same(row: Option<TokenRow>, expected: &Value) -> Result<(), String> {
    let dropped = expected["dropped"] == true;
    let Some(TokenRow::Pair { prompt, chosen, rejected }) = row else {
        return if dropped { Ok(()) } else { Err("dropped".to_owned()) };
    };
    if dropped {
        return Err("kept, expected to be dropped".to_owned());
    }
    // Truncation happens when TRL makes the batch, so where a batch is given it is what counts.
    let expected = match expected.get("batch") {
        Some(batch) => [unpadded(batch, 0), unpadded(batch, 1)],
        None => ["chosen_ids", "rejected_ids"].map(|key| (ids(&expected["prompt_ids"]), ids(&expected[key]))),
    };
    for (answer, (theirs_prompt, theirs)) in [chosen, rejected].into_iter().zip(expected) {
        if (&prompt, &answer) != (&theirs_prompt, &theirs) {
            return Err(format!("{prompt:?} + {answer:?}, expected {theirs_prompt:?} + {theirs:?}"));
        }
    }
    Ok(())
}

/// Prompt and answer of a row of a padded batch.
fn unpadded(batch: &Value, row: usize) -> (Vec<u32>, Vec<u32>) {
    let [tokens, real, answer] =
        ["input_ids", "attention_mask", "completion_mask"].map(|key| ids(&batch[key][row]));
    let side = |wanted: u32| {
        let kept = tokens
            .iter()
            .zip(&real)
            .zip(&answer)
            .filter(|&((_, &real), &answer)| real == 1 && answer == wanted);
        kept.map(|((&token, _), _)| token).collect()
    };
    (side(0), side(1))
}
