//! Exact comparison of token ids of every row and edge case.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;
use tandem_data::error::Place;
use tandem_data::record::{Record, RowKind};
use tandem_data::row::{RowOptions, TokenRow, Truncation, tokenise};
use tandem_data::tokenizer::Tokenizer;

use crate::numbers::{data_file, ids, read_json};
use crate::report::Report;

/// Checks `tokens.json` and `tokenization.json`.
pub(crate) fn check(folder: &Path, report: &mut Report) -> Result<()> {
    let rows = read_json(&folder.join("tokens.json"))?;
    let tokenizer = Tokenizer::from_folder(folder.join("tokenizer"))?;
    for (data, expected) in rows.as_object().into_iter().flatten() {
        let path = data_file(folder, data);
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let options = RowOptions { max_length: Some(1024), ..RowOptions::new(RowKind::Preference) };
        let expected = expected["rows"].as_array().context("tokens.json holds no rows")?;
        for (i, (line, expected)) in text.lines().zip(expected).enumerate() {
            let outcome = tokens(line, &tokenizer, &options);
            report.same(format!("tokens {data} row {i}"), outcome.and_then(|row| same(row, expected)));
        }
    }
    let cases = read_json(&folder.join("tokenization.json"))?;
    for (name, by_case) in cases.as_object().into_iter().flatten() {
        let tokenizer = Tokenizer::from_folder(folder.join(name))?;
        for (case, expected) in by_case.as_object().into_iter().flatten() {
            let label = format!("tokens {name} {case}");
            let mut options = RowOptions::new(RowKind::Preference);
            let mut words = case.split('|').skip(1);
            if let Some(max_length) = words.next() {
                let max_length = max_length.strip_prefix("max").context("no max_length in a case's name")?;
                options.max_length = Some(max_length.parse()?);
            }
            options.truncation = match words.next() {
                None | Some("keep_start") => Truncation::KeepStart,
                Some("keep_end") => Truncation::KeepEnd,
                Some(other) => {
                    report.not_implemented(label, format!("truncation {other}"));
                    continue;
                }
            };
            let outcome = tokens(&expected["input"].to_string(), &tokenizer, &options);
            report.same(label, outcome.and_then(|row| same(row, expected)));
        }
    }
    Ok(())
}

pub(crate) fn tokens(
    row: &str,
    tokenizer: &Tokenizer,
    options: &RowOptions,
) -> Result<Option<TokenRow>, String> {
    let place = Place { path: "golden".into(), line: 1 };
    let record = Record::parse(row.as_bytes(), RowKind::Preference, &place).map_err(|e| e.to_string())?;
    Ok(tokenise(&record, tokenizer, options).map_err(|e| e.to_string())?.row)
}

fn same(row: Option<TokenRow>, expected: &Value) -> Result<(), String> {
    let dropped = expected["dropped"] == true;
    let Some(pair) = row.as_ref().and_then(TokenRow::as_pair) else {
        return if dropped { Ok(()) } else { Err("dropped".to_owned()) };
    };
    if dropped {
        return Err("kept, expected to be dropped".to_owned());
    }
    // TRL truncates when it builds the batch, so a given batch counts.
    let expected = match expected.get("batch") {
        Some(batch) => [unpadded(batch, 0), unpadded(batch, 1)],
        None => ["chosen_ids", "rejected_ids"].map(|key| (ids(&expected["prompt_ids"]), ids(&expected[key]))),
    };
    let answers = [pair.chosen, pair.rejected];
    for ((prompt, answer), (theirs_prompt, theirs)) in pair.prompts().into_iter().zip(answers).zip(expected) {
        if (prompt, answer) != (&theirs_prompt[..], &theirs[..]) {
            return Err(format!("{prompt:?} + {answer:?}, expected {theirs_prompt:?} + {theirs:?}"));
        }
    }
    Ok(())
}

/// Prompt and completion of a row of a padded batch.
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
