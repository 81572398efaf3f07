//! Prompts that are to be answered, with the rest of their rows: a file of them in memory.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::DataError;
use crate::place::Place;
use crate::rows::row::{RowOptions, TokenRow, tokenise};
use crate::source::reader::RowReader;
use crate::source::record::{Content, Kind, Record, Text};
use crate::text::tokenizer::Tokenizer;

/// A row with a `prompt`.
#[derive(Clone, Debug)]
pub struct PromptRow {
    /// File and line.
    pub place: Place,
    record: Record,
}

impl PromptRow {
    /// What is to be answered.
    pub fn prompt(&self) -> &Text {
        match &self.record.content {
            Content::Prompt(prompt) => prompt,
            _ => unreachable!("it was read as a prompt"),
        }
    }

    /// The row as it stands.
    pub fn row(&self) -> &Map<String, Value> {
        self.record.row.as_ref().expect("kept with a prompt")
    }

    /// The prompt's tokens, up to where an answer begins; none of an empty text.
    ///
    /// # Errors
    /// If there is no chat template for a conversation, the template fails, or the tokenizer refuses.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, DataError> {
        Ok(match tokenise(&self.record, tokenizer, &RowOptions::new(Kind::Prompt))?.row {
            Some(TokenRow::Prompt { tokens, .. }) => tokens,
            _ => Vec::new(),
        })
    }
}

/// Reads a JSONL or JSON file of rows with a `prompt`: a text, or messages.
///
/// # Errors
/// If it cannot be read, has no row, or a row is broken.
pub fn read(path: &Path) -> Result<Vec<PromptRow>, DataError> {
    let mut reader = RowReader::open(path)?;
    let mut rows = Vec::new();
    while let Some(raw) = reader.next_row()? {
        let place = Place { path: path.to_path_buf(), line: raw.line };
        let record = Record::parse(&raw.text, Kind::Prompt, &place)?;
        rows.push(PromptRow { place, record });
    }
    if rows.is_empty() {
        return Err(DataError::Empty { files: path.display().to_string() });
    }
    Ok(rows)
}
