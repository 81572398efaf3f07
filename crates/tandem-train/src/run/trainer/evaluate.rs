//! Between steps: evaluation, samples, and the best evaluation so far.

use std::sync::atomic::AtomicBool;

use tandem_comm::Phase;

use super::{Files, Trainer};
use crate::checkpoint::{BestEvaluation, Checkpoint};
use crate::config::{BestMetric, EvaluationConfig};
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

    /// Evaluates the held-out rows, if there are some, and returns whether they were never better, so that the
    /// checkpoint of this step is to be kept.
    pub(super) fn evaluate_for_best(
        &mut self,
        observer: &mut dyn Observer,
        stop: &AtomicBool,
    ) -> Result<bool> {
        let record = self.evaluate_unless(observer, stop)?;
        record.map_or(Ok(false), |record| self.is_best(&record))
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
        let (best, step) = (self.best().cloned(), self.cursor.step);
        let rows = self.prepared.eval.as_ref().expect("they were evaluated").content_hash().to_hex();
        let compared = best_of(best, (&metric, rows.as_str()), (step, value), early_stopping_threshold);
        let Some((best, is_new)) = compared else {
            let reason = format!(
                "train.keep_best = \"{}\" was asked for, but the evaluation after step {step} has no such number; \
                 metrics.jsonl in the run's folder names those it has",
                metric.key
            );
            return Err(TrainError::Mismatch { reason });
        };
        self.cursor.best = Some(best);
        Ok(is_new)
    }

    /// Returns the best evaluation so far by the metric of `train.keep_best` and of the held-out rows. Either may be
    /// another than before a resume.
    fn best(&self) -> Option<&BestEvaluation> {
        let metric = self.config.train.evaluation.keep_best.as_ref()?;
        let rows = self.prepared.eval.as_ref()?.content_hash().to_hex();
        let is_of_rows = |best: &&BestEvaluation| best.rows.is_empty() || best.rows == rows.as_str();
        self.cursor.best.as_ref().filter(|best| best.metric == metric.key).filter(is_of_rows)
    }

    /// Looks for the best checkpoint of a run that goes on to its end, and tells where evaluations begin anew.
    ///
    /// # Errors
    /// The checkpoint is not there.
    pub(super) fn check_best(&self, observer: &mut dyn Observer) -> Result<()> {
        let evaluation = &self.config.train.evaluation;
        let (Some(metric), Some(kept)) = (&evaluation.keep_best, &self.cursor.best) else { return Ok(()) };
        let Some(best) = self.best() else {
            observer.event(&Event::Warning(&format!(
                "the best evaluation so far, after step {}, was by another metric or of other held-out rows: the best by {} is \
                 sought among those from now on",
                kept.step, metric.key
            )));
            return Ok(());
        };
        let folder = self.saver.folder_of(best.step);
        if self.until.is_some() || best.step == self.cursor.step || folder.exists() {
            return Ok(());
        }
        let reason = format!(
            "{}: this checkpoint has the best {} so far, {}, and is not there: put it back, or resume without train.keep_best",
            folder.display(),
            metric.key,
            best.value
        );
        Err(TrainError::Mismatch { reason })
    }

    /// Returns the evaluations since the best one, if they are so many that the run ends.
    pub(super) fn waited_enough(&self) -> Option<u64> {
        let patience = self.config.train.evaluation.early_stopping_patience?;
        let since = self.best()?.evaluations_since;
        (since >= patience).then_some(since)
    }

    /// Makes the policy the trained model: the weights of evaluations, of the best step if that is not the
    /// last. The run's checkpoints must be complete.
    pub(super) fn take_model(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let Some(best) = self.best().cloned().filter(|best| best.step != self.cursor.step) else {
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

/// Returns the best evaluation after one more, whose step and value are given, and whether it is that. Improvements that are no larger than
/// `threshold` make it the best, too, but use up patience. Nothing if there was none and the value is not a number.
fn best_of(
    before: Option<BestEvaluation>,
    (metric, rows): (&BestMetric, &str),
    (step, value): (u64, f64),
    threshold: f64,
) -> Option<(BestEvaluation, bool)> {
    let improves_by = |threshold| match &before {
        Some(best) => metric.improves(value, best.value, threshold),
        None => !value.is_nan(),
    };
    let (is_best, goes_on) = (improves_by(0.0), improves_by(threshold));
    let waited = before.as_ref().map_or(0, |best| best.evaluations_since);
    let evaluations_since = if goes_on { 0 } else { waited + 1 };
    let best = match before {
        _ if is_best => BestEvaluation {
            metric: metric.key.to_owned(),
            rows: rows.to_owned(),
            value,
            step,
            evaluations_since,
        },
        Some(best) => BestEvaluation { evaluations_since, ..best },
        None => return None,
    };
    Some((best, is_best))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of the best evaluation and evaluations since, by values after steps 0, 1 and so on.
    fn history(key: &str, threshold: f64, values: &[f64]) -> Vec<(u64, u64)> {
        let metric = BestMetric::ALL.into_iter().find(|metric| metric.key == key).unwrap();
        let mut best = None;
        let next = |evaluation| {
            let (new, is_best) = best_of(best.take(), (&metric, "a1"), evaluation, threshold).unwrap();
            assert_eq!(is_best, new.step == evaluation.0);
            let at = (new.step, new.evaluations_since);
            best = Some(new);
            at
        };
        (0..).zip(values.iter().copied()).map(next).collect()
    }

    /// As `EarlyStoppingCallback` and `load_best_model_at_end` of transformers.
    #[test]
    fn a_small_improvement_is_the_best_and_uses_up_patience() {
        let losses = [6.96, 5.68, 5.23, 4.866, 4.9, 4.2];
        assert_eq!(history("eval/loss", 0.5, &losses), [(0, 0), (1, 0), (2, 1), (3, 2), (3, 3), (5, 0)]);
        assert_eq!(history("eval/loss", 0.0, &losses), [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (5, 0)]);
        assert_eq!(
            history("eval/accuracy", 0.1, &[0.5, 0.55, f64::NAN, 0.7]),
            [(0, 0), (1, 1), (1, 2), (3, 0)]
        );
    }
}
