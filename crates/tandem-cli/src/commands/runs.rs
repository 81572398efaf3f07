//! `tandem runs`: runs of a folder side by side, and the keys in which they differ.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::json;
use tandem_train::Config;
use tandem_train::metrics::{Advisor, Record, Split, read_records};
use tandem_train::run::run_dir;
use toml::Value;

use crate::args::RunsArguments;
use crate::exit::{Exit, mistake};
use crate::output::print_lines;

/// Levels of folders below a given one in which runs are looked for.
const DEPTH: usize = 3;

/// A run, as its folder tells of it.
struct Run {
    path: PathBuf,
    /// Resolved keys.
    keys: BTreeMap<String, Value>,
    method: String,
    steps: u64,
    train: Option<Record>,
    eval: Option<Record>,
    troubles: usize,
    is_finished: bool,
}

pub(crate) fn run(arguments: &RunsArguments) -> anyhow::Result<Exit> {
    let mut folders = Vec::new();
    for given in &arguments.folders {
        if !given.is_dir() {
            return Err(mistake(format!("{}: no such folder", given.display())));
        }
        find(given, DEPTH, &mut folders).with_context(|| format!("cannot list {}", given.display()))?;
    }
    if folders.is_empty() {
        let places: Vec<_> = arguments.folders.iter().map(|folder| folder.display().to_string()).collect();
        return Err(mistake(format!(
            "no run in {}: a run's folder has config.toml and metrics.jsonl",
            places.join(", ")
        )));
    }
    folders.sort();
    let runs: Vec<Run> = folders.iter().map(|folder| Run::read(folder)).collect::<anyhow::Result<_>>()?;
    let lines = match arguments.json {
        true => runs.iter().map(Run::to_json).collect(),
        false => {
            let mut lines = table(runs.iter().map(Run::row), &HEADER);
            lines.extend(differences(&runs));
            lines
        }
    };
    print_lines(&lines)?;
    Ok(Exit::Done)
}

/// Adds the folders of runs at and below `folder`.
fn find(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if folder.join("config.toml").is_file() && folder.join("metrics.jsonl").is_file() {
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
            find(&entry.path(), depth - 1, found)?;
        }
    }
    Ok(())
}

impl Run {
    fn read(folder: &Path) -> anyhow::Result<Self> {
        let path = folder.join("config.toml");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let value: toml::Table =
            text.parse().map_err(|error| mistake(format!("{}: {error}", path.display())))?;
        let mut keys = BTreeMap::new();
        flatten("", &Value::Table(value), &mut keys);
        let records = read_records(&folder.join("metrics.jsonl"))?;
        let last = |split| records.iter().rfind(|record| record.split() == split).cloned();
        // An older version's config may no longer be read; its metrics may.
        let troubles = Config::load::<&str>(&path, &[]).map_or(0, |config| {
            let mut advisor = Advisor::new(&config);
            for record in &records {
                advisor.see(record);
            }
            advisor.found().len()
        });
        let method = keys.get("method").and_then(Value::as_str).unwrap_or("?").to_owned();
        Ok(Self {
            path: folder.to_owned(),
            method,
            steps: last(Split::Train).map_or(0, |record| record.step()),
            train: last(Split::Train),
            eval: last(Split::Eval),
            troubles,
            is_finished: run_dir::final_path(folder).is_dir(),
            keys,
        })
    }

    fn metric(&self, split: Split, names: &[&str]) -> Option<f64> {
        let record = match split {
            Split::Train => self.train.as_ref()?,
            Split::Eval => self.eval.as_ref()?,
        };
        names.iter().find_map(|name| record.get(name))
    }

    fn row(&self) -> Vec<String> {
        let number = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
        };
        vec![
            self.path.display().to_string(),
            self.method.clone(),
            self.steps.to_string(),
            number(self.metric(Split::Train, &["loss"]), 4),
            number(self.metric(Split::Eval, &["loss"]), 4),
            number(self.metric(Split::Train, &MARGINS), 3),
            number(self.metric(Split::Train, &ACCURACIES), 3),
            number(self.metric(Split::Train, &["tokens_per_second"]), 0),
            self.troubles.to_string(),
            if self.is_finished { "finished" } else { "unfinished" }.to_owned(),
        ]
    }

    fn to_json(&self) -> String {
        let metrics = |record: &Option<Record>| -> serde_json::Value {
            record.as_ref().map_or(serde_json::Value::Null, |record| {
                serde_json::from_str(&record.to_json()).expect("a record is JSON")
            })
        };
        json!({
            "run": self.path,
            "method": self.method,
            "finished": self.is_finished,
            "troubles": self.troubles,
            "train": metrics(&self.train),
            "eval": metrics(&self.eval),
        })
        .to_string()
    }
}

const MARGINS: [&str; 2] = ["rewards/margins", "margin"];
const ACCURACIES: [&str; 3] = ["rewards/accuracies", "accuracy", "mean_token_accuracy"];
const HEADER: [&str; 10] =
    ["run", "method", "steps", "loss", "eval loss", "margin", "accuracy", "tokens/s", "troubles", "state"];

/// Returns the keys whose values are not the same in all runs, but for the folder itself.
fn differences(runs: &[Run]) -> Vec<String> {
    let mut names: Vec<&String> = runs.iter().flat_map(|run| run.keys.keys()).collect();
    names.sort();
    names.dedup();
    let rows = names.into_iter().filter(|name| *name != "output").filter_map(|name| {
        let values: Vec<String> = runs
            .iter()
            .map(|run| run.keys.get(name).map_or_else(|| "-".to_owned(), Value::to_string))
            .collect();
        let differs = values.iter().any(|value| *value != values[0]);
        differs.then(|| std::iter::once(name.clone()).chain(values).collect())
    });
    let rows: Vec<Vec<String>> = rows.collect();
    if rows.is_empty() {
        return Vec::new();
    }
    let header: Vec<String> = std::iter::once("differs".to_owned())
        .chain(runs.iter().map(|run| run.path.display().to_string()))
        .collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    std::iter::once(String::new()).chain(table(rows.into_iter(), &header)).collect()
}

/// Lays out rows in columns; all but the first are aligned to the right.
fn table(rows: impl Iterator<Item = Vec<String>>, header: &[&str]) -> Vec<String> {
    let rows: Vec<Vec<String>> =
        std::iter::once(header.iter().map(ToString::to_string).collect()).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

fn flatten(prefix: &str, value: &Value, keys: &mut BTreeMap<String, Value>) {
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
