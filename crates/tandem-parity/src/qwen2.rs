//! Qwen2's tokenizer as the goldens had it.
//!
//! transformers 5 reads the vocabulary of a `qwen2` folder's `tokenizer.json` and replaces its
//! normaliser and pre-tokenizer by Qwen2's own: NFC, and every digit a token. The folder's numbers
//! come from those tokens. Tandem follows the folder's file, so the folder that it compares with
//! gets the replaced parts.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use tandem_data::record::RowKind;
use tandem_data::row::{RowOptions, TokenRow};
use tandem_data::tokenizer::Tokenizer;

use crate::numbers::{data_file, read_json};
use crate::runner::Runner;
use crate::tokens::tokens;

/// Split of transformers 5.23's `Qwen2Tokenizer`.
const PATTERN: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/// Returns the folder of a model, or a copy of it with the tokenizer that transformers makes of it.
pub(crate) fn model_folder(folder: &Path, model: &str, runner: &Runner) -> Result<PathBuf> {
    let original = folder.join("models").join(model);
    if !is_replaced(&original)? {
        return Ok(original);
    }
    let copy = runner.subfolder(model)?;
    for entry in std::fs::read_dir(&original)? {
        let entry = entry?;
        std::fs::copy(entry.path(), copy.join(entry.file_name()))?;
    }
    let mut tokenizer = read_json(&original.join("tokenizer.json"))?;
    tokenizer["normalizer"] = json!({"type": "NFC"});
    tokenizer["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]});
    let path = copy.join("tokenizer.json");
    // A read-only original makes a read-only copy.
    std::fs::remove_file(&path)?;
    std::fs::write(&path, tokenizer.to_string()).with_context(|| path.display().to_string())?;
    Ok(copy)
}

fn is_replaced(folder: &Path) -> Result<bool> {
    Ok(read_json(&folder.join("config.json"))?["model_type"] == "qwen2")
}

/// Returns the rows of `tokens.json` for one model: the file's, or those of the replaced tokenizer.
pub(crate) fn rows(
    folder: &Path,
    model: &str,
    data: &str,
    stored: &serde_json::Value,
    runner: &Runner,
) -> Result<Vec<serde_json::Value>> {
    let stored = stored["rows"].as_array().context("tokens.json holds no rows")?;
    if !is_replaced(&folder.join("models").join(model))? {
        return Ok(stored.clone());
    }
    let tokenizer = Tokenizer::from_folder(model_folder(folder, model, runner)?)?;
    let options = RowOptions { max_length: Some(1024), ..RowOptions::new(RowKind::Preference) };
    let path = data_file(folder, data);
    let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let row = |line: &str| match tokens(line, &tokenizer, &options) {
        Ok(Some(TokenRow::Pair { prompt, chosen, rejected, .. })) => {
            Ok(json!({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}))
        }
        Ok(_) => anyhow::bail!("{}: a row without a pair", path.display()),
        Err(reason) => anyhow::bail!("{}: {reason}", path.display()),
    };
    text.lines().take(stored.len()).map(row).collect()
}
