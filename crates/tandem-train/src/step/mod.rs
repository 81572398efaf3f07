//! The one step of all recipes.
//!
//! ```text
//! zero gradients
//! for losses over the whole batch: forward of each micro-batch, exchange of log-probabilities
//! for each micro-batch: forward (reference, policy, loss), backward
//! reduce gradients over ranks
//! clip
//! optimiser step
//! ```
//!
//! [`TrainStep::forward_backward`] is all of it but the optimiser step, [`TrainStep::optimizer_step`] the
//! rest. Between them no weight has changed. A recipe ([`crate::recipe`]) differs in the forest
//! that comes in and in the loss; the order of passes is here alone.

mod averages;
mod evaluation;
mod learner;
mod noise;
mod passes;
mod phase;
mod stats;
mod whole_batch;

use std::collections::VecDeque;
use std::sync::Arc;

use tandem_comm::Progress;
use tandem_kernels::DType;
use tandem_kernels::ops::HeadScores;
use tandem_model::{Checkpointing, Decoder, WeightSource};

use crate::Result;
use crate::config::{Config, ShardedState};
use crate::draw::draw;
use crate::metrics::{MetricSums, Split};
use crate::objective::{Loss, ObjectiveConfig, RewardMean};
use crate::optimizer::clip_coefficient;
use crate::parallel::DeviceMesh;
use crate::parallel::pipeline::{PipelineAction, schedule_1f1b};
use crate::placement::MemoryPlacement;
use crate::recipe::{self, BatchPart, MicroBatch, RankBatch, Recipe};
use crate::reference::Reference;
use crate::weights::Policy;
use noise::EmbeddingNoise;
use phase::StepPhase;
use stats::StepStats;

pub(crate) use evaluation::evaluation_record;
pub(crate) use learner::TrainState;

/// Policy, reference and loss: everything that scores a batch.
pub struct TrainStep {
    /// Devices of compute and of offloaded state.
    pub placement: MemoryPlacement,
    /// The model both policy and reference are.
    pub decoder: Arc<Decoder>,
    /// Compute type.
    pub dtype: DType,
    /// Activation checkpointing.
    pub checkpointing: Checkpointing,
    /// The recipe.
    pub recipe: &'static dyn Recipe,
    /// The loss.
    pub objective: ObjectiveConfig,
    /// The weights that train.
    pub policy: Policy,
    /// The reference.
    pub reference: Reference,
    /// Mean of the rewards so far, for `bco`.
    pub rewards: RewardMean,
    /// Progress report of the passes.
    pub progress: Progress,
    sharded: ShardedState,
    /// With the update and the micro-batch, the key of dropout; with the update and the row, of noise.
    seed: u64,
    noise: EmbeddingNoise,
    scores: HeadScores,
    /// Scores of a reference that shares the policy's base.
    reference_scores: HeadScores,
    loss: Loss,
}

/// Numbers of one step.
#[derive(Clone, Copy, Debug)]
pub struct StepOptions {
    /// Learning rate.
    pub learning_rate: f64,
    /// Largest norm of the gradient; `None` never clips.
    pub max_grad_norm: Option<f64>,
    /// Strength of the pull towards the reference.
    pub beta: f64,
    /// 1-based count of updates, for Adam's bias correction and for dropout.
    pub update: u64,
}

impl StepOptions {
    /// Options of a step in a dry run, which has no numbers.
    pub fn dry() -> Self {
        Self { learning_rate: 0.0, max_grad_norm: None, beta: 1.0, update: 1 }
    }
}

/// Result of a step.
#[derive(Clone, Debug, Default)]
pub struct StepOutcome {
    /// Sums behind the metrics.
    pub sums: MetricSums,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Whether the weights were updated. They are not if loss or gradient is not finite.
    pub updated: bool,
    /// Dataset rows of micro-batches with a non-finite loss; all rows if only the gradient is not
    /// finite.
    pub non_finite_rows: Vec<u32>,
    /// Summed log-ratio of policy to reference over all sequences, and their scored tokens.
    pub log_ratio: (f64, u64),
}

