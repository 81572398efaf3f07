//! The run: prepare, plan, load, then steps with evaluations and checkpoints between them, then the
//! final model.

mod build;
mod evaluate;
mod memory;
#[cfg(test)]
mod tests;
mod train_step;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tandem_comm::{Phase, Reduction};
use tandem_data::order::BatchSampler;
use tandem_kernels::Device;
use tandem_kernels::cuda::driver::MatmulChoice;
use tandem_model::save::{SHARD_BYTES, Save};

use crate::checkpoint::state::CheckpointState;
use crate::checkpoint::{Cursor, Saver, snapshot};
use crate::config::Config;
use crate::events::{Event, Observer};
use crate::inputs::RunInputs;
use crate::metrics::{Advisor, MetricsFile, Record};
use crate::online::{Batch, Online};
use crate::optimizer::Schedule;
use crate::parallel::DeviceMesh;
use crate::placement::MemoryPlacement;
use crate::profile::Profiler;
use crate::recipe::MicroBatcher;
use crate::run::model_card::{Course, model_card};
use crate::run::provenance::{PROVENANCE, ProvenanceWriter};
use crate::run::run_dir::{self, RunDir, RunDirPolicy};
use crate::samples::Sampler;
use crate::step::{TrainState, TrainStep};
use crate::trackers::{Ending, Trackers};
use crate::{Result, TrainError};

/// A run that is ready to take its next step, as one of its ranks sees it.
pub struct Trainer {
    config: Config,
    mesh: DeviceMesh,
    prepared: Arc<RunInputs>,
    /// Dropped before the run folder, whose lock is held until all writes have ended.
    saver: Saver,
    /// The run's folder and its log, on the first rank alone.
    files: Option<Files>,
    scorer: TrainStep,
    learner: TrainState,
    batches: BatchSampler,
    batcher: MicroBatcher,
    /// Source of pairs of an online run.
    online: Option<Online>,
    sampler: Option<Sampler>,
    /// Steps done when this process began.
    first_step: u64,
    /// Step after which this process stops.
    until: Option<u64>,
    /// Whether a rank was asked to stop.
    is_stopping: bool,
    schedule: Schedule,
    cursor: Cursor,
    resumed_from: Option<PathBuf>,
    /// Step of the newest checkpoint, perhaps still being written, and its folder if this rank
    /// reports it.
    saved: Option<(u64, Option<PathBuf>)>,
    /// Seconds of earlier processes of this run.
    seconds_before: f64,
    started: Instant,
    profiler: Option<Profiler>,
}

/// Options of a run besides its config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Policy for a folder that already holds a run.
    pub start: RunDirPolicy,
    /// Whether to profile some steps.
    pub profile: bool,
    /// Step after which the run saves and stops, as if it was asked to.
    pub until: Option<u64>,
    /// Algorithms of matmuls on GPUs, to repeat those of another run; `None` leaves the choice to the
    /// run.
    pub matmuls: Option<Vec<MatmulChoice>>,
}

impl From<RunDirPolicy> for Options {
    fn from(start: RunDirPolicy) -> Self {
        Self { start, profile: false, until: None, matmuls: None }
    }
}

/// Files that rank 0 writes besides checkpoints.
struct Files {
    trackers: Trackers,
    /// Dropped before the run folder, whose lock is held until all writes have ended.
    provenance: ProvenanceWriter,
    run_dir: RunDir,
    metrics: MetricsFile,
    rows: Option<MetricsFile>,
    samples: Option<MetricsFile>,
    advisor: Advisor,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done; rank 0 has written the model to this folder.
    Finished(PathBuf),
    /// Asked to stop; the state is in this checkpoint (`None`: no step had been taken, or another
    /// rank saved it).
    Stopped(Option<PathBuf>),
}

