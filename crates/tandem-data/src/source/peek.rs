//! A look at rows before anything is tokenised: columns and use of the first one, and their number.

use serde_json::{Map, Value};

use crate::error::DataError;
use crate::place::Place;
use crate::record::{KNOWN_KEYS, Record, RowKind};
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

/// Returns the uses that the first row has all keys for. A prompt beside anything that other uses read
/// is not for generation.
///
/// # Errors
/// As [`first_row`].
pub fn fitting_kinds(sources: &Sources) -> Result<Vec<RowKind>, DataError> {
    let Some(row) = first_row(sources)? else { return Ok(Vec::new()) };
    let is_answered = KNOWN_KEYS.iter().any(|&key| key != "prompt" && row.contains_key(key));
    let path = sources.0.first().map(|source| source.path.clone()).unwrap_or_default();
    let place = Place { path, line: 1 };
    let json = serde_json::to_vec(&row).expect("a row that was read can be written");
    let fits = |kind: &RowKind| {
        (*kind != RowKind::Prompt || !is_answered)
            && Record::parse_row(&json, *kind, &Columns::default(), &place)
                .is_ok_and(|parsed| parsed.dropped.is_some() || !parsed.records.is_empty())
    };
    let kinds =
        [RowKind::Supervised, RowKind::Preference, RowKind::Unpaired, RowKind::Reward, RowKind::Prompt];
    Ok(kinds.into_iter().filter(fits).collect())
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

    #[test]
    fn the_first_row_shows_its_uses() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        for (row, kinds) in [
            (r#"{"prompt": "p"}"#, &[RowKind::Prompt][..]),
            (r#"{"prompt": "p", "answer": "8"}"#, &[RowKind::Prompt]),
            (r#"{"prompt": "p", "completion": "c"}"#, &[RowKind::Supervised]),
            (r#"{"text": "t"}"#, &[RowKind::Supervised]),
            (r#"{"prompt": "p", "completion": "c", "label": true}"#, &[RowKind::Unpaired]),
            (
                r#"{"prompt": "p", "chosen": "c", "rejected": "r"}"#,
                &[RowKind::Preference, RowKind::Unpaired, RowKind::Reward],
            ),
            (
                r#"{"question": "q", "answers": [{"text": "a", "pm_score": 1}]}"#,
                &[RowKind::Preference, RowKind::Unpaired, RowKind::Reward],
            ),
            (r#"{"colour": "red"}"#, &[]),
        ] {
            std::fs::write(&path, row).unwrap();
            assert_eq!(fitting_kinds(&Sources(vec![Source::new(path.clone())])).unwrap(), kinds, "{row}");
        }
    }
}
