//! A look at rows before anything is tokenised: columns of the first one, and their number.

use serde_json::{Map, Value};

use crate::error::DataError;
use crate::source::Sources;
use crate::source::columns::Columns;
use crate::source::files::{expand, refuse};
use crate::source::reader::RowReader;

/// Returns the first row of the first file that has one, as it is in the file.
///
/// # Errors
/// A pattern without a match, a file that cannot be read, or a row that is no JSON object.
pub fn first_row(sources: &Sources) -> Result<Option<Map<String, Value>>, DataError> {
    for source in &expand(sources)?.0 {
        let Some(row) = RowReader::open(&source.path, &Columns::default())?.next_row()? else { continue };
        let row = serde_json::from_slice(&row.text)
            .map_err(|error| refuse(&source.path, format!("line {}: no JSON object: {error}", row.line)))?;
        return Ok(Some(row));
    }
    Ok(None)
}

/// Counts the rows of an epoch, without blank lines and before any is dropped.
///
/// # Errors
/// As [`first_row`].
pub fn count_rows(sources: &Sources) -> Result<u64, DataError> {
    let mut count = 0;
    for source in &expand(sources)?.0 {
        let mut reader = RowReader::open(&source.path, &Columns::default())?;
        let mut rows = 0;
        while reader.next_row()?.is_some() {
            count += source.copies(rows);
            rows += 1;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Source;

    #[test]
    fn the_first_row_and_the_number_of_rows_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("empty.jsonl"), "\n").unwrap();
        std::fs::write(path("a.jsonl"), "{\"prompt\": \"p\", \"chosen\": 1}\n\n{}\n{}\n").unwrap();
        let sources = Sources(vec![Source::new(path("empty.jsonl")), Source::new(path("a.jsonl"))]);
        let row = first_row(&sources).unwrap().unwrap();
        assert_eq!(row.keys().collect::<Vec<_>>(), ["prompt", "chosen"]);
        assert_eq!(count_rows(&sources).unwrap(), 3);
        let twice = Sources(vec![Source { path: path("a.jsonl"), weight: 2.0 }]);
        assert_eq!(count_rows(&twice).unwrap(), 6);
        assert_eq!(first_row(&Sources(vec![Source::new(path("empty.jsonl"))])).unwrap(), None);
    }
}
