//! The one step that SFT, DPO and Online DPO share.
//!
//! reference log-probs → policy forward → objective → backward walk → (sum over micro-batches) → norm → clip →
//! optimiser. The recipes differ in the forest that comes in and in the objective; the order lives here alone.

use std::sync::Arc;

use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device};
use tandem_model::{Checkpointing, Decoder, Walk};

use crate::Result;
use crate::config::{Config, Method};
use crate::metrics::{MetricSums, Sides, Split};
use crate::micro_batch::MicroBatch;
use crate::objective::{BatchTotals, Loss, ObjectiveConfig, PairLogProbs, likelihood_loss, preference_loss};
use crate::optimizer::Optimizer;
use crate::prepare::{checkpointing, compute_type};
use crate::reference::{Reference, sequence_log_probs};
use crate::schedule::clip_coefficient;
use crate::store::{Accumulator, ReplicatedWeights};

/// What is needed to score a batch: a policy, what it is compared with, and the loss.
pub struct Scorer {
    /// Where to compute.
    pub device: Device,
    /// The model both policy and reference are.
    pub decoder: Arc<Decoder>,
    /// Compute type.
    pub dtype: DType,
    /// What backward recomputes.
    pub checkpointing: Checkpointing,
    /// SFT or preference.
    pub method: Method,
    /// The loss.
    pub objective: ObjectiveConfig,
    /// The weights that train.
    pub policy: ReplicatedWeights,
    /// What they are compared with.
    pub reference: Reference,
    scores: HeadScores,
    loss: Loss,
}

/// What training adds to scoring.
pub struct Learner {
    /// Gradient sums.
    pub gradients: Accumulator,
    /// Optimiser states.
    pub optimizer: Optimizer,
    d_log_prob: Vec<f32>,
}

/// What a step did.
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// Sums behind the metrics.
    pub sums: MetricSums,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Whether the weights moved. They do not if loss or gradient is not finite.
    pub updated: bool,
    /// Dataset rows of the micro-batches whose loss is not finite; of all, if only the gradient is not.
    pub suspects: Vec<u32>,
    /// Summed log-ratio of policy to reference over all sequences, and their scored tokens.
    pub log_ratio: (f64, u64),
}

impl Scorer {
    /// A scorer as the config asks for; buffers grow with the first batch.
    pub fn new(
        config: &Config,
        device: Device,
        decoder: Arc<Decoder>,
        policy: ReplicatedWeights,
        reference: Reference,
    ) -> Self {
        Self {
            device,
            decoder,
            dtype: compute_type(config),
            checkpointing: checkpointing(config),
            method: config.method,
            objective: config.objective.clone(),
            policy,
            reference,
            scores: HeadScores::default(),
            loss: Loss::default(),
        }
    }

    /// Loss and metrics of micro-batches, without gradients: evaluation. The means do not depend on the cut.
    ///
    /// # Errors
    /// If a forward pass fails.
    pub fn evaluate(
        &mut self,
        batch: &[MicroBatch],
        totals: &BatchTotals,
        sums: &mut MetricSums,
    ) -> Result<()> {
        for micro in batch {
            self.pass(Split::Eval, micro, totals, sums, None)?;
        }
        Ok(())
    }

    /// One optimiser step on a batch. `update` is the 1-based count of updates.
    ///
    /// # Errors
    /// If a pass fails. A loss or gradient that is not finite is no error: the step is left out.
    pub fn step(
        &mut self,
        learner: &mut Learner,
        batch: &[MicroBatch],
        learning_rate: f64,
        max_grad_norm: Option<f64>,
        update: u64,
    ) -> Result<StepOutcome> {
        let totals = totals(batch);
        let (mut sums, mut suspects, mut log_ratio) = (MetricSums::default(), Vec::new(), (0.0, 0));
        learner.gradients.clear(&self.device)?;
        for micro in batch {
            let ratio = self.pass(Split::Train, micro, &totals, &mut sums, Some(learner))?;
            log_ratio = (log_ratio.0 + ratio.0, log_ratio.1 + ratio.1);
            if !self.loss.sum.is_finite() {
                suspects.extend_from_slice(&micro.rows);
            }
        }
        let grad_norm = learner.gradients.norm(&self.device)?;
        let updated = suspects.is_empty() && grad_norm.is_finite();
        if updated {
            let scale = clip_coefficient(grad_norm, max_grad_norm) as f32;
            let Learner { gradients, optimizer, .. } = learner;
            optimizer.update(&self.device, learning_rate, scale, update, gradients, &mut self.policy)?;
        } else if suspects.is_empty() {
            suspects = batch.iter().flat_map(|micro| micro.rows.iter().copied()).collect();
        }
        Ok(StepOutcome { sums, grad_norm, updated, suspects, log_ratio })
    }

