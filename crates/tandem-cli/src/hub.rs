//! Names of the hub on the command line and in configurations: downloaded here, before a command
//! does anything else, and replaced by local paths.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use tandem_hub::{Hub, HubError, HubName, ModelFiles, Progress};
use tandem_model::{ModelFolder, PeftFolder};
use tandem_train::checkpoint::Checkpoints;
use tandem_train::config::{HubPart, HubUse, JudgeSection, Place, load_judges_fetched};
use tandem_train::run::run_dir;
use tandem_train::{Config, TrainError};

use crate::args::{TrainArguments, WeightArguments};
use crate::commands::checkpoint;
use crate::exit::mistake;
use crate::log;

/// Shortest time between two lines on a file.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reads a configuration and downloads what it names on the hub. `files`: part of its models.
pub(crate) fn config(path: &Path, overrides: &[String], files: ModelFiles) -> anyhow::Result<Config> {
    Ok(Config::load_fetched(path, overrides, &mut |name| fetch(name, files))?)
}

/// Reads a configuration's text as [`config`] reads a file in the current folder.
pub(crate) fn config_text(text: &str, overrides: &[String], files: ModelFiles) -> anyhow::Result<Config> {
    let place = Path::new("the command line");
    let read = Config::parse_fetched(text, place, overrides, &mut |name| fetch(name, files));
    Ok(read.map_err(|mut error| {
        if let Place::File { line, .. } = &mut error.place {
            // Nobody has seen the text.
            *line = None;
        }
        error
    })?)
}

/// Reads a file of judges and downloads the reward models that it names on the hub.
pub(crate) fn judges(path: &Path) -> anyhow::Result<Vec<JudgeSection>> {
    Ok(load_judges_fetched(path, &mut |name| fetch(name, ModelFiles::Whole))?)
}

fn fetch(wanted: &HubUse, files: ModelFiles) -> Result<Vec<PathBuf>, HubError> {
    let (hub, progress) = (Hub::from_environment()?, &mut Bars::new());
    let files = match wanted.part {
        HubPart::Rows => return hub.rows(&wanted.name, progress),
        HubPart::Model => files,
        HubPart::ModelWithoutWeights => ModelFiles::WithoutWeights,
        HubPart::Adapter => ModelFiles::Adapter,
    };
    Ok(vec![hub.model(&wanted.name, files, progress)?])
}

/// Returns the folder of a model that is given as a path or as a name of the hub.
pub(crate) fn model(given: &Path, files: ModelFiles) -> anyhow::Result<PathBuf> {
    let Some(text) = given.to_str() else { return Ok(given.to_owned()) };
    let (name, remark) = if HubName::is_explicit(text) {
        (HubName::explicit(text).map_err(|reason| mistake(format!("{text}: {reason}")))?, "")
    } else if let Some(name) = HubName::in_place_of(given, text) {
        (name, " (no such path; read as a name of the hub)")
    } else {
        return Ok(given.to_owned());
    };
    let found = Hub::from_environment().and_then(|hub| hub.model(&name, files, &mut Bars::new()));
    found.with_context(|| format!("{text}{remark}"))
}

/// Returns a model and its adapter with local paths. A run's folder stands for the model that the run has
/// made, and an adapter's folder for the adapter on the base model that it names.
pub(crate) fn weights(given: &WeightArguments) -> anyhow::Result<WeightArguments> {
    let adapter = given.adapter.as_deref().map(|adapter| model(adapter, ModelFiles::Adapter)).transpose()?;
    let found = model(&made_by_run(&given.model)?, ModelFiles::Whole)?;
    if found.join("config.json").exists() || !found.join("adapter_config.json").exists() {
        ModelFolder::open(&found).map_err(TrainError::from)?;
        return Ok(WeightArguments { model: found, adapter });
    }
    if let Some(adapter) = adapter {
        return Err(mistake(format!(
            "{} is an adapter's folder, and so is --adapter {}: give the base model's folder before --adapter",
            found.display(),
            adapter.display()
        )));
    }
    let base = base_of(&found).with_context(|| {
        format!(
            "{0} is an adapter's folder; tandem … BASE --adapter {0} takes another base model",
            found.display()
        )
    })?;
    Ok(WeightArguments { model: base, adapter: Some(found) })
}

