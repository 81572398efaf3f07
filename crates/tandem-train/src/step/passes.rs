//! Forward and backward pass of one micro-batch, and of a rank that has none.

use tandem_model::{LayerExecutor, PolicyAndReferenceScores, SavedActivations};

use super::phase::StepPhase;
use super::stats::MicroBatchStats;
use super::{TrainState, TrainStep};
use crate::Result;
use crate::metrics::Split;
use crate::objective::{Loss, WholeBatch};
use crate::parallel::{DeviceMesh, StagedExecutor};
use crate::recipe::{LossTerms, MicroBatch, ScoredBatch, SequenceLogProbs, counted_entropies};
use crate::reference::Teacher;

impl TrainStep {
    /// Goes forward with the ranks that have more micro-batches than this one, where ranks meet in
    /// the walk. The ranks of one model do so together, and have nothing to sum or to send.
    pub(super) fn idle_forward(&mut self) -> Result<()> {
        let Self { placement, decoder, dtype, checkpointing, policy, reference, .. } = self;
        let executor = LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing);
        reference.idle(&executor)?;
        executor.idle_forward(policy)?;
        if let Some(teacher) = reference.teacher() {
            executor.idle_divergence(policy)?;
            teacher.idle_head()?;
        }
        Ok(())
    }

    pub(super) fn idle_backward(&mut self, learner: &mut TrainState) -> Result<()> {
        let Self { placement, decoder, dtype, checkpointing, policy, reference, .. } = self;
        let executor = LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing);
        let pass = reference.teacher().map(Teacher::pass);
        executor.idle_backward(policy, &mut learner.gradients, pass)?;
        if let Some(teacher) = reference.teacher() {
            teacher.finish();
        }
        Ok(())
    }

    /// Computes reference, policy and loss of one micro-batch; the last stage has the loss, and
    /// what it compared. If backward follows, the derivative of the loss by each prediction's
    /// log-probability, or by its divergence from a teacher, is written to `derivative`. A `whole` of
    /// this micro-batch alone is completed.
    pub(super) fn forward(
        &mut self,
        split: Split,
        micro: &MicroBatch,
        whole: &mut WholeBatch,
        mesh: &DeviceMesh,
        beta: f64,
        derivative: Option<&mut Vec<f32>>,
        dropout: Option<u64>,
    ) -> Result<(SavedActivations, Option<SequenceLogProbs>)> {
        let (saved, compared) = self.score(split, micro, mesh, derivative.is_some(), dropout)?;
        let Some(compared) = compared else { return Ok((saved, None)) };
        if split == Split::Train {
            StepPhase::Loss.enter(&self.progress, &self.placement.device);
        }
        if micro.pairs.len() as u64 == whole.totals.pairs {
            whole.complete(&self.objective, &compared.pairs());
        }
        if let Some(top) = self.objective.top_entropy()
            && micro.answers.len() as u64 == whole.totals.pairs
        {
            whole.set_least_entropy(top, &mut counted_entropies(micro, &self.scores));
        }
        let Self { scores, reference_scores, loss, reference, .. } = self;
        let divergences = reference.divergences();
        let batch = ScoredBatch { micro, log_probs: &compared, scores, reference_scores, divergences };
        let terms = LossTerms { whole, objective: &self.objective, beta };
        let weight = self.recipe.loss(&batch, &terms, loss);
        if let Some(derivative) = derivative {
            scale_derivative(loss, micro, weight, derivative);
        }
        Ok((saved, Some(compared)))
    }

    /// Computes the log-probabilities of one micro-batch under reference and policy, which the last
    /// stage has; `keeps` states whether backward follows.
    pub(super) fn score(
        &mut self,
        split: Split,
        micro: &MicroBatch,
        mesh: &DeviceMesh,
        keeps: bool,
        dropout: Option<u64>,
    ) -> Result<(SavedActivations, Option<SequenceLogProbs>)> {
        let Self {
            placement, decoder, dtype, checkpointing, policy, reference, scores, progress, noise, ..
        } = self;
        let noise = if split == Split::Train { noise.of(micro) } else { None };
        let of_reference = &mut self.reference_scores;
        let executor = LayerExecutor {
            split: mesh.split(),
            host: placement.activations(),
            room: if split == Split::Train { placement.rooms.train } else { placement.rooms.evaluation },
            keeps_logits: reference.teacher().is_none(),
            ..LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing)
        };
        let executor = StagedExecutor { executor, stages: mesh.stages() };
        let forest = &micro.forest;
        let is_shared = reference.is_shared();
        let log_probs = reference.log_probs(&executor, split, micro, of_reference)?;
        if split == Split::Train {
            StepPhase::Forward.enter(progress, &placement.device);
        }
        let executor =
            StagedExecutor { executor: LayerExecutor { dropout, noise, ..executor.executor }, ..executor };
        let streams = PolicyAndReferenceScores {
            policy: &mut *scores,
            reference: is_shared.then_some(&mut *of_reference),
        };
        let mut saved = executor.forward(policy, forest, streams, keeps)?;
        if let Some(teacher) = reference.teacher() {
            teacher.compare(&executor.executor, policy, &mut saved, scores)?;
        }
        if !executor.is_last() {
            return Ok((saved, None));
        }
        let reference = if is_shared { Some(micro.sequence_log_probs(of_reference)) } else { log_probs };
        Ok((saved, Some(SequenceLogProbs::new(scores, reference, micro, &self.objective))))
    }

    /// Computes the gradients of a micro-batch that went forward.
    pub(super) fn backward(
        &mut self,
        learner: &mut TrainState,
        micro: &MicroBatch,
        saved: SavedActivations,
        mesh: &DeviceMesh,
        dropout: u64,
    ) -> Result<()> {
        let Self { placement, decoder, dtype, checkpointing, policy, reference, scores, .. } = self;
        let executor = LayerExecutor {
            split: mesh.split(),
            host: placement.activations(),
            room: placement.rooms.train,
            dropout: Some(dropout),
            ..LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing)
        };
        let executor = StagedExecutor { executor, stages: mesh.stages() };
        // The last stage goes back before it goes forward again: scores and derivative are this
        // micro-batch's.
        let TrainState { gradients, d_log_prob, .. } = learner;
        let pass = reference.teacher().map(Teacher::pass);
        executor.backward(policy, gradients, &micro.forest, saved, (scores, d_log_prob), pass)?;
        if let Some(teacher) = reference.teacher() {
            teacher.finish();
        }
        Ok(())
    }

    /// Sums up the micro-batch that went forward last.
    pub(super) fn report(
        &self,
        micro: &MicroBatch,
        compared: Option<SequenceLogProbs>,
        whole: &WholeBatch,
        beta: f64,
    ) -> MicroBatchStats {
        let mut report = MicroBatchStats { in_range: true, ..MicroBatchStats::default() };
        let Some(compared) = compared else { return report };
        report.sums.add_loss(&self.loss);
        let (scores, reference_scores) = (&self.scores, &self.reference_scores);
        let divergences = self.reference.divergences();
        let batch = ScoredBatch { micro, log_probs: &compared, scores, reference_scores, divergences };
        let terms = LossTerms { whole, objective: &self.objective, beta };
        self.recipe.add_metrics(&batch, &terms, &mut report.sums);
        let SequenceLogProbs { policy, reference, .. } = compared;
        report.log_ratio = reference.map_or(0.0, |r| policy.iter().zip(r).map(|(p, r)| p - r).sum());
        report.scored_tokens = micro.scored_tokens.iter().map(|&n| f64::from(n)).sum();
        report
    }
}

/// Writes the derivative of the loss by each prediction's log-probability. The loss is a mean over
/// the whole batch, of weight `weight`, so the derivative is divided here, before anything is
/// summed.
fn scale_derivative(loss: &Loss, micro: &MicroBatch, weight: u64, derivative: &mut Vec<f32>) {
    let scale = 1.0 / weight as f64;
    derivative.clear();
    derivative.extend(micro.forest.predictions.iter().enumerate().map(|(i, prediction)| {
        let sequence = prediction.sequence as usize;
        let token_weight = micro.token_weights.get(i).map_or(1.0, |&weight| f64::from(weight));
        let likelihood = loss.d_likelihood.get(sequence).copied().unwrap_or(0.0);
        let own = loss.d_token.get(i).copied().unwrap_or(0.0);
        ((loss.d_log_prob[sequence] * token_weight + likelihood + own) * scale) as f32
    }));
}
