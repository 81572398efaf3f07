//! Files that a path stands for: itself, the matches of a pattern, or those of a saved data set.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tandem_files::MAX_CONFIG;

use crate::error::DataError;
use crate::source::columns::Columns;
use crate::source::reader::RowReader;
use crate::source::{Source, Sources};

/// Returns the names of all columns, or `None` if a file of JSON, which lists none, is among them.
///
/// # Errors
/// A pattern without a match, or a file that cannot be opened.
pub fn listed_columns(sources: &Sources) -> Result<Option<BTreeSet<String>>, DataError> {
    let mut found = BTreeSet::new();
    for source in &expand(sources)?.0 {
        let reader = RowReader::open(&source.path, &Columns::default())?;
        let Some(columns) = reader.columns() else { return Ok(None) };
        found.extend(columns);
    }
    Ok(Some(found))
}

/// Replaces patterns and folders by their files, in the order of their names or of the data set.
pub(crate) fn expand(sources: &Sources) -> Result<Sources, DataError> {
    let mut files = Vec::new();
    for source in &sources.0 {
        let paths = expand_path(&source.path)?;
        files.extend(paths.into_iter().map(|path| Source { path, weight: source.weight }));
    }
    Ok(Sources(files))
}

fn expand_path(path: &Path) -> Result<Vec<PathBuf>, DataError> {
    if path.is_dir() {
        return saved_files(path);
    }
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        // It is hashed before it is read, so a pipe would be empty by then.
        return Err(refuse(
            path,
            "not a regular file, and rows are read more than once: write them to a file",
        ));
    }
    let text = path.to_string_lossy();
    // A file may have such a character in its name.
    if path.exists() || !text.contains(['*', '?', '[']) {
        return Ok(vec![path.to_path_buf()]);
    }
    let found = glob::glob(&text).map_err(|e| refuse(path, format!("not a pattern of files: {e}")))?;
    let (mut files, mut seen) = (Vec::new(), BTreeSet::new());
    for file in found {
        let file = file.map_err(|e| DataError::io("listing", path)(e.into()))?;
        // A link to a folder above shows the same files again and again.
        let folder = file.parent().and_then(|folder| folder.canonicalize().ok());
        if file.is_file() && seen.insert((folder, file.file_name().map(OsString::from))) {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(refuse(path, "no file matches this pattern"));
    }
    Ok(files)
}

/// Returns the files of a folder that `Dataset.save_to_disk` of datasets wrote.
fn saved_files(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let read = |name: &str| -> Result<Option<Value>, DataError> {
        let path = folder.join(name);
        if !path.exists() {
            return Ok(None);
        }
        let text = tandem_files::read(&path, MAX_CONFIG).map_err(DataError::io("reading", &path))?;
        serde_json::from_slice(&text).map(Some).map_err(|e| refuse(&path, format!("not valid JSON: {e}")))
    };
    if let Some(splits) = read("dataset_dict.json")? {
        let names = splits["splits"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let names: Vec<_> = names.map(|name| folder.join(name).display().to_string()).collect();
        return Err(refuse(
            folder,
            format!("a data set of several splits: give one, {}", names.join(" or ")),
        ));
    }
    let Some(state) = read("state.json")? else {
        let pattern = folder.join("*.parquet");
        return Err(refuse(
            folder,
            format!(
                "a folder that save_to_disk of datasets did not write (no state.json): give its files, for example {}",
                pattern.display()
            ),
        ));
    };
    let names = state["_data_files"].as_array().into_iter().flatten();
    let files: Option<Vec<_>> =
        names.map(|file| file["filename"].as_str().map(|name| folder.join(name))).collect();
    match files {
        Some(files) if !files.is_empty() => Ok(files),
        _ => Err(refuse(&folder.join("state.json"), "`_data_files` names no file: save the data set again")),
    }
}

pub(crate) fn refuse(path: &Path, reason: impl Into<String>) -> DataError {
    DataError::File { path: path.to_path_buf(), reason: reason.into() }
}
