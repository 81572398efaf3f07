//! Observer of the recomputation, which compares records and checkpoints as they come.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::model::{self, ModelStep};
use super::verdict::{CheckpointVerdict, MetricDifference, ModelVerdict, Verdict};
use super::{RecordedRun, Stretch, mismatch};
use crate::checkpoint::{Checkpoint, STATES, compare};
use crate::config::Config;
use crate::events::{Event, Observer};
use crate::metrics::{MACHINE_METRICS, Record, Split};
use crate::run::run_dir::METRICS;
use crate::{Result, TrainError, chain};

pub(super) struct Replay<'a> {
    run: &'a RecordedRun,
    stretch: Stretch,
    /// Config of the recomputation.
    config: &'a Config,
    keeps_checkpoints: bool,
    /// Steps of the whole run.
    total: u64,
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
    /// The first record that was computed again and is not in `metrics.jsonl`, and how many there are.
    missing: Option<(u64, Split)>,
    num_missing: u64,
    checkpoints: Vec<CheckpointVerdict>,
    /// Step of the trained model, or the reason why it is not known.
    model_step: Result<ModelStep, String>,
    model: Option<ModelVerdict>,
    error: Option<TrainError>,
}

impl<'a> Replay<'a> {
    pub(super) fn new(
        run: &'a RecordedRun,
        stretch: Stretch,
        config: &'a Config,
        keeps_checkpoints: bool,
        observer: &'a mut dyn Observer,
        stop: &'a AtomicBool,
    ) -> Result<Self> {
        let key = |record: &Record| (record.step(), record.split().name());
        Ok(Self {
            records: run.records.iter().map(|record| (key(record), record)).collect(),
            run,
            stretch,
            config,
            keeps_checkpoints,
            total: 0,
            observer,
            stop,
            step: stretch.from,
            asked: stretch.from,
            num_steps: 0,
            num_evaluations: 0,
            num_metrics: 0,
            metric: None,
            missing: None,
            num_missing: 0,
            checkpoints: Vec::new(),
            model_step: model::step(run, stretch, config)?,
            model: None,
            error: None,
        })
    }

    /// Returns the result; `None` if the recomputation was stopped.
    pub(super) fn verdict(self, ranks: usize, notes: Vec<String>) -> Result<Option<Verdict>> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let Stretch { from, to } = self.stretch;
        let mut notes = notes;
        let is_without_hash = |checkpoint: &&CheckpointVerdict| checkpoint.recorded.is_none();
        notes.extend(
            self.checkpoints.iter().filter(is_without_hash).map(|checkpoint| {
                format!("{STATES} has no hash of the state after step {}", checkpoint.step)
            }),
        );
        let verdict = Verdict {
            stretch: self.stretch,
            ranks,
            notes,
            num_steps: self.num_steps,
            num_evaluations: self.num_evaluations,
            num_metrics: self.num_metrics,
            metric: self.metric,
            checkpoints: self.checkpoints,
            model: self.model.unwrap_or_else(|| {
                ModelVerdict::NotCompared(self.model_step.err().unwrap_or_else(|| match to == self.total {
                    true => format!("something differs before the end of the run, after step {}", self.step),
                    false => {
                        format!("steps {from} to {to} are not the end of the run, of {} steps", self.total)
                    }
                }))
            }),
        };
        if verdict.is_same() && self.step < self.stretch.to {
            return Ok(None);
        }
        if !verdict.is_same() {
            return Ok(Some(verdict));
        }
        // What is there has the same bits, but a part of the record is gone.
        if let Some((step, split)) = self.missing {
            let record = if split == Split::Eval { "the evaluation after step" } else { "step" };
            return Err(mismatch(format!(
                "{METRICS} lacks {} of the records that were computed again, the first of {record} {step}: lines are missing or \
                 damaged, so that the run cannot be compared as a whole. What is there has the same bits",
                self.num_missing
            )));
        }
        if verdict.checkpoints.iter().all(|checkpoint| checkpoint.recorded.is_none()) {
            return Err(mismatch(format!(
                "{STATES} has no hash of a state after the steps {from} to {to}: the file is missing or was changed, so that \
                 checkpoints cannot be told from others. What is there has the same bits"
            )));
        }
        Ok(Some(verdict))
    }

    /// Compares a record with that of the run, if there is one. Only the first difference is kept.
    fn compare_record(&mut self, found: &Record) {
        let (step, split) = (found.step(), found.split());
        let Some(recorded) = self.records.get(&(step, split.name())).copied() else {
            // A run that was stopped may not have evaluated the state that it saved.
            if split == Split::Train || step < self.stretch.to {
                self.missing.get_or_insert((step, split));
                self.num_missing += 1;
            }
            return;
        };
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
            let path = self.run.checkpoints.folder_of(step);
            // A run that goes on deletes its old ones.
            if is_present && (path.exists() || state.is_none()) {
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
        let is_over = self.checkpoints.iter().any(|verdict| !verdict.is_same());
        if let Ok(model) = &self.model_step
            && model.is(step, self.stretch.to, self.total)
            && !is_over
        {
            let scratch = &self.config.output;
            self.model = Some(model::compare(self.run, self.config, folder, step, scratch)?);
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
                self.total = *steps;
                let Stretch { from, to } = self.stretch;
                if to > self.total {
                    self.stop.store(true, Ordering::Relaxed);
                    self.error = Some(mismatch(format!(
                        "--steps {from}..{to}: the run ends before step {to}, so {STATES}, or a checkpoint's folder, names a step \
                         that it cannot have taken"
                    )));
                }
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
