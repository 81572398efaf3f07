//! Runs Tandem like its command: from a `run.toml` to `metrics.jsonl` and `final/`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use serde_json::Value;
use tandem_train::events::Silent;
use tandem_train::objective::ObjectiveConfig;
use tandem_train::run::run_dir::RunDirPolicy;
use tandem_train::{Config, TrainError, Trainer};
use tempfile::TempDir;

use crate::place::Place;
use crate::settings::Settings;

/// Working folder of runs. Tokens are cached between runs; only the latest run is kept.
pub(crate) struct Runner {
    folder: TempDir,
    place: Place,
}

pub(crate) struct Run {
    /// Metrics of each training step.
    pub steps: Vec<Metrics>,
    /// Metrics of each evaluation.
    pub evaluations: Vec<Metrics>,
    /// The loss that was minimised.
    pub objective: ObjectiveConfig,
    output: PathBuf,
}

/// A line of `metrics.jsonl`.
pub(crate) struct Metrics(Value);

impl Metrics {
    pub(crate) fn get(&self, key: &str) -> Option<f64> {
        self.0.get(key).and_then(Value::as_f64)
    }
}

impl Run {
    pub(crate) fn final_folder(&self) -> PathBuf {
        self.output.join("final")
    }

    /// Values of a metric by step.
    pub(crate) fn curve(&self, key: &str) -> BTreeMap<u64, f64> {
        let number = |m: &Metrics| Some((m.get("step")? as u64, m.get(key)?));
        self.steps.iter().filter_map(number).collect()
    }
}

impl Runner {
    /// Creates the runner in a temporary folder, removed on drop.
    pub(crate) fn new(place: Place) -> Result<Self> {
        Ok(Self { folder: tempfile::tempdir()?, place })
    }

    pub(crate) fn place(&self) -> Place {
        self.place
    }

    /// Makes an empty folder of this name.
    pub(crate) fn subfolder(&self, name: &str) -> Result<PathBuf> {
        let path = self.folder.path().join("models").join(name);
        if path.exists() {
            std::fs::remove_dir_all(&path)?;
        }
        std::fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// Writes an input file of a run.
    pub(crate) fn file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    pub(crate) fn run(&mut self, settings: &Settings) -> Result<Run> {
        let output = self.folder.path().join("run");
        if output.exists() {
            std::fs::remove_dir_all(&output)?;
        }
        let toml = settings.toml(&output, &self.folder.path().join("cache"));
        let config = self.file("run.toml", &toml)?;
        let objective = train(&config, self.place)?;
        let lines = std::fs::read_to_string(output.join("metrics.jsonl"))?;
        let lines: Vec<Value> = lines.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        let (evaluations, steps) = lines.into_iter().map(Metrics).partition(|m| m.0["split"] == "eval");
        Ok(Run { steps, evaluations, objective, output })
    }

    /// Returns the reason if a run was refused for a missing feature.
    pub(crate) fn missing_feature(&self, error: &anyhow::Error) -> Option<String> {
        let text = format!("{error:#}");
        text.contains("not supported yet").then_some(text)
    }
}

fn train(config: &Path, place: Place) -> Result<ObjectiveConfig> {
    let config = Config::load(config, &[format!("compute.devices={}", place.devices())])?;
    let objective = config.objective.clone();
    let mut trainer = Trainer::new(config, RunDirPolicy::Fresh, &mut Silent)?;
    match trainer.run(&mut Silent, &AtomicBool::new(false)) {
        // A loss too steep for its gradient has a value all the same.
        Err(TrainError::NothingLearned { .. }) => Ok(objective),
        outcome => Ok(outcome.map(|_| objective)?),
    }
}
