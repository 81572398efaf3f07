//! Between steps: evaluation, samples, and the best evaluation so far.

use std::sync::atomic::AtomicBool;

use tandem_comm::Phase;

use super::{Files, Trainer};
use crate::checkpoint::{BestEvaluation, Checkpoint};
use crate::config::EvaluationConfig;
use crate::events::{Event, Observer};
use crate::metrics::Record;
use crate::run::resume;
use crate::samples::Sampler;
use crate::step::evaluation_record;
use crate::{Result, TrainError};

impl Trainer {
    /// Evaluates the held-out rows, if there are some, and logs their metrics.
    ///
    /// # Errors
    /// A pass or another rank fails, or a file cannot be written.
    pub fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<Option<Record>> {
        self.evaluate_unless(observer, &AtomicBool::new(false))
    }

    /// Evaluates the held-out rows; an online run only if no rank is stopped.
    fn evaluate_unless(&mut self, observer: &mut dyn Observer, stop: &AtomicBool) -> Result<Option<Record>> {
        let Self { config, scorer, learner, mesh, batcher, online, .. } = self;
        let Some(cache) = &self.prepared.eval else { return Ok(None) };
        mesh.world().progress().begin_phase(Phase::Evaluate);
        scorer.placement.device.begin_phase("evaluation");
        let step = self.cursor.step;
        let evaluated = scorer.with_evaluation_weights(learner, mesh, |scorer, mesh| match online {
            Some(online) if config.method.generates() => online.evaluate(step, scorer, mesh, stop),
            _ => evaluation_record(scorer, mesh, batcher, cache, step).map(Some),
        })?;
        let Some(mut record) = evaluated else {
            // The run that goes on evaluates first, also after the last step.
            (self.cursor.is_evaluation_due, self.is_stopping) = (true, true);
            return Ok(None);
        };
        if std::mem::take(&mut self.cursor.is_evaluation_due) {
            // The checkpoint of this step does not know of its evaluation.
            self.saved = None;
        }
        record.set("epoch", step as f64 / self.steps_per_epoch() as f64);
        self.log(&record, observer)?;
        Ok(Some(record))
    }

    /// Evaluates the held-out rows, if there are some, and starts a checkpoint if they were never better.
    pub(super) fn evaluate_and_keep_best(
        &mut self,
        observer: &mut dyn Observer,
        stop: &AtomicBool,
    ) -> Result<()> {
        let Some(record) = self.evaluate_unless(observer, stop)? else { return Ok(()) };
        if self.is_best(&record)? { self.save(observer, stop) } else { Ok(()) }
    }

    /// Has the model answer the prompts of a few rows, and keeps the answers.
    pub(super) fn sample(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let Some(sampler) = &self.sampler else { return Ok(()) };
        let Self { config, scorer, learner, mesh, .. } = self;
        let takes_part = Sampler::takes_part(config, mesh.world().rank());
        scorer.placement.device.begin_phase("samples");
        let answers = scorer.with_evaluation_weights(learner, mesh, |scorer, mesh| {
            takes_part.then(|| sampler.answer(scorer, mesh)).transpose()
        })?;
        let Some(answers) = answers else { return Ok(()) };
        let Some(Files { samples: Some(file), .. }) = &mut self.files else { return Ok(()) };
        let (step, samples) = (self.cursor.step, sampler.samples(&self.config, &self.prepared, &answers)?);
        for sample in &samples {
            file.write_line(&sample.to_json(step))?;
        }
        observer.event(&Event::Samples { step, samples: &samples });
        Ok(())
    }

    /// Notes whether an evaluation is the best so far. Every rank has the same numbers.
    fn is_best(&mut self, record: &Record) -> Result<bool> {
        let EvaluationConfig { keep_best: Some(metric), early_stopping_threshold, .. } =
            self.config.train.evaluation
        else {
            return Ok(false);
        };
        let value = record.get(metric.name()).unwrap_or(f64::NAN);
        let best = self.cursor.best.take().filter(|best| best.metric == metric.key);
        let improves = |best: &BestEvaluation| metric.improves(value, best.value, early_stopping_threshold);
        let is_best = best.as_ref().map_or(!value.is_nan(), improves);
        self.cursor.best = match best {
            _ if is_best => Some(BestEvaluation {
                metric: metric.key.to_owned(),
                value,
                step: self.cursor.step,
                evaluations_since: 0,
            }),
            Some(best) => Some(BestEvaluation { evaluations_since: best.evaluations_since + 1, ..best }),
            None => {
                let reason = format!(
                    "train.keep_best = \"{}\" was asked for, but the evaluation after step {} has no such number; \
                     metrics.jsonl in the run's folder names those it has",
                    metric.key, self.cursor.step
                );
                return Err(TrainError::Mismatch { reason });
            }
        };
        Ok(is_best)
    }

    /// Returns the evaluations since the best one, if they are so many that the run ends.
    pub(super) fn waited_enough(&self) -> Option<u64> {
        let patience = self.config.train.evaluation.early_stopping_patience?;
        let since = self.cursor.best.as_ref()?.evaluations_since;
        (since >= patience).then_some(since)
    }

    /// Makes the policy the trained model: the weights of evaluations, of the best step if that is not the
    /// last. The run's checkpoints must be complete.
    pub(super) fn take_model(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let best = self.cursor.best.as_ref().filter(|_| self.config.train.evaluation.keep_best.is_some());
        let Some(best) = best.filter(|best| best.step != self.cursor.step) else {
            return self.scorer.keep_evaluation_weights(&mut self.learner, &mut self.mesh);
        };
        // The checksums are read once, by the rank that has written the manifest.
        let folder = self.saver.folder_of(best.step);
        let is_first = self.mesh.world().rank() == 0;
        let opened = is_first.then(|| Checkpoint::open(&folder)).transpose()?;
        let checkpoint = resume::agree_on(opened, self.mesh.world())?.expect("the first rank has opened it");
        resume::restore_evaluated(&checkpoint, self.config.train.evaluation_weights(), &mut self.scorer)?;
        observer.event(&Event::Best { step: best.step, metric: &best.metric, value: best.value });
        Ok(())
    }
}
