//! Forward and backward pass of one micro-batch, and of a rank that has none.

use tandem_kernels::Forest;
use tandem_model::{LayerExecutor, PolicyAndReferenceScores, SavedActivations};

use super::phase::StepPhase;
use super::stats::MicroBatchStats;
use super::{TrainState, TrainStep};
use crate::Result;
use crate::metrics::Split;
use crate::objective::{BatchTotals, Loss};
use crate::parallel::{DeviceMesh, StagedExecutor};
use crate::recipe::{LossTerms, MicroBatch, ScoredBatch, SequenceLogProbs};
use crate::reference::sequence_log_probs;

impl TrainStep {
    /// Goes forward with the ranks that have more micro-batches than this one, where ranks meet in
    /// the walk. The ranks of one model do so together, and have nothing to sum or to send.
    pub(super) fn idle_forward(&mut self) -> Result<()> {
        let Self { placement, decoder, dtype, checkpointing, policy, reference, .. } = self;
        let executor = LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing);
        reference.idle(&executor)?;
        Ok(executor.idle_forward(policy)?)
    }

    pub(super) fn idle_backward(&mut self, learner: &mut TrainState) -> Result<()> {
        let Self { placement, decoder, dtype, checkpointing, policy, .. } = self;
        let executor = LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing);
        Ok(executor.idle_backward(policy, &mut learner.gradients)?)
    }

    /// Computes reference, policy and loss of one micro-batch; the last stage has the loss, and
    /// what it compared. If backward follows, the derivative of the loss by each prediction's
    /// log-probability is written to `derivative`.
    pub(super) fn forward(
        &mut self,
        split: Split,
        micro: &MicroBatch,
        totals: &BatchTotals,
        mesh: &DeviceMesh,
        beta: f64,
        derivative: Option<&mut Vec<f32>>,
        dropout: Option<u64>,
    ) -> Result<(SavedActivations, Option<SequenceLogProbs>)> {
        let Self {
            placement, decoder, dtype, checkpointing, policy, reference, scores, loss, progress, ..
        } = self;
        let of_reference = &mut self.reference_scores;
        let executor = LayerExecutor {
            split: mesh.split(),
            host: placement.activations(),
            room: if derivative.is_some() { placement.rooms.train } else { placement.rooms.evaluation },
            ..LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing)
        };
        let executor = StagedExecutor { executor, stages: mesh.stages() };
        let forest = &micro.forest;
        let is_shared = reference.is_shared();
        let reference = reference.log_probs(&executor, split, micro, of_reference)?;
        let enter = |phase: StepPhase| {
            if split == Split::Train {
                phase.enter(progress, &placement.device);
            }
        };
        enter(StepPhase::Forward);
        let executor =
            StagedExecutor { executor: LayerExecutor { dropout, ..executor.executor }, ..executor };
        let streams = PolicyAndReferenceScores {
            policy: &mut *scores,
            reference: is_shared.then_some(&mut *of_reference),
        };
        let saved = executor.forward(policy, forest, streams, derivative.is_some())?;
        if !executor.is_last() {
            return Ok((saved, None));
        }
        enter(StepPhase::Loss);
        let reference = if is_shared { Some(sequence_log_probs(forest, of_reference)) } else { reference };
        let compared = SequenceLogProbs::new(sequence_log_probs(forest, scores), reference, micro);
        let batch = ScoredBatch { micro, log_probs: &compared, scores, reference_scores: of_reference };
        let terms = LossTerms { totals, objective: &self.objective, beta };
        let weight = self.recipe.loss(&batch, &terms, loss);
        if let Some(derivative) = derivative {
            scale_derivative(loss, forest, weight, derivative);
        }
        Ok((saved, Some(compared)))
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
        let Self { placement, decoder, dtype, checkpointing, policy, scores, .. } = self;
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
        executor.backward(policy, gradients, &micro.forest, saved, scores, d_log_prob)
    }

    /// Sums up the micro-batch that went forward last.
    pub(super) fn report(
        &self,
        micro: &MicroBatch,
        compared: Option<SequenceLogProbs>,
        totals: &BatchTotals,
        beta: f64,
    ) -> MicroBatchStats {
        let mut report = MicroBatchStats { in_range: true, ..MicroBatchStats::default() };
        let Some(compared) = compared else { return report };
        report.sums.add_loss(&self.loss);
        let (scores, reference_scores) = (&self.scores, &self.reference_scores);
        let batch = ScoredBatch { micro, log_probs: &compared, scores, reference_scores };
        let terms = LossTerms { totals, objective: &self.objective, beta };
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
fn scale_derivative(loss: &Loss, forest: &Forest, weight: u64, derivative: &mut Vec<f32>) {
    let scale = 1.0 / weight as f64;
    let of = |sequence: u32| loss.d_log_prob[sequence as usize];
    derivative.clear();
    if loss.d_token.is_empty() {
        derivative.extend(forest.predictions.iter().map(|p| (of(p.sequence) * scale) as f32));
    } else {
        let both = forest.predictions.iter().zip(&loss.d_token);
        derivative.extend(both.map(|(p, own)| ((of(p.sequence) + own) * scale) as f32));
    }
}
