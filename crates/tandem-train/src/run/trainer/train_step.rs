//! One step of a run: its batch, its checks and its log line.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::{Files, Trainer};
use crate::config::{ReferenceKind, SumForm, Sync};
use crate::events::{Event, Observer};
use crate::metrics::{Record, Split};
use crate::objective::exact_at_start;
use crate::online::{Online, RoundTimings, TrainingBatch};
use crate::recipe::{BatchPart, Rows, ScoredPrompt};
use crate::step::{StepOptions, StepOutcome};
use crate::{Result, TrainError, size};

impl Trainer {
    /// One step, its checks and its line in the log; `false` if an online step was left out because
    /// any rank was to stop.
    pub(super) fn take_step(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<bool> {
        let began = Instant::now();
        self.device().begin_phase("data");
        let (step, per_epoch) = (self.cursor.step, self.steps_per_epoch());
        let options = StepOptions {
            learning_rate: self.schedule.at(step) * self.cursor.learning_rate_factor.unwrap_or(1.0),
            max_grad_norm: self.config.train.max_grad_norm,
            beta: self.config.objective.beta_at(step, per_epoch),
            update: self.cursor.updates + 1,
        };
        let batch = self.config.online.as_ref().map_or(step, |online| online.batch_of_step(step));
        let Self { online, scorer, mesh, prepared, batches, batcher, learner, files, .. } = self;
        let ready = online.as_mut().map(|online| online.next(step, scorer, mesh, batches, batcher, stop));
        for line in online.iter().flat_map(Online::lines) {
            observer.event(&Event::Warning(&line));
        }
        let ready = match ready.transpose()? {
            Some(None) => return Ok(false),
            ready => ready.flatten(),
        };
        let rows = batches.rows(batch);
        if let Some(Files { rows: Some(file), .. }) = files {
            file.write_rows(step + 1, rows)?;
        }
        // Prompts with answers are numbered from 0 in each step.
        let numbers: Vec<u32>;
        let (of, rows) = match &ready {
            None => (Rows::Cached(&prepared.train), rows),
            Some(ready) => {
                numbers = (0..ready.ranked.len() as u32).collect();
                (Rows::Ranked(&ready.ranked), &numbers[..])
            }
        };
        let (data_rank, data_size) = (mesh.data().rank(), mesh.data().size());
        let share = batcher.share(of, rows, data_rank, data_size);
        let outcome = if share.totals.pairs == 0 {
            StepOutcome::default()
        } else {
            let build = &mut |part: BatchPart<'_>| batcher.build(of, part);
            scorer.forward_backward(learner, mesh, &share, build, &options)?
        };
        if let Rows::Cached(cache) = of {
            cache.check()?;
        }
        // Background generation reads the current weights: wait for it before they are updated.
        if let Some(online) = online
            && !online.answered(mesh, stop)?
        {
            return Ok(false);
        }
        scorer.optimizer_step(learner, mesh, &outcome, &options)?;
        self.scorer.placement.device.begin_phase("metrics");
        if self.cursor.step == 0 && share.totals.pairs > 0 {
            self.check_start(&outcome, observer)?;
        }
        self.cursor.step += 1;
        let Sync { steps, alpha } = self.config.reference.sync;
        if self.config.reference.kind == ReferenceKind::Sync && self.cursor.step.is_multiple_of(steps) {
            self.scorer.update_ema_reference(alpha as f32)?;
        }
        self.cursor.num_tokens += share.sequence_tokens;
        let mut record = self.record(&outcome, ready.as_ref(), &options);
        record.set("tokens_per_second", share.sequence_tokens as f64 / began.elapsed().as_secs_f64());
        self.log(&record, observer)?;
        if share.totals.pairs == 0 {
            // Answers without a better and a worse one among them leave nothing to learn.
            return Ok(true);
        }
        if !outcome.updated {
            let ranked = ready.map(|ready| ready.ranked);
            self.skipped(&outcome, ranked.as_deref(), observer)?;
            return Ok(true);
        }
        self.cursor.updates += 1;
        self.cursor.skipped_in_row = 0;
        Ok(true)
    }

    fn record(
        &mut self,
        outcome: &StepOutcome,
        ready: Option<&TrainingBatch>,
        options: &StepOptions,
    ) -> Record {
        self.cursor.seconds = self.seconds_before + self.started.elapsed().as_secs_f64();
        let mut record = Record::new(self.cursor.step, Split::Train);
        outcome.sums.report(&mut record);
        if let (Some(TrainingBatch { summary, .. }), Some(online)) = (ready, &self.online) {
            let RoundTimings { generate, judge, tokens } = online.took();
            summary.report(&mut record, options.beta, outcome.sums.kl());
            record.set("time_generate", generate);
            record.set("time_judge", judge);
            record.set_count("generated_tokens", tokens as u64);
        }
        record.set("grad_norm", outcome.grad_norm);
        record.set("learning_rate", options.learning_rate);
        record.set("epoch", self.cursor.step as f64 / self.steps_per_epoch() as f64);
        record.set_count("num_tokens", self.cursor.num_tokens);
        record.set("time", self.cursor.seconds);
        record.set_count("memory", resident_peak());
        record.set_count("arena", self.scorer.placement.high_water() as u64);
        record
    }

    /// Counts a step that was left out; too many in a row end the run.
    fn skipped(
        &mut self,
        outcome: &StepOutcome,
        ranked: Option<&[ScoredPrompt]>,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        self.cursor.skipped += 1;
        self.cursor.skipped_in_row += 1;
        let mut places: Vec<String> = outcome
            .non_finite_rows
            .iter()
            .map(|&row| ranked.map_or(row, |ranked| ranked[row as usize].row))
            .map(|row| self.prepared.train.origin(row as usize).to_string())
            .collect();
        // A prompt may be in several micro-batches.
        places.dedup();
        let rows = places.join(", ");
        let in_a_row = self.cursor.skipped_in_row;
        let step = self.cursor.step;
        let reason = match (outcome.sums.loss().is_finite(), self.config.compute.reduction) {
            (false, _) => "its loss is not finite",
            (true, SumForm::Fast) => "its gradient is not finite",
            (true, SumForm::Exact) => {
                "its gradient is not finite or too large for exact sums (2^13 / micro-batches for a number; \
                 compute.reduction = \"fast\" has no such limit)"
            }
        };
        observer.event(&Event::Skipped { step, reason, rows: &rows, in_a_row });
        if in_a_row > self.config.train.max_skipped {
            return Err(TrainError::NotFinite { step, reason, in_a_row, rows });
        }
        Ok(())
    }

    /// Checks the first loss, which is known where policy and reference are equal.
    fn check_start(&self, outcome: &StepOutcome, observer: &mut dyn Observer) -> Result<()> {
        // A teacher differs from the policy, and by how much its loss tells.
        if self.config.reference.kind == ReferenceKind::None || self.config.distill.is_some() {
            return Ok(());
        }
        let (log_ratio, tokens) = outcome.log_ratio;
        if self.config.starts_apart() {
            observer.event(&Event::StartingGap { per_token: log_ratio / tokens.max(1) as f64 });
            return Ok(());
        }
        let drops = self.prepared.decoder.adapter().is_some_and(|adapter| adapter.config().dropout > 0.0);
        if drops || self.config.train.neftune_noise_alpha.is_some() {
            // The policy alone has noise, and drops inputs.
            return Ok(());
        }
        let Some(expected) = exact_at_start(&self.config.objective) else { return Ok(()) };
        let found = outcome.sums.loss();
        if !found.is_finite() {
            // A non-finite loss is a broken row: the step is skipped and the rows are reported.
            return Ok(());
        }
        // Equal weights give equal numbers up to rounding, which depends on the packing of a row.
        let tolerance = match self.config.compute.compute_type() {
            tandem_kernels::DType::F32 => 1e-3,
            tandem_kernels::DType::Bf16 => 3e-2,
        };
        if (found - expected).abs() <= tolerance * expected.abs().max(1.0) {
            return Ok(());
        }
        Err(TrainError::WrongStart { expected, found, per_token: log_ratio / tokens.max(1) as f64 })
    }
}

/// The largest resident size of this process so far, in bytes; 0 where the system does not tell.
fn resident_peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    size::of_proc_line(&status, "VmHWM").unwrap_or(0)
}
