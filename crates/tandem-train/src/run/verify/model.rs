//! The trained model of a run, compared with the weights that were computed again.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::verdict::ModelVerdict;
use super::{RecordedRun, Stretch};
use crate::checkpoint::{Checkpoint, export};
use crate::config::Config;
use crate::run::provenance::hash_file;
use crate::run::run_dir::{final_path, model_step};
use crate::{Result, TrainError};

/// Place of the trained model in a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelStep {
    /// Step whose weights it has.
    step: u64,
    /// Whether the run ended after the stretch though more steps were asked for.
    is_stopped_early: bool,
}

/// Returns the step whose weights the model of a run has, if `stretch` is its end.
///
/// # Errors
/// The reason why the model cannot be compared, or a file cannot be read.
pub(super) fn step(
    run: &RecordedRun,
    stretch: Stretch,
    config: &Config,
) -> Result<Result<ModelStep, String>> {
    if !final_path(&run.folder).is_dir() {
        return Ok(Err("it is not there".to_owned()));
    }
    let Stretch { from, to } = stretch;
    if let Some(step) = model_step(&run.folder).filter(|step| *step < to) {
        return Ok(Err(format!("it is of step {step}, from before the run was resumed for more steps")));
    }
    let evaluation = &config.train.evaluation;
    let Some(metric) = &evaluation.keep_best else {
        return Ok(Ok(ModelStep { step: to, is_stopped_early: false }));
    };
    if !run.present.contains(&to) {
        return Ok(Err(format!(
            "train.keep_best chose its step, and the checkpoint of step {to}, which knows of it, is not there"
        )));
    }
    let last = Checkpoint::open_checked(&run.checkpoints.folder_of(to))?;
    let Some(best) = last.cursor().best.as_ref().filter(|best| best.metric == metric.key) else {
        return Ok(Ok(ModelStep { step: to, is_stopped_early: false }));
    };
    if best.step <= from {
        return Ok(Err(format!("it is of step {}, before the steps that were computed again", best.step)));
    }
    let is_stopped_early =
        evaluation.early_stopping_patience.is_some_and(|patience| best.evaluations_since >= patience);
    Ok(Ok(ModelStep { step: best.step, is_stopped_early }))
}

impl ModelStep {
    /// Returns whether a checkpoint of `step` has the model's weights, in a run of `total` steps whose stretch
    /// ends at `to`.
    pub(super) fn is(self, step: u64, to: u64, total: u64) -> bool {
        step == self.step && (to == total || self.is_stopped_early)
    }
}

/// Compares the files of weights in the `final/` of a run with those of a recomputed checkpoint, which are
/// written below `scratch`.
///
/// # Errors
/// A file cannot be read or written.
pub(super) fn compare(
    run: &RecordedRun,
    config: &Config,
    checkpoint: &Path,
    step: u64,
    scratch: &Path,
) -> Result<ModelVerdict> {
    let (recorded, found) = (final_path(&run.folder), final_path(scratch));
    export(config, checkpoint, &found)?;
    let mut files = Vec::new();
    for entry in fs::read_dir(&found).map_err(TrainError::io("list", &found))? {
        let name = entry.map_err(TrainError::io("list", &found))?.file_name().to_string_lossy().into_owned();
        files.extend(Some(name).filter(|name| name.ends_with(".safetensors")));
    }
    files.sort_unstable();
    let hash = |path: &Path| hash_file(path, &AtomicBool::new(false)).map_err(TrainError::io("read", path));
    let mut different = Vec::new();
    for name in &files {
        let path = recorded.join(name);
        if !path.is_file() || hash(&path)? != hash(&found.join(name))? {
            different.push(name.clone());
        }
    }
    Ok(ModelVerdict::Compared { step, files, different })
}
