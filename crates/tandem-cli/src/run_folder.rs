//! Folders of runs: where they are, their keys, and the keys in which they differ.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use tandem_files::MAX_CONFIG;
use tandem_train::config::RESOLVED_HEADER;
use toml::Value;

use crate::exit::mistake;

/// Levels of folders below a given one in which runs are looked for.
const DEPTH: usize = 3;

/// Resolved keys of a run, `table.key` → value.
pub(crate) type Keys = BTreeMap<String, Value>;

/// Returns whether the folder holds a run's metrics.
pub(crate) fn is_run(folder: &Path) -> bool {
    folder.join("config.toml").is_file() && folder.join("metrics.jsonl").is_file()
}

/// Returns whether a run has begun in the folder, even if it has no metrics yet.
pub(crate) fn is_begun(folder: &Path) -> bool {
    let has_config = || {
        let text = tandem_files::read_text(&folder.join("config.toml"), MAX_CONFIG);
        text.is_ok_and(|text| text.starts_with(RESOLVED_HEADER))
    };
    is_run(folder) || folder.join(".lock").is_file() || has_config()
}

/// Returns the folders at and below the given ones that `is_run` accepts, sorted.
///
/// # Errors
/// A given folder is missing or cannot be listed.
pub(crate) fn find(given: &[PathBuf], is_run: fn(&Path) -> bool) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for folder in given {
        if !folder.is_dir() {
            return Err(mistake(format!("{}: no such folder", folder.display())));
        }
        descend(folder, DEPTH, is_run, &mut found)
            .with_context(|| format!("cannot list {}", folder.display()))?;
    }
    found.sort();
    found.dedup();
    Ok(found)
}

/// Returns an error that names folders without a run, and what a run's folder has.
pub(crate) fn none_found(given: &[PathBuf]) -> anyhow::Error {
    let places: Vec<_> = given.iter().map(|folder| folder.display().to_string()).collect();
    mistake(format!("no run in {}: a run's folder has config.toml and metrics.jsonl", places.join(", ")))
}

/// Whether a folder that cannot be listed has been told; folders are looked through again and again.
static UNLISTED: AtomicBool = AtomicBool::new(false);

fn descend(
    folder: &Path,
    depth: usize,
    is_run: fn(&Path) -> bool,
    found: &mut Vec<PathBuf>,
) -> io::Result<()> {
    if is_run(folder) {
        found.push(folder.to_owned());
        return Ok(());
    }
    if depth == 0 {
        return Ok(());
    }
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // Links could lead round.
        if entry.file_type()?.is_dir() {
            match descend(&entry.path(), depth - 1, is_run, found) {
                // Of another user, such as lost+found.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    if !UNLISTED.swap(true, Ordering::Relaxed) {
                        let path = entry.path();
                        tracing::warn!("{}: {error}; runs in such folders are left out", path.display());
                    }
                }
                done => done?,
            }
        }
    }
    Ok(())
}

/// Reads the resolved keys of a run.
///
/// # Errors
/// `config.toml` cannot be read, or is no TOML.
pub(crate) fn read_keys(folder: &Path) -> anyhow::Result<Keys> {
    let path = folder.join("config.toml");
    let text = tandem_files::read_text(&path, MAX_CONFIG)
        .with_context(|| format!("cannot read {}", path.display()))?;
    let table: toml::Table = text.parse().map_err(|error| mistake(format!("{}: {error}", path.display())))?;
    let mut keys = Keys::new();
    flatten("", &Value::Table(table), &mut keys);
    Ok(keys)
}

/// Returns the method of a run.
pub(crate) fn method(keys: &Keys) -> &str {
    keys.get("method").and_then(Value::as_str).unwrap_or("?")
}

/// Returns every key with its value in each run; `-` where a run lacks it.
pub(crate) fn compare(runs: &[&Keys]) -> Vec<(String, Vec<String>)> {
    let mut names: Vec<&String> = runs.iter().flat_map(|keys| keys.keys()).collect();
    names.sort();
    names.dedup();
    let value = |keys: &Keys, name: &String| keys.get(name).map_or_else(|| "-".to_owned(), Value::to_string);
    names
        .into_iter()
        .map(|name| (name.clone(), runs.iter().map(|keys| value(keys, name)).collect()))
        .collect()
}

/// Returns the keys whose values are not the same in all runs, but for the folder itself.
pub(crate) fn differences(runs: &[&Keys]) -> Vec<(String, Vec<String>)> {
    let mut rows = compare(runs);
    rows.retain(|(name, values)| name != "output" && values.iter().any(|value| *value != values[0]));
    rows
}

fn flatten(prefix: &str, value: &Value, keys: &mut Keys) {
    match value {
        Value::Table(table) => {
            for (name, value) in table {
                let name = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                flatten(&name, value, keys);
            }
        }
        value => {
            keys.insert(prefix.to_owned(), value.clone());
        }
    }
}