impl Trainer {
    /// Runs the remaining steps. `stop` is polled between steps and during generation and judging:
    /// set on any rank, it saves and ends the run. A checkpoint in progress is completed first,
    /// unless a rank is lost.
    ///
    /// # Errors
    /// A pass or another rank fails, too many steps in a row are not finite, the first loss is
    /// wrong for equal policy and reference, or a file cannot be written. Earlier checkpoints are
    /// unchanged.
    pub fn run(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<Outcome> {
        let outcome = self.run_steps(observer, stop);
        if let Err(error) = &outcome
            && (self.mesh.world().size() == 1 || matches!(error, TrainError::NotFinite { .. }))
        {
            // All ranks stop here, so the checkpoint in progress can be completed. The first error
            // is reported.
            let _ = self.finish_saving(observer);
        }
        self.end_trackers(&outcome, observer);
        if outcome.is_ok()
            && let Some(profiler) = &self.profiler
        {
            match profiler.report() {
                Some((report, folder)) => observer.event(&Event::Profiled { report, folder }),
                None => observer.event(&Event::Warning("no whole step was taken that could be profiled")),
            }
        }
        let group = self.mesh.world();
        let (place, held) = ((group.rank(), group.size()), self.scorer.placement.high_water());
        outcome.map_err(|error| memory::explained(error, &self.config, &self.prepared, place, held))
    }

    fn run_steps(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<Outcome> {
        self.check_best(observer)?;
        let steps = self.schedule.total_steps;
        observer.event(&Event::Started {
            step: self.first_step,
            steps,
            resumed_from: self.resumed_from.as_deref(),
            advice: self.files.as_ref().map_or(&[], |files| files.advisor.found()),
        });
        self.started = Instant::now();
        let is_new = self.resumed_from.is_none();
        let is_evaluated = self.cursor.is_evaluation_due || is_new && self.config.train.evaluation.eval_first;
        let is_best = is_evaluated && self.evaluate_for_best(observer, stop)?;
        if is_new {
            self.sample(observer)?;
        }
        if is_best {
            self.save(observer, stop)?;
        }
        let until = self.until.unwrap_or(u64::MAX);
        while self.cursor.step < until && self.waited_enough().is_none() && self.step(observer, stop)? {
            let due = |every: Option<u64>| every.is_some_and(|n| self.cursor.step.is_multiple_of(n));
            let (evaluate, save) = (due(self.config.train.eval_every), due(self.config.train.save_every));
            let is_last = self.cursor.step == steps;
            let is_best = (evaluate || is_last) && self.evaluate_for_best(observer, stop)?;
            if evaluate && !is_last && self.waited_enough().is_none() {
                self.sample(observer)?;
            }
            // A run that goes on from there does not answer again.
            if save || is_best {
                self.save(observer, stop)?;
            }
        }
        self.is_stopping |= self.cursor.step >= until;
        self.finish(observer, stop)
    }

    /// Takes the next step, with its line in the log, and returns whether there was one: not after the last
    /// step, nor where `stop` was set on any rank before or during it. With [`Trainer::evaluate`],
    /// [`Trainer::save`] and [`Trainer::finish`], what [`Trainer::run`] is made of. Collective, as these.
    ///
    /// # Errors
    /// As [`Trainer::run`].
    pub fn step(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<bool> {
        let steps = self.schedule.total_steps;
        if self.cursor.step >= steps {
            return Ok(false);
        }
        if self.files.as_ref().is_some_and(|files| files.provenance.is_done()) {
            self.finish_provenance(observer);
        }
        let (next, device) = (self.cursor.step + 1, &self.scorer.placement.device);
        self.mesh.world().progress().step(next);
        if let Some(profiler) = &mut self.profiler {
            profiler.step(next, steps, self.mesh.world(), device)?;
        }
        self.mesh.world().progress().begin_phase(Phase::Agree);
        device.begin_phase("agree");
        self.is_stopping = self.is_to_stop(stop, observer)? || !self.take_step(observer, stop)?;
        Ok(!self.is_stopping)
    }

    /// Saves the last state, and writes the trained model, or only saves where the run was stopped. Trackers
    /// end with it.
    ///
    /// # Errors
    /// Another rank fails, or a file cannot be written.
    pub fn finish(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<Outcome> {
        let outcome = self.end(observer, stop);
        self.end_trackers(&outcome, observer);
        outcome
    }

    fn end(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<Outcome> {
        if self.is_stopping {
            return self.stopped(observer, stop);
        }
        self.end_profile()?;
        if self.cursor.skipped > 0 && self.cursor.updates > 0 {
            observer.event(&Event::Warning(&format!(
                "{} of {} steps were left out, for their loss or gradient was not finite: lower train.learning_rate, and \
                 look at the rows that the warnings name",
                self.cursor.skipped, self.cursor.step
            )));
        }
        self.save(observer, stop)?;
        self.mesh.world().progress().begin_phase(Phase::Save);
        self.finish_saving(observer)?;
        // Groups of equal rewards may be kept, and make updates without a gradient.
        let is_without_lesson = self.resumed_from.is_none()
            && self.online.as_ref().is_some_and(|online| online.num_trained() == 0);
        if self.cursor.updates == 0 || is_without_lesson {
            let is_masked = self.online.as_ref().is_some_and(|online| online.num_masked() > 0);
            let reason = match self.cursor.skipped {
                0 if is_masked => {
                    "answers to a prompt were better than others, but all of them were cut at online.max_new_tokens, and \
                     grpo.mask_truncated leaves such answers out; raise the limit, or remove grpo.mask_truncated"
                }
                0 => {
                    "in none was an answer to a prompt better than another. samples.jsonl has what was answered and what the \
                     judges said; answers that differ need online.temperature above 0"
                }
                skipped if skipped == self.cursor.step => {
                    "each was left out; the warnings say why, and name the rows"
                }
                _ => {
                    "some were left out, as the warnings say, and in the others no answer to a prompt was better than another; \
                     look at the rows that they name, and at samples.jsonl"
                }
            };
            return Err(TrainError::NothingLearned { steps: self.cursor.step, reason });
        }
        if let (Some(evaluations), true) =
            (self.waited_enough(), self.cursor.step < self.schedule.total_steps)
        {
            observer.event(&Event::StoppedEarly { step: self.cursor.step, evaluations });
        }
        if self.cursor.step > self.first_step || self.lacks_samples()? {
            self.sample(observer)?;
        }
        self.take_model(observer)?;
        self.finish_provenance(observer);
        self.write_model(observer)
    }

    /// Waits until all inputs are hashed, and warns of those that have changed. The model is worth more than its record.
    fn finish_provenance(&mut self, observer: &mut dyn Observer) {
        let Some(files) = &mut self.files else { return };
        match files.provenance.finish() {
            Ok(changed) if changed.is_empty() => {}
            Ok(changed) => observer.event(&Event::Warning(&format!(
                "files that the run reads have changed since it read them before, so it is not the run that was begun; put \
                 them back and resume again, or start anew with --overwrite:\n  {}",
                changed.join("\n  ")
            ))),
            Err(error) => observer.event(&Event::Warning(&format!(
                "{PROVENANCE} lacks the hashes of the inputs' files: {}",
                crate::chain(&error)
            ))),
        }
    }

    /// Returns whether an earlier process was killed before the answers of the last step. Every rank learns it.
    fn lacks_samples(&mut self) -> Result<bool> {
        let samples = self.files.as_ref().and_then(|files| files.samples.as_ref());
        let lacks = samples.is_some_and(|file| file.last_step() != Some(self.cursor.step));
        let mut vote = [u8::from(lacks)];
        self.mesh.world().all_reduce(&mut vote, Reduction::Max)?;
        Ok(vote[0] != 0)
    }

    /// Steps done, those of earlier processes of the run included.
    pub fn steps_done(&self) -> u64 {
        self.cursor.step
    }

    /// Multiplies the learning rate of all further steps; checkpoints keep the factor.
    ///
    /// # Panics
    /// The factor is negative or not finite.
    pub fn scale_learning_rate(&mut self, factor: f64) {
        assert!(factor.is_finite() && factor >= 0.0, "a learning rate cannot be multiplied by {factor}");
        self.cursor.learning_rate_factor = Some(factor * self.cursor.learning_rate_factor.unwrap_or(1.0));
    }

    /// Saves the run's state, if any, after a stop request.
    fn stopped(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<Outcome> {
        self.end_profile()?;
        let step = self.cursor.step;
        // The first evaluation may have begun a checkpoint.
        if step == 0 && self.saved.is_none() {
            observer.event(&Event::Stopped { step });
            return Ok(Outcome::Stopped(None));
        }
        self.save(observer, stop)?;
        self.finish_saving(observer)?;
        observer.event(&Event::Stopped { step });
        // A launcher may kill the other ranks some seconds after the first one has ended, and rank 0 has
        // yet to give the checkpoint its name.
        self.mesh.world().barrier()?;
        Ok(Outcome::Stopped(self.saved.as_ref().and_then(|(_, path)| path.clone())))
    }

    /// Ends the profile, if it has not ended, after the last step that was taken.
    fn end_profile(&mut self) -> Result<()> {
        let (profiler, device) = (&mut self.profiler, &self.scorer.placement.device);
        profiler.as_mut().map_or(Ok(()), |profiler| profiler.finish(self.cursor.step, device))
    }

    /// Files of lines that this rank writes.
    fn lines(&mut self) -> impl Iterator<Item = &mut MetricsFile> {
        let files = self.files.iter_mut();
        let own =
            files.flat_map(|files| [Some(&mut files.metrics), files.rows.as_mut(), files.samples.as_mut()]);
        own.chain([self.online.as_mut().and_then(Online::samples_file)]).flatten()
    }

    /// Makes the lines durable that a checkpoint takes for written.
    fn sync_files(&mut self) -> Result<()> {
        self.lines().try_for_each(|file| file.sync())
    }

    /// Checks that the files that rank 0 writes are still those in the run's folder. One that was removed is
    /// begun again, with a warning.
    fn check_files(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let Some(files) = &self.files else { return Ok(()) };
        files.run_dir.check_lock()?;
        let step = self.cursor.step;
        for file in self.lines() {
            if let Some(path) = file.reopen_if_removed()? {
                observer.event(&Event::Warning(&format!(
                    "{} was removed or replaced while the run wrote to it: lines up to step {} may be lost; later ones are \
                     written to the file that is there now",
                    path.display(),
                    step
                )));
            }
        }
        Ok(())
    }

    fn write_model(&mut self, observer: &mut dyn Observer) -> Result<Outcome> {
        self.mesh.world().progress().begin_phase(Phase::Finish);
        self.check_files(observer)?;
        // The files are made outside of the arena: with what steps needed, that would be the run's peak.
        self.scorer.placement.device.release_free_pages();
        let folder = run_dir::final_path(&self.config.output);
        let RunInputs { folder: template, decoder, .. } = &*self.prepared;
        let TrainStep { policy, decoder: part, .. } = &mut self.scorer;
        if self.files.is_some() && decoder.adapter().is_some() {
            snapshot::write_adapter(&folder, &self.prepared, &self.mesh, part, policy)?;
        } else if self.files.is_some() {
            let save = Save { template, decoder, dtype: template.stored_type(), shard_bytes: SHARD_BYTES };
            let mesh = &self.mesh;
            save.write(&folder, &mut |layer, flat| snapshot::copy_whole(mesh, part, policy, layer, flat))?;
        } else {
            snapshot::participate_in_gathers(&self.mesh, part, policy)?;
        }
        if let Some(Files { run_dir, .. }) = &self.files {
            let course = Course::read(&run_dir.metrics_path())?;
            run_dir.write_model_card(&model_card(&self.config, &self.prepared, &course))?;
            run_dir.finish(self.cursor.step)?;
            observer.event(&Event::Finished(&folder));
        }
        // No rank reports success before the model is written.
        self.mesh.world().barrier()?;
        Ok(Outcome::Finished(folder))
    }

    /// Returns whether any rank was asked to stop; all stop after the same step. The same exchange
    /// reports checkpoint progress, and requests for a checkpoint, so these need no call of their own.
    fn is_to_stop(&mut self, stop: &AtomicBool, observer: &mut dyn Observer) -> Result<bool> {
        let mut votes =
            [stop.load(Ordering::Relaxed), self.saver.is_writing()?, observer.is_to_save()].map(u8::from);
        let group = self.mesh.world();
        if group.size() > 1 {
            group.all_reduce(&mut votes, Reduction::Max)?;
        }
        let [is_to_stop, is_writing, is_to_save] = votes.map(|vote| vote != 0);
        if !is_writing {
            self.saver.seal(self.mesh.world())?;
        }
        let published = self.saver.published()?;
        self.tell_saved(published, observer);
        if is_to_save && !is_to_stop && self.cursor.step > 0 {
            self.save(observer, stop)?;
        }
        Ok(is_to_stop)
    }

    fn log(&mut self, record: &Record, observer: &mut dyn Observer) -> Result<()> {
        if let Some(files) = &mut self.files {
            files.metrics.write(record)?;
            files.trackers.record(record);
        }
        observer.event(&Event::Record(record));
        if let Some(files) = &mut self.files {
            for advice in files.advisor.see(record) {
                files.trackers.advice(advice);
                observer.event(&Event::Advice(advice));
            }
            for warning in files.trackers.warnings() {
                observer.event(&Event::Warning(&warning));
            }
        }
        Ok(())
    }

    /// Ends the trackers, unless they have ended, and tells what became of them.
    fn end_trackers(&mut self, outcome: &Result<Outcome>, observer: &mut dyn Observer) {
        let Some(files) = &mut self.files else { return };
        files.trackers.end(&match outcome {
            Ok(Outcome::Finished(_)) => Ending::Finished,
            Ok(Outcome::Stopped(_)) => Ending::Stopped,
            Err(error) => Ending::Failed(crate::chain(error)),
        });
        for warning in files.trackers.warnings() {
            observer.event(&Event::Warning(&warning));
        }
    }

    /// Starts a checkpoint of this step unless one exists; completes the one in progress first.
    ///
    /// # Errors
    /// Another rank fails, or a file cannot be written.
    pub fn save(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<()> {
        if self.saved.as_ref().is_some_and(|(step, _)| *step == self.cursor.step) {
            return Ok(());
        }
        self.mesh.world().progress().begin_phase(Phase::Save);
        self.device().begin_phase("checkpoint");
        self.check_files(observer)?;
        self.sync_files()?;
        self.finish_saving(observer)?;
        if let Some(online) = &mut self.online {
            // Unjudged completions are kept as they are.
            online.finish_pending(&mut self.mesh, stop)?;
            self.cursor.online = Some(online.state().clone());
        }
        self.cursor.rewards = Some(self.scorer.rewards).filter(|rewards| rewards.count > 0);
        self.cursor.schedule_free = self.learner.optimizer.weighting();
        let per_epoch = self.steps_per_epoch();
        self.cursor.epoch = self.cursor.step / per_epoch;
        let within = self.cursor.step % per_epoch / self.config.steps_per_batch();
        self.cursor.position = within * self.config.train.batch_size as u64;
        self.cursor.seed = self.config.seed;
        self.cursor.data_hash = self.prepared.train.content_hash().to_string();
        let scorer = &self.scorer;
        let state = CheckpointState::new(&scorer.policy, &scorer.reference, &self.learner.optimizer);
        self.saver.begin(&self.cursor, self.mesh.world(), &scorer.placement.device, state)?;
        let folder = self.files.is_some().then(|| self.saver.folder_of(self.cursor.step));
        self.saved = Some((self.cursor.step, folder));
        Ok(())
    }

    /// Steps on all rows.
    fn steps_per_epoch(&self) -> u64 {
        self.batches.steps_per_epoch() * self.config.steps_per_batch()
    }

    /// Waits for the checkpoint in progress, if any.
    fn finish_saving(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let published = self.saver.finish(self.mesh.world())?;
        self.tell_saved(published, observer);
        Ok(())
    }

    fn tell_saved(&mut self, published: Option<PathBuf>, observer: &mut dyn Observer) {
        let Some(path) = published else { return };
        observer.event(&Event::Saved(&path));
        if let Some(error) = self.saver.take_unremoved() {
            observer.event(&Event::Warning(&format!(
                "an old checkpoint stays, for it cannot be deleted: {}; the run goes on and tries again at each checkpoint, and \
                 until then the disk fills up",
                crate::chain(&error)
            )));
        }
    }

    /// Supplies judged completions for the next steps of an online run, in order, instead of
    /// generated ones. Every rank must be given the same.
    ///
    /// # Panics
    /// The run is not online, or its next step has completions already.
    pub fn answered(&mut self, batches: impl IntoIterator<Item = Batch>) {
        let online = self.online.as_mut().expect("an online run");
        online.give(batches, self.cursor.step);
    }

    /// Tells the other ranks why this one cannot go on.
    pub fn abort(&mut self, reason: &str) {
        self.mesh.world().abort(reason);
    }

    /// The device, to look at its memory.
    pub fn device(&self) -> &Device {
        &self.scorer.placement.device
    }

    /// All memories of the rank.
    pub fn placement(&self) -> &MemoryPlacement {
        &self.scorer.placement
    }

    /// The run folder.
    pub fn output(&self) -> &Path {
        &self.config.output
    }
}