/// Returns `final` of a run's folder, the folder `model` of a checkpoint, which is made now if it is not
/// there, or the path as it is.
pub(crate) fn made_by_run(given: &Path) -> anyhow::Result<PathBuf> {
    if tandem_model::is_checkpoint(given) {
        return checkpoint::model_of(given);
    }
    if given.join("config.json").exists() {
        return Ok(given.to_owned());
    }
    let made = run_dir::final_path(given);
    if given.join("config.toml").exists() && !made.exists() {
        return Err(mistake(format!(
            "the run in {} has not ended, so it has no model yet; its checkpoints can be given: {}",
            given.display(),
            given.join("checkpoints").display()
        )));
    }
    if !made.is_dir() {
        return Ok(given.to_owned());
    }
    let checkpoints = Checkpoints::for_run(given);
    if let (Some(of_model), Some(&latest)) = (run_dir::model_step(given), checkpoints.steps()?.last())
        && latest > of_model
    {
        tracing::warn!(
            "{} is the model after step {of_model}: the run was resumed for more steps and has not ended; its newest \
             checkpoint can be given, too: {}",
            made.display(),
            checkpoints.folder_of(latest).display()
        );
    }
    Ok(made)
}

/// Returns the folder of the base model that an adapter names, downloaded if it is a name of the hub.
pub(crate) fn base_of(adapter: &Path) -> anyhow::Result<PathBuf> {
    let folder = PeftFolder::open(adapter).map_err(TrainError::from)?;
    let beside = folder.base_folder();
    match folder.base_model().map(Path::new).filter(|base| beside.is_err() && repository(base).is_some()) {
        Some(base) => model(base, ModelFiles::Whole),
        None => Ok(beside.map_err(TrainError::from)?),
    }
}

/// Returns owner and name if the text names a model of the hub rather than a path.
pub(crate) fn repository(given: &Path) -> Option<String> {
    let text = given.to_str()?;
    let name = match HubName::is_explicit(text) {
        true => HubName::explicit(text).ok()?,
        false => HubName::in_place_of(given, text)?,
    };
    Some(name.repository().to_owned())
}

/// Downloads, for a launcher, what the command of its ranks needs. Returns whether there was
/// anything; the ranks then take the same commits from the cache.
///
/// # Errors
/// The configuration has a mistake, or a download fails.
pub(crate) fn prepare(arguments: &TrainArguments) -> anyhow::Result<bool> {
    let mut is_named = false;
    Config::load_fetched(&arguments.run.config, &arguments.overrides()?, &mut |name| {
        is_named = true;
        fetch(name, ModelFiles::Whole)
    })?;
    Ok(is_named)
}

/// Progress of downloads on stderr: a bar on a terminal, else a line every two seconds.
struct Bars {
    bar: Option<ProgressBar>,
    file: String,
    /// Bytes that the last line said, and its time.
    said: Option<(u64, Instant)>,
}

impl Bars {
    fn new() -> Self {
        let bar = log::is_live().then(ProgressBar::hidden);
        Self { bar, file: String::new(), said: None }
    }

    fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            log::set_bar(None);
        }
    }
}

impl Progress for Bars {
    fn bytes(&mut self, file: &str, done: u64, total: Option<u64>) {
        if self.file != file {
            self.clear();
            self.file = file.to_owned();
            self.said = None;
            if let Some(bar) = &mut self.bar {
                let style = ProgressStyle::with_template("{prefix} {bar:24} {bytes}/{total_bytes}  {eta}")
                    .expect("the template is a constant");
                *bar =
                    ProgressBar::new(total.unwrap_or(done)).with_style(style).with_prefix(self.file.clone());
                log::set_bar(Some(bar.clone()));
            }
        }
        match &self.bar {
            Some(bar) => {
                bar.set_length(total.unwrap_or(done));
                bar.set_position(done);
            }
            None => {
                let is_end = total == Some(done);
                let (bytes, at) = self.said.unwrap_or_else(|| (u64::MAX, Instant::now()));
                if self.said.is_none() || (is_end && bytes != done) || at.elapsed() >= PATIENCE {
                    self.said = Some((done, Instant::now()));
                    let total = total.map_or_else(|| "unknown".to_owned(), megabytes);
                    tracing::info!("download {file} {}/{total}", megabytes(done));
                }
            }
        }
    }

    fn notice(&mut self, text: &str) {
        tracing::info!("{text}");
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        self.clear();
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}