/// Builds the micro-batch of some rows.
pub(crate) type Build<'a> = &'a mut dyn FnMut(BatchPart<'_>) -> Result<MicroBatch>;

impl TrainStep {
    /// Creates a scorer from the config; buffers grow with the first batch.
    pub fn new(
        config: &Config,
        placement: MemoryPlacement,
        decoder: Arc<Decoder>,
        policy: Policy,
        reference: Reference,
    ) -> Self {
        let noise = EmbeddingNoise::new(config, &decoder);
        Self {
            placement,
            decoder,
            dtype: config.compute.compute_type(),
            checkpointing: config.compute.checkpointing.into(),
            recipe: recipe::for_method(config.method),
            objective: config.objective.clone(),
            policy,
            reference,
            rewards: RewardMean::default(),
            progress: Progress::default(),
            sharded: config.compute.sharded(),
            seed: config.seed,
            noise,
            scores: HeadScores::default(),
            reference_scores: HeadScores::default(),
            loss: Loss::default(),
        }
    }

    /// Computes one optimiser step on a batch, of which this rank computes its share. Every rank
    /// returns the same.
    ///
    /// # Errors
    /// A pass fails. A non-finite loss or gradient is no error: the update is skipped.
    pub fn step(
        &mut self,
        learner: &mut TrainState,
        mesh: &mut DeviceMesh,
        share: &RankBatch,
        build: Build<'_>,
        options: &StepOptions,
    ) -> Result<StepOutcome> {
        let outcome = self.forward_backward(learner, mesh, share, build, options)?;
        self.optimizer_step(learner, mesh, &outcome, options)?;
        Ok(outcome)
    }

    /// Computes loss and gradients of a batch, reduced over all ranks. No weight changes.
    pub fn forward_backward(
        &mut self,
        learner: &mut TrainState,
        mesh: &mut DeviceMesh,
        share: &RankBatch,
        build: Build<'_>,
        options: &StepOptions,
    ) -> Result<StepOutcome> {
        self.enter(StepPhase::Begin);
        learner.gradients.begin(share.cuts.len())?;
        let mut stats = self.micro_batches(learner, mesh, share, build, options)?;
        self.enter(StepPhase::Reduce);
        // First, for other ranks may still compute: they wait for nobody then.
        learner.gradients.begin_reduction()?;
        stats.exchange(mesh.world())?;
        let gradients = learner.gradients.reduce(mesh)?;
        let grad_norm = if stats.is_in_range() { gradients.norm(mesh)? } else { f64::INFINITY };
        let outcome = stats.outcome(share, grad_norm, self.placement.device.is_meta());
        if outcome.updated && self.objective.has("bco") {
            let (sum, count) = outcome.sums.rewards();
            self.rewards = self.rewards.with(sum, count);
        }
        Ok(outcome)
    }

    /// Goes forward and backward with this rank's micro-batches, in the order of its pipeline
    /// stage.
    fn micro_batches(
        &mut self,
        learner: &mut TrainState,
        mesh: &mut DeviceMesh,
        share: &RankBatch,
        build: Build<'_>,
        options: &StepOptions,
    ) -> Result<StepStats> {
        let StepOptions { beta, update, .. } = *options;
        let seed = self.seed;
        self.noise.begin_step(update);
        let key = |index: usize| draw(&[seed, update, index as u64]);
        let mut whole =
            self.whole_batch(Split::Train, mesh, share, &mut *build, beta, &|index| Some(key(index)))?;
        let mut stats = StepStats::new(share.cuts.len());
        let (mut under_way, mut last) = (VecDeque::new(), None);
        let rounds = self.rounds(share);
        for turn in schedule_1f1b(mesh.stage(), rounds) {
            if turn == PipelineAction::Backward(rounds - 1) {
                learner.gradients.begin_last_pass();
            }
            match turn {
                PipelineAction::Forward(round) => match share.own_micro_batches.get(round) {
                    Some(&index) => {
                        self.enter(StepPhase::Data);
                        let mut micro = build(share.part(index))?;
                        micro.first_pair = share.pairs_before(index);
                        let dropout = Some(key(index));
                        let derivative = Some(&mut learner.d_log_prob);
                        let passed =
                            self.forward(Split::Train, &micro, &mut whole, mesh, beta, derivative, dropout)?;
                        under_way.push_back((index, micro, passed));
                    }
                    None => {
                        self.enter(StepPhase::Forward);
                        self.idle_forward()?;
                    }
                },
                // Ranks of one model replica have equal counts and idle together afterwards.
                PipelineAction::Backward(_) => match under_way.pop_front() {
                    Some((index, micro, (saved, compared))) => {
                        self.enter(StepPhase::Backward);
                        self.backward(learner, &micro, saved, mesh, key(index))?;
                        self.policy.release_all();
                        // Only now: a GPU has its work and does not wait for the metrics.
                        let report = self.report(&micro, compared, &whole, beta);
                        stats.set(index, &report, mesh.is_reporting_rank());
                        last = Some((index, report));
                    }
                    None => {
                        self.enter(StepPhase::IdleBackward);
                        self.idle_backward(learner)?;
                        self.policy.release_all();
                    }
                },
            }
        }
        if let Some((index, mut report)) = last {
            // Asked once per step: it synchronises a GPU.
            report.in_range = learner.gradients.take_in_range()?;
            stats.set(index, &report, mesh.is_reporting_rank());
        }
        Ok(stats)
    }

    /// Clips the gradient and changes the weights, if loss and gradient are finite.
    pub fn optimizer_step(
        &mut self,
        learner: &mut TrainState,
        mesh: &mut DeviceMesh,
        outcome: &StepOutcome,
        options: &StepOptions,
    ) -> Result<()> {
        if !outcome.updated {
            learner.gradients.release();
            return Ok(());
        }
        self.enter(StepPhase::Update);
        let scale = clip_coefficient(outcome.grad_norm, options.max_grad_norm) as f32;
        self.finish_writes()?;
        let TrainState { gradients, optimizer, .. } = learner;
        let StepOptions { learning_rate, update, .. } = *options;
        optimizer.step(learning_rate, scale, update, gradients, &mut self.policy, mesh.shard())?;
        gradients.release();
        self.policy.gather(&self.placement.device, optimizer.partition(), mesh.shard())
    }

    /// Computes loss and metrics of a batch without gradients. The means do not depend on the cut
    /// into micro-batches.
    pub fn evaluate(
        &mut self,
        mesh: &mut DeviceMesh,
        share: &RankBatch,
        build: Build<'_>,
    ) -> Result<MetricSums> {
        let beta = self.objective.beta;
        let mut whole = self.whole_batch(Split::Eval, mesh, share, &mut *build, beta, &|_| None)?;
        let mut stats = StepStats::new(share.cuts.len());
        for round in 0..self.rounds(share) {
            let Some(&index) = share.own_micro_batches.get(round) else {
                self.idle_forward()?;
                self.policy.release_all();
                continue;
            };
            let mut micro = build(share.part(index))?;
            micro.first_pair = share.pairs_before(index);
            let (_, compared) = self.forward(Split::Eval, &micro, &mut whole, mesh, beta, None, None)?;
            let report = self.report(&micro, compared, &whole, beta);
            self.policy.release_all();
            if let Some(teacher) = self.reference.teacher() {
                teacher.finish();
            }
            stats.set(index, &report, mesh.is_reporting_rank());
        }
        stats.exchange(mesh.world())?;
        Ok(stats.total().sums)
    }

    /// Makes what is computed with from masters that were read: the policy's, and those of a reference that
    /// follows it.
    pub fn refresh(&mut self) -> Result<()> {
        let Self { placement, policy, reference, .. } = self;
        policy.refresh(&placement.device)?;
        reference.ema_reference().map_or(Ok(()), |follower| follower.refresh(&placement.device))
    }

    /// Pulls a reference that follows the policy towards it: `weight · policy + (1 − weight) ·
    /// reference`.
    pub fn update_ema_reference(&mut self, weight: f32) -> Result<()> {
        let Self { placement, policy, reference, .. } = self;
        match reference {
            Reference::Followed(weights) => weights.follow(&placement.device, policy, weight),
            _ => policy.update_ema_reference(&placement.device, weight),
        }
    }

    /// How often this rank walks: also with nothing to compute, if other ranks need it in their
    /// walk.
    fn rounds(&self, share: &RankBatch) -> usize {
        if self.sharded.meets_in_walk() { share.rounds } else { share.own_micro_batches.len() }
    }

    fn enter(&self, phase: StepPhase) {
        phase.enter(&self.progress, &self.placement.device);
    }
}
