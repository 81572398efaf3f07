//! `tandem runs`: runs of a folder side by side, and the keys in which they differ.

use std::path::{Path, PathBuf};

use serde_json::json;
use tandem_train::Config;
use tandem_train::metrics::{Advisor, Record, Split, records};
use tandem_train::run::run_dir;

use crate::args::RunsArguments;
use crate::exit::{self, Exit};
use crate::output::{on_one_line, print_lines};
use crate::run_folder::{self, Keys};
use crate::step_line::{ACCURACIES, MARGINS};

/// A run, as its folder tells of it.
struct Run {
    path: PathBuf,
    keys: Keys,
    steps: u64,
    train: Option<Record>,
    eval: Option<Record>,
    troubles: usize,
    is_finished: bool,
}

pub(crate) fn run(arguments: &RunsArguments) -> anyhow::Result<Exit> {
    let folders = run_folder::find(&arguments.folders, run_folder::is_run)?;
    if folders.is_empty() {
        return Err(run_folder::none_found(&arguments.folders));
    }
    let (mut runs, mut errors) = (Vec::new(), Vec::new());
    for folder in &folders {
        match Run::read(folder) {
            Ok(run) => runs.push(run),
            Err(error) => errors.push(error),
        }
    }
    let lines = match arguments.json {
        true => runs.iter().map(Run::to_json).collect(),
        false if runs.is_empty() => Vec::new(),
        false => {
            let mut lines = table(runs.iter().map(Run::row), &HEADER);
            lines.extend(differences(&runs));
            lines
        }
    };
    print_lines(&lines)?;
    let told: Vec<_> = errors.into_iter().map(exit::tell).collect();
    told.into_iter().next().map_or(Ok(Exit::Done), Err)
}

impl Run {
    fn read(folder: &Path) -> anyhow::Result<Self> {
        let keys = run_folder::read_keys(folder)?;
        // An older version's config may no longer be read; its metrics may.
        let config = Config::load::<&str>(&folder.join("config.toml"), &[]);
        let mut advisor = config.ok().map(|config| Advisor::new(&config));
        let (mut train, mut eval) = (None, None);
        for record in records(&folder.join("metrics.jsonl"))? {
            let record = record?;
            if let Some(advisor) = &mut advisor {
                advisor.see(&record);
            }
            match record.split() {
                Split::Train => train = Some(record),
                Split::Eval => eval = Some(record),
            }
        }
        let steps = train.as_ref().map_or(0, Record::step);
        Ok(Self {
            path: folder.to_owned(),
            steps,
            train,
            eval,
            troubles: advisor.map_or(0, |advisor| advisor.found().len()),
            is_finished: run_dir::has_model_of(folder, steps),
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
            on_one_line(&self.path.display().to_string()),
            on_one_line(run_folder::method(&self.keys)),
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
        let metrics = |record: &Option<Record>| record.as_ref().map(Record::object);
        json!({
            "run": self.path.display().to_string(),
            "method": run_folder::method(&self.keys),
            "finished": self.is_finished,
            "troubles": self.troubles,
            "train": metrics(&self.train),
            "eval": metrics(&self.eval),
        })
        .to_string()
    }
}

const HEADER: [&str; 10] =
    ["run", "method", "steps", "loss", "eval loss", "margin", "accuracy", "tokens/s", "troubles", "state"];

/// Returns the keys whose values are not the same in all runs, but for the folder itself.
fn differences(runs: &[Run]) -> Vec<String> {
    let keys: Vec<&Keys> = runs.iter().map(|run| &run.keys).collect();
    let rows = run_folder::differences(&keys).into_iter();
    let rows: Vec<Vec<String>> =
        rows.map(|(name, values)| std::iter::once(name).chain(values).collect()).collect();
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
