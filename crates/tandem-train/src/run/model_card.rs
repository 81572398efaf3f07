//! `README.md` of a trained model: what it was made of, how, and how it went.

use std::borrow::Cow;
use std::fmt::Write;
use std::path::Path;

use toml::{Table, Value};

use crate::Result;
use crate::config::{Config, DataSource};
use crate::inputs::RunInputs;
use crate::metrics::{Record, Split, records};

/// Key of the front matter by which a card is known to be ours.
const MARK: &str = "tags:\n- tandem\n";

/// Rows of the table of metrics.
const ROWS: usize = 10;

/// Metrics of the table, where a method has them.
const METRICS: [&str; 11] = [
    "loss",
    "rewards/margins",
    "rewards/accuracies",
    "rewards/chosen",
    "mean_token_accuracy",
    "accuracy",
    "margin",
    "objective/scores",
    "objective/kl",
    "reward",
    "kl",
];

/// Returns whether a text is a card that [`model_card`] wrote.
pub(crate) fn is_ours(text: &str) -> bool {
    text.starts_with("---\n") && text.contains(MARK)
}

/// Course of a run's metrics: for each split the names that it has, and the records of the table.
pub(crate) struct Course([(Vec<&'static str>, Vec<Record>); 2]);

impl Course {
    /// Reads a `metrics.jsonl`.
    ///
    /// # Errors
    /// It cannot be read.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let (mut counts, mut has) = ([0; 2], [[false; METRICS.len()]; 2]);
        for record in records(path)? {
            let record = record?;
            let split = usize::from(record.split() == Split::Eval);
            counts[split] += 1;
            for (has, name) in has[split].iter_mut().zip(METRICS) {
                *has |= record.get(name).is_some();
            }
        }
        let mut course = Self(has.map(|has| {
            let names = METRICS.into_iter().zip(has).filter(|(_, has)| *has);
            (names.map(|(name, _)| name).collect(), Vec::new())
        }));
        let shown = counts.map(spread);
        let mut index = [0; 2];
        for record in records(path)? {
            let record = record?;
            let split = usize::from(record.split() == Split::Eval);
            if shown[split].contains(&index[split]) {
                course.0[split].1.push(record);
            }
            index[split] += 1;
        }
        Ok(course)
    }
}

/// Writes the card of a run. Paths of this machine are not in it.
pub(crate) fn model_card(config: &Config, prepared: &RunInputs, course: &Course) -> String {
    let base = base_name(&config.model);
    let name = config.output.file_name().map_or("model".into(), |name| name.to_string_lossy());
    let is_adapter = prepared.decoder.adapter().is_some();
    let mut text = "---\n".to_owned();
    // The hub refuses a base model that is no name of its own.
    if base.contains('/') {
        let _ = writeln!(text, "base_model: {base}");
    }
    let _ = write!(
        text,
        "library_name: {}\n{MARK}- {}\n",
        if is_adapter { "peft" } else { "transformers" },
        config.method
    );
    text += "---\n\n";
    let what = if is_adapter { "an adapter of" } else { "trained from" };
    let _ = writeln!(
        text,
        "# {name}\n\nThis model is {what} `{base}`, by `method = \"{}\"` of Tandem {}.\n",
        config.method,
        env!("CARGO_PKG_VERSION")
    );
    data(&mut text, config, prepared);
    metrics(&mut text, course);
    let _ = write!(
        text,
        "## Settings\n\nWritten to `run.toml`, with the paths of another machine, they make this run again.\n\n```toml\n{}```\n",
        settings(config)
    );
    text
}

fn data(text: &mut String, config: &Config, prepared: &RunInputs) {
    text.push_str("## Data\n\n| split | files | rows | BLAKE3 of the tokens |\n|---|---|---:|---|\n");
    let splits = [
        ("train", &config.data.train, Some(&prepared.train)),
        ("held out", &config.data.eval, prepared.eval.as_ref()),
    ];
    for (split, sources, cache) in splits {
        let Some(cache) = cache else { continue };
        let name = |source: &DataSource| {
            source
                .path
                .file_name()
                .map_or_else(|| "?".to_owned(), |name| format!("`{}`", name.to_string_lossy()))
        };
        let names: Vec<_> = sources.iter().map(name).collect();
        let hash = cache.content_hash().to_string();
        let _ =
            writeln!(text, "| {split} | {} | {} | `{}` |", names.join(", "), cache.num_rows(), &hash[..16]);
    }
    text.push('\n');
}

fn metrics(text: &mut String, course: &Course) {
    for ((names, records), title) in course.0.iter().zip(["training", "held-out rows"]) {
        if names.is_empty() {
            continue;
        }
        let head: String = names.iter().map(|name| format!(" `{name}` |")).collect();
        let _ =
            writeln!(text, "## Metrics of {title}\n\n| step |{head}\n|---:|{}", "---:|".repeat(names.len()));
        for record in records {
            let cell = |name: &&str| {
                record.get(name).map_or_else(|| " |".to_owned(), |value| format!(" {value:.4} |"))
            };
            let cells: String = names.iter().map(cell).collect();
            let _ = writeln!(text, "| {} |{cells}", record.step());
        }
        text.push('\n');
    }
}

/// Returns the first of so many rows, the last, and some between them at even distances.
fn spread(count: usize) -> Vec<usize> {
    let shown = ROWS.min(count);
    (0..shown).map(|row| row * (count - 1) / (shown - 1).max(1)).collect()
}

/// The config with names of files in place of paths, and without what other machines do otherwise.
fn settings(config: &Config) -> String {
    let mut table: Table = config.to_toml().parse().expect("it was just written");
    table.remove("output");
    table.iter_mut().for_each(|(_, value)| without_folders(value));
    if let Some(Value::Table(data)) = table.get_mut("data") {
        data.remove("cache");
    }
    toml::to_string(&table).expect("it was read from TOML")
}

fn without_folders(value: &mut Value) {
    match value {
        Value::String(text) if text.starts_with('/') => *text = base_name(Path::new(text.as_str())),
        Value::Array(items) => items.iter_mut().for_each(without_folders),
        Value::Table(table) => table.iter_mut().for_each(|(_, value)| without_folders(value)),
        _ => {}
    }
}

/// Returns the hub's name of a folder in its cache, else the name of the folder.
fn base_name(path: &Path) -> String {
    let mut names = path.iter().rev().map(|name| name.to_string_lossy());
    let of_hub = |name: Cow<'_, str>| {
        let name = name.strip_prefix("models--").or(name.strip_prefix("datasets--"))?;
        Some(name.replacen("--", "/", 1))
    };
    if let Some(name) = names.clone().find_map(of_hub) {
        return name;
    }
    // The model of a run is known by the run's name.
    let own = names.find(|name| name != "final");
    own.map_or_else(|| path.display().to_string(), Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_found_in_its_cache() {
        let cached = "/home/a/.cache/huggingface/hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/12fd";
        assert_eq!(base_name(Path::new(cached)), "HuggingFaceTB/SmolLM2-135M");
        assert_eq!(base_name(Path::new("/home/a/models/phi-2")), "phi-2");
        assert_eq!(base_name(Path::new("/home/a/runs/sft/final")), "sft");
    }

    #[test]
    fn a_long_run_is_shown_in_ten_rows() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let mut lines = String::new();
        for step in 1..=1000 {
            let mut record = Record::new(step, Split::Train);
            record.set("loss", 0.5);
            lines += &format!("{}\n", record.to_json());
        }
        std::fs::write(file.path(), lines).expect("written");
        let Course([(names, records), (_, evaluations)]) = Course::read(file.path()).expect("records");
        let steps: Vec<u64> = records.iter().map(Record::step).collect();
        assert_eq!((names, evaluations.len()), (vec!["loss"], 0));
        assert_eq!((steps.len(), steps[0], steps[9]), (10, 1, 1000));
        assert_eq!((spread(0), spread(1), spread(2)), (vec![], vec![0], vec![0, 1]));
    }
}
