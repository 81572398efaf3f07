//! Observer of the recomputation, which compares records and checkpoints as they come.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::verdict::{CheckpointVerdict, MetricDifference, Verdict};
use super::{RecordedRun, Stretch, mismatch};
use crate::checkpoint::{Checkpoint, compare};
use crate::events::{Event, Observer};
use crate::metrics::{MACHINE_METRICS, Record, Split};
use crate::{Result, TrainError, chain};

pub(super) struct Replay<'a> {
    run: &'a RecordedRun,
    stretch: Stretch,
    keeps_checkpoints: bool,
    /// Records of the run by step and split.
    records: BTreeMap<(u64, &'static str), &'a Record>,
    observer: &'a mut dyn Observer,
    stop: &'a AtomicBool,
    /// Last step that was taken.
    step: u64,
    /// Last step of which a checkpoint was asked for.
    asked: u64,
    num_steps: u64,
    num_evaluations: u64,
    num_metrics: usize,
    metric: Option<MetricDifference>,
    checkpoints: Vec<CheckpointVerdict>,
    error: Option<TrainError>,
}

impl<'a> Replay<'a> {
    pub(super) fn new(
        run: &'a RecordedRun,
        stretch: Stretch,
        keeps_checkpoints: bool,
        observer: &'a mut dyn Observer,
        stop: &'a AtomicBool,
    ) -> Self {
        let key = |record: &Record| (record.step(), record.split().name());
        Self {
            records: run.records.iter().map(|record| (key(record), record)).collect(),
            run,
            stretch,
            keeps_checkpoints,
            observer,
            stop,
            step: stretch.from,
            asked: stretch.from,
            num_steps: 0,
            num_evaluations: 0,
            num_metrics: 0,
            metric: None,
            checkpoints: Vec::new(),
            error: None,
        }
    }

    /// Returns the result; `None` if the recomputation was stopped.
    pub(super) fn verdict(self, ranks: usize, notes: Vec<String>) -> Result<Option<Verdict>> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let verdict = Verdict {
            stretch: self.stretch,
            ranks,
            notes,
            num_steps: self.num_steps,
            num_evaluations: self.num_evaluations,
            num_metrics: self.num_metrics,
            metric: self.metric,
            checkpoints: self.checkpoints,
        };
        if verdict.is_same() && self.step < self.stretch.to {
            return Ok(None);
        }
        if verdict.checkpoints.is_empty() && verdict.num_steps == 0 {
            return Err(mismatch("nothing was compared: metrics.jsonl has none of these steps".to_owned()));
        }
        Ok(Some(verdict))
    }

    /// Compares a record with that of the run, if there is one. Only the first difference is kept.
    fn compare_record(&mut self, found: &Record) {
        let Some(recorded) = self.records.get(&(found.step(), found.split().name())).copied() else { return };
        match found.split() {
            Split::Train => self.num_steps += 1,
            Split::Eval => self.num_evaluations += 1,
        }
        let metrics = |record: &Record| -> BTreeMap<String, Option<u64>> {
            let metrics = record.metrics().filter(|(name, _)| !MACHINE_METRICS.contains(name));
            metrics.map(|(name, value)| (name.to_owned(), value.map(f64::to_bits))).collect()
        };
        let (ours, theirs) = (metrics(recorded), metrics(found));
        self.num_metrics = self.num_metrics.max(ours.len());
        if self.metric.is_some() || ours == theirs {
            return;
        }
        // The loss says more than what follows from it.
        let first = ["loss", "grad_norm"].map(str::to_owned);
        let differs = |name: &&String| ours.get(*name) != theirs.get(*name);
        let name = first.iter().chain(ours.keys()).chain(theirs.keys()).find(differs);
        self.metric = name.map(|name| MetricDifference {
            step: found.step(),
            split: found.split(),
            name: name.clone(),
            recorded: recorded.get(name),
            found: found.get(name),
        });
    }

    /// Compares a checkpoint with that of the run, or with its hash. The first that differs ends the
    /// recomputation.
    fn compare_checkpoint(&mut self, folder: &Path) -> Result<()> {
        let found = Checkpoint::open_checked(folder)?;
        let step = found.cursor().step;
        let (is_present, state) = (self.run.present.contains(&step), self.run.states.get(&step).copied());
        let is_over = self.checkpoints.iter().any(|verdict| !verdict.is_same());
        if step > self.stretch.from && !is_over && (is_present || state.is_some()) {
            let mut verdict = CheckpointVerdict {
                step,
                state: found.state_hash(&AtomicBool::new(false))?.expect("nobody gives up"),
                recorded: state,
                comparison: None,
                damage: None,
            };
            if is_present {
                let path = self.run.checkpoints.folder_of(step);
                let recorded = match Checkpoint::open(&path) {
                    Ok(recorded) => recorded,
                    // Which elements were changed is still to be told.
                    Err(error) => {
                        verdict.damage = Some(chain(&error));
                        Checkpoint::open_checked(&path)?
                    }
                };
                verdict.comparison = Some(compare(&recorded, &found)?);
            }
            if !verdict.is_same() {
                self.stop.store(true, Ordering::Relaxed);
            }
            self.checkpoints.push(verdict);
        }
        if !self.keeps_checkpoints && !folder.is_symlink() {
            fs::remove_dir_all(folder).map_err(TrainError::io("remove", folder))?;
        }
        Ok(())
    }
}

impl Observer for Replay<'_> {
    fn event(&mut self, event: &Event<'_>) {
        match event {
            Event::Record(record) => {
                self.compare_record(record);
                if record.split() == Split::Train {
                    self.step = record.step();
                }
                self.observer.event(event);
            }
            Event::Saved(folder) => {
                if let Err(error) = self.compare_checkpoint(folder) {
                    self.error.get_or_insert(error);
                    self.stop.store(true, Ordering::Relaxed);
                }
            }
            Event::Started { step, steps, .. } => {
                self.observer.event(&Event::Started {
                    step: *step,
                    steps: *steps,
                    resumed_from: None,
                    advice: &[],
                });
            }
            Event::Tokenizing { .. }
            | Event::Reference { .. }
            | Event::Skipped { .. }
            | Event::Warning(_) => self.observer.event(event),
            // The folder of the recomputation, and advice on how to train, are of no interest.
            _ => {}
        }
    }

    /// A run saves also where it was asked to, or was stopped.
    fn is_to_save(&mut self) -> bool {
        let step = self.step;
        let is_saved = self.run.present.contains(&step) || self.run.states.contains_key(&step);
        let is_to_save = is_saved && step > self.asked;
        self.asked = step;
        is_to_save
    }
}
