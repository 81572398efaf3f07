//! Resumption: the common checkpoint of all ranks, and config changes since.

use std::path::PathBuf;

use tandem_comm::ProcessGroup;
use tandem_kernels::cuda::driver::MatmulChoice;

use crate::checkpoint::{Checkpoint, snapshot};
use crate::config::{AttentionKernels, Change, Config};
use crate::disk::appears;
use crate::events::{Event, Observer};
use crate::optimizer::EvaluationWeights;
use crate::run::provenance::{Provenance, Start, arithmetic_in_words};
use crate::run::run_dir::{self, RunDir, RunDirPolicy};
use crate::step::TrainStep;
use crate::{Result, TrainError};

/// The config that the run in this folder was started with.
pub(crate) fn saved_config(run_dir: &RunDir) -> Result<Option<Config>> {
    let path = run_dir.config_path();
    Ok(if path.exists() { Some(Config::load::<&str>(&path, &[])?) } else { None })
}

/// The checkpoint to resume from, if resuming was asked for and there is one. Damaged ones are
/// passed over aloud.
pub(crate) fn newest_checkpoint(
    run_dir: &RunDir,
    start: RunDirPolicy,
    observer: &mut dyn Observer,
) -> Result<Option<Checkpoint>> {
    if start != RunDirPolicy::Resume {
        return Ok(None);
    }
    let latest = run_dir.checkpoints().latest()?;
    for error in &latest.skipped {
        observer.event(&Event::Warning(&crate::chain(error)));
    }
    if latest.checkpoint.is_none() && run_dir.final_path().exists() {
        let reason = format!(
            "--resume: {} has a finished model in final/ and no checkpoint to go on from, and a new run would replace it; \
             give another `output`, or --overwrite",
            run_dir.path().display()
        );
        return Err(TrainError::Mismatch { reason });
    }
    if latest.checkpoint.is_none() {
        observer.event(&Event::Warning("no complete checkpoint to resume from; starting at step 0"));
    }
    Ok(latest.checkpoint)
}

/// The first rank's checkpoint, opened on every rank; the first has checked it. Collective.
pub(crate) fn agree_on(newest: Option<Checkpoint>, group: &mut ProcessGroup) -> Result<Option<Checkpoint>> {
    if group.size() == 1 {
        return Ok(newest);
    }
    let mut path = newest.as_ref().map_or(Vec::new(), |c| c.path().as_os_str().as_encoded_bytes().to_vec());
    let mut length = [path.len() as i64];
    group.broadcast(&mut length, 0)?;
    if length == [0] {
        return Ok(None);
    }
    path.resize(length[0] as usize, 0);
    group.broadcast(&mut path, 0)?;
    if newest.is_some() {
        return Ok(newest);
    }
    #[cfg(unix)]
    let path = PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(path));
    #[cfg(not(unix))]
    let path = PathBuf::from(String::from_utf8_lossy(&path).into_owned());
    if !appears(|| path.exists()) {
        return Err(TrainError::NotShared { path, writer: 0, reader: group.rank() });
    }
    Ok(Some(Checkpoint::open_checked(&path)?))
}

/// Replaces the weights of the policy by those that evaluations have in a checkpoint, and those of a
/// reference that follows it.
pub(crate) fn restore_evaluated(
    checkpoint: &Checkpoint,
    weights: EvaluationWeights,
    scorer: &mut TrainStep,
) -> Result<()> {
    let TrainStep { policy, reference, decoder, .. } = scorer;
    snapshot::restore_weights(checkpoint, weights, decoder, policy, reference.ema_reference())?;
    scorer.refresh()
}

pub(crate) fn warn_of_changes(config: &Config, earlier: Option<&Config>, observer: &mut dyn Observer) {
    for change in earlier.map(|earlier| config.changes_since(earlier)).unwrap_or_default() {
        if change.alters_run {
            let show = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".to_owned());
            observer.event(&Event::Warning(&format!(
                "{} was {} and is now {}: from here on the run differs from one that was never stopped",
                change.key,
                show(&change.saved),
                show(&change.now)
            )));
        }
    }
}

/// Names the keys of the model that have changed since the run wrote a checkpoint, if that is why the
/// checkpoint does not fit.
pub(crate) fn of_changed_model(error: TrainError, config: &Config) -> TrainError {
    let TrainError::BrokenCheckpoint { path, .. } = &error else { return error };
    // The run's folder still has the config that wrote the checkpoint.
    let Ok(saved) = Config::load::<&str>(&run_dir::config_path(&config.output), &[]) else { return error };
    let changed = match (&saved.adapter, &config.adapter) {
        (None, Some(_)) => vec!["`adapter` was absent and is now set".to_owned()],
        (Some(_), None) => vec!["`adapter` was set and is now absent".to_owned()],
        _ => {
            let is_of_model = |key: &str| {
                const OF_MODEL: [&str; 6] = [
                    "model",
                    "method",
                    "train.optimizer",
                    "train.momentum",
                    "train.ema_decay",
                    "reference.kind",
                ];
                OF_MODEL.contains(&key) || key.starts_with("adapter.")
            };
            let changes = config.changes_since(&saved).into_iter().filter(|change| is_of_model(&change.key));
            let in_words = |value: Option<String>| value.unwrap_or_else(|| "absent".to_owned());
            changes
                .map(|Change { key, saved, now, .. }| {
                    format!("`{key}` was {} and is now {}", in_words(saved), in_words(now))
                })
                .collect()
        }
    };
    if changed.is_empty() {
        return error;
    }
    let reason = format!(
        "{} is of another model: {}; restore that, or start anew with --overwrite",
        path.display(),
        changed.join(", ")
    );
    TrainError::Mismatch { reason }
}

/// Returns the algorithms of matmuls and the kernels of attention that a run had until a step; the libraries' first
/// choices and kernels by warps if it records none. [`provenance`] reports a record that cannot be read.
pub(crate) fn recorded_kernels(run_dir: &RunDir, step: u64) -> (Vec<MatmulChoice>, AttentionKernels) {
    let read = Provenance::read(run_dir.path()).ok().flatten();
    let starts = read.map(|recorded| recorded.starts).unwrap_or_default();
    let start = starts.iter().rfind(|earlier| earlier.step < step);
    start.map(|start| (start.matmul_choices(), start.attention())).unwrap_or_default()
}

/// Reads the record of a run that continues, and warns where the bits of its arithmetic are others from
/// here on. One that cannot be read is no reason not to go on: the record then begins here.
pub(crate) fn provenance(
    run_dir: &RunDir,
    continues: bool,
    start: &Start,
    observer: &mut dyn Observer,
) -> Option<Provenance> {
    let read = if continues { Provenance::read(run_dir.path()) } else { Ok(None) };
    let recorded = read.unwrap_or_else(|error| {
        let reason = crate::chain(&error);
        observer
            .event(&Event::Warning(&format!("{reason}; the record begins anew after step {}", start.step)));
        None
    })?;
    let earlier = recorded.starts.iter().rfind(|earlier| earlier.step < start.step);
    if let Some(earlier) = earlier.filter(|earlier| earlier.arithmetic != start.arithmetic) {
        observer.event(&Event::Warning(&format!(
            "the run was made with {} until now, and goes on with {}: from here on its bits are not those of a run that \
             was never stopped",
            arithmetic_in_words(&earlier.arithmetic),
            arithmetic_in_words(&start.arithmetic)
        )));
    }
    Some(recorded)
}