    /// Forward, objective, metrics and, with a learner, backward of one micro-batch.
    fn pass(
        &mut self,
        split: Split,
        micro: &MicroBatch,
        totals: &BatchTotals,
        sums: &mut MetricSums,
        learner: Option<&mut Learner>,
    ) -> Result<(f64, u64)> {
        let Self { device, decoder, dtype, checkpointing, policy, reference, scores, loss, .. } = self;
        let walk = Walk { decoder, device, dtype: *dtype, checkpointing: *checkpointing };
        let forest = &micro.forest;
        let reference = reference.log_probs(&walk, split, micro, scores)?;
        let saved = match learner {
            Some(_) => Some(walk.forward_keep(policy, forest, scores)?),
            None => walk.forward(policy, forest, scores).map(|()| None)?,
        };
        let log_probs = sequence_log_probs(forest, scores);
        let (weight, sides) = match self.method {
            Method::Sft => {
                likelihood_loss(&log_probs, &micro.scored_tokens, loss);
                (totals.chosen_tokens, Sides::Single)
            }
            Method::Dpo => {
                let pairs = PairLogProbs {
                    policy: &log_probs,
                    reference: reference.as_deref(),
                    answer_tokens: &micro.answer_tokens,
                    scored_tokens: &micro.scored_tokens,
                };
                preference_loss(&pairs, totals, &self.objective, loss);
                sums.add_pairs(&pairs, self.objective.beta);
                (totals.pairs, Sides::Pairs)
            }
        };
        sums.add_loss(loss);
        let (_, rows) = forest.scored_rows();
        sums.add_tokens(scores, &rows, &forest.predictions, sides);
        if let (Some(learner), Some(saved)) = (learner, saved) {
            // The loss is a mean over the whole batch, so its derivative is divided here, before anything is summed.
            let scale = 1.0 / weight as f64;
            learner.d_log_prob.clear();
            let derivative = |sequence: u32| (loss.d_log_prob[sequence as usize] * scale) as f32;
            learner.d_log_prob.extend(forest.predictions.iter().map(|p| derivative(p.sequence)));
            walk.backward(policy, &mut learner.gradients, forest, saved, scores, &learner.d_log_prob)?;
        }
        let ratio = reference.map_or(0.0, |r| log_probs.iter().zip(r).map(|(p, r)| p - r).sum());
        Ok((ratio, micro.scored_tokens.iter().map(|&n| u64::from(n)).sum()))
    }
}

impl Learner {
    /// A learner with the given gradient sums and optimiser.
    pub fn new(gradients: Accumulator, optimizer: Optimizer) -> Self {
        Self { gradients, optimizer, d_log_prob: Vec::new() }
    }
}

/// Counts over a whole batch, known before its first forward pass. For SFT every sequence counts as chosen.
pub fn totals(batch: &[MicroBatch]) -> BatchTotals {
    let mut totals = BatchTotals::default();
    for micro in batch {
        totals.pairs += micro.rows.len() as u64;
        let pairwise = micro.scored_tokens.len() == 2 * micro.rows.len();
        let chosen = micro.scored_tokens.iter().step_by(if pairwise { 2 } else { 1 });
        totals.chosen_tokens += chosen.map(|&n| u64::from(n)).sum::<u64>();
    }
    totals
}
