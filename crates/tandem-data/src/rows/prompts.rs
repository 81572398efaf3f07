//! Prompt files in memory: rows with a prompt to complete, kept whole for judges.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::DataError;
use crate::place::Place;
use crate::rows::row::{RowOptions, TokenRow, tokenise};
use crate::source::columns::Columns;
use crate::source::reader::RowReader;
use crate::source::record::{Content, Record, RowKind, Text};
use crate::source::{Sources, files};
use crate::text::tokenizer::Tokenizer;

/// A row with a `prompt`.
#[derive(Clone, Debug)]
pub struct PromptRow {
    /// File and line.
    pub place: Place,
    pub(super) record: Record,
}

impl PromptRow {
    /// Reads a row from its JSON.
    pub fn parse(json: &[u8], place: Place) -> Result<Self, DataError> {
        let record = Record::parse(json, RowKind::Prompt, &place)?;
        Ok(Self { place, record })
    }

    /// Returns the prompt.
    pub fn prompt(&self) -> &Text {
        match &self.record.content {
            Content::Prompt(prompt) => prompt,
            _ => unreachable!("it was read as a prompt"),
        }
    }

    /// Returns the whole row.
    pub fn row(&self) -> &Map<String, Value> {
        self.record.row.as_ref().expect("kept with a prompt")
    }

    /// Returns the prompt's tokens up to the start of the response; empty for an empty text.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, DataError> {
        Ok(match tokenise(&self.record, tokenizer, &RowOptions::new(RowKind::Prompt))?.row {
            Some(TokenRow::Prompt { tokens, .. }) => tokens,
            _ => Vec::new(),
        })
    }
}

/// Reads rows with a `prompt`, text or messages, of a file, a pattern of files, or a folder that
/// `save_to_disk` of datasets wrote.
pub fn read(path: &Path) -> Result<Vec<PromptRow>, DataError> {
    let mut rows = Vec::new();
    for path in files::expand(&Sources::from(path))?.paths() {
        let mut reader = RowReader::open(&path, &Columns::default())?;
        while let Some(raw) = reader.next_row()? {
            let place = Place { path: path.clone(), line: raw.line };
            rows.push(PromptRow::parse(&raw.text, place)?);
        }
    }
    if rows.is_empty() {
        return Err(DataError::Empty { files: path.display().to_string() });
    }
    Ok(rows)
}
