//! Judges of a run that `tandem init` writes.

use std::path::Path;

use anyhow::Context;
use tandem_train::config::{DraftKey, Facts, load_judges};
use toml::{Table, Value};

use super::facts::LocalFacts;

/// Returns the keys of a `[[judges]]` table for each judge that `--judge` gives: a reward model, or the
/// tables of a file.
///
/// # Errors
/// A file that cannot be read, or whose judges are wrong.
pub(super) fn keys(given: &[String], facts: &LocalFacts) -> anyhow::Result<Vec<Vec<DraftKey>>> {
    let mut judges = Vec::new();
    let mut num_rewards = 0;
    for judge in given {
        if is_file(judge) {
            judges.extend(tables(Path::new(judge), facts)?);
            continue;
        }
        num_rewards += 1;
        let mut keys = vec![key("kind", "reward"), key("model", facts.path(judge))];
        if num_rewards > 1 {
            keys.insert(0, key("name", format!("reward_{num_rewards}")));
        }
        judges.push(keys);
    }
    Ok(judges)
}

/// Returns whether a judge is a file of tables rather than a reward model.
pub(super) fn is_file(judge: &str) -> bool {
    Path::new(judge).extension().is_some_and(|extension| extension == "toml")
}

pub(super) fn key(key: &str, value: impl Into<Value>) -> DraftKey {
    DraftKey { key: key.to_owned(), value: value.into(), comment: String::new() }
}

/// Reads a file of judges. Its paths become those of the run's file.
fn tables(file: &Path, facts: &LocalFacts) -> anyhow::Result<Vec<Vec<DraftKey>>> {
    load_judges(file)?;
    let text = tandem_files::read_text(file, tandem_files::MAX_CONFIG)
        .with_context(|| format!("cannot read {}", file.display()))?;
    let table: Table = toml::from_str(&text).with_context(|| format!("{}", file.display()))?;
    let judges = table.get("judges").and_then(Value::as_array).into_iter().flatten();
    let beside = |path: &str| file.with_file_name(path).to_string_lossy().into_owned();
    let moved = |name: &str, value: &Value, is_reward: bool| match (name, value.as_str()) {
        ("cache", Some(path)) => facts.local(&beside(path)).into(),
        // A name of the hub is no path beside the file.
        ("model", Some(path)) if is_reward => match Path::new(&beside(path)).exists() {
            true => facts.local(&beside(path)).into(),
            false => facts.path(path).into(),
        },
        _ => value.clone(),
    };
    Ok(judges
        .filter_map(Value::as_table)
        .map(|judge| {
            let is_reward = judge.get("kind").and_then(Value::as_str) == Some("reward");
            let mut keys: Vec<_> =
                judge.iter().map(|(name, value)| key(name, moved(name, value, is_reward))).collect();
            // The file is read into sorted keys.
            keys.sort_by_key(|key| key.key != "kind");
            keys
        })
        .collect())
}
