//! The one step that SFT, DPO and Online DPO share.
//!
//! reference log-probs → policy forward → objective → backward walk → (sum over micro-batches) → norm → clip →
//! optimiser. The recipes differ in the forest that comes in and in the objective; the order lives here alone.

mod evaluation;
mod stats;

use std::collections::VecDeque;
use std::sync::Arc;

use tandem_comm::{Phase, Progress};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{Backend, DType};
use tandem_model::{Checkpointing, Decoder, SavedWalk, Streams, Walk, WeightSource};

use crate::Result;
use crate::checkpoint::snapshot::{self, Snapshot};
use crate::config::{Config, ReferenceKind, ShardedState};
use crate::draw::draw;
use crate::gradients::Accumulator;
use crate::metrics::{MetricSums, Split};
use crate::objective::{BatchTotals, Loss, ObjectiveConfig};
use crate::optimizer::Optimizer;
use crate::optimizer::clip_coefficient;
use crate::parallel::Mesh;
use crate::parallel::pipeline::{Turn, turns};
use crate::parallel::{Partition, StagedWalk};
use crate::placement::Homes;
use crate::recipe::{self, Compared, MicroBatch, Recipe, ScoredBatch, Share};
use crate::reference::{Reference, sequence_log_probs};
use crate::weights::Policy;
use stats::{Report, Reports};

pub use evaluation::evaluation_record;

/// What is needed to score a batch: a policy, what it is compared with, and the loss.
pub struct Scorer {
    /// Where to compute, and where what is not computed with lies.
    pub homes: Homes,
    /// The model both policy and reference are.
    pub decoder: Arc<Decoder>,
    /// Compute type.
    pub dtype: DType,
    /// What backward recomputes.
    pub checkpointing: Checkpointing,
    /// The recipe.
    pub recipe: &'static dyn Recipe,
    /// The loss.
    pub objective: ObjectiveConfig,
    /// The weights that train.
    pub policy: Policy,
    /// What they are compared with.
    pub reference: Reference,
    /// Where the passes say how far they have come.
    pub progress: Progress,
    sharded: ShardedState,
    /// With the update and the micro-batch, what decides which inputs of an adapter are dropped.
    seed: u64,
    scores: HeadScores,
    /// Of a reference that goes along.
    reference_scores: HeadScores,
    loss: Loss,
}

/// What training adds to scoring.
pub struct Learner {
    /// Gradient sums.
    pub gradients: Accumulator,
    /// Optimiser states.
    pub optimizer: Optimizer,
    /// What a checkpoint is written from while training goes on, if that is asked for.
    pub snapshot: Option<Snapshot>,
    d_log_prob: Vec<f32>,
}

/// What a step did.
#[derive(Clone, Debug, Default)]
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
        homes: Homes,
        decoder: Arc<Decoder>,
        policy: Policy,
        reference: Reference,
    ) -> Self {
        Self {
            homes,
            decoder,
            dtype: config.compute.compute_type(),
            checkpointing: config.compute.checkpointing.into(),
            recipe: recipe::for_method(config.method),
            objective: config.objective.clone(),
            policy,
            reference,
            progress: Progress::default(),
            sharded: config.compute.sharded(),
            seed: config.seed,
            scores: HeadScores::default(),
            reference_scores: HeadScores::default(),
            loss: Loss::default(),
        }
    }

    /// Loss and metrics of a batch, without gradients: evaluation. The means do not depend on the cut. `build` makes the
    /// micro-batch of some rows.
    ///
    /// # Errors
    /// If a forward pass fails, or a rank is lost.
    pub fn evaluate(
        &mut self,
        mesh: &mut Mesh,
        share: &Share,
        build: &mut dyn FnMut(&[u32]) -> Result<MicroBatch>,
    ) -> Result<MetricSums> {
        let mut reports = Reports::new(share.cuts.len());
        for round in 0..self.rounds(share) {
            let Some(&index) = share.mine.get(round) else {
                self.idle_forward()?;
                self.policy.rest();
                continue;
            };
            let micro = build(share.rows_of(index))?;
            let (_, compared) = self.forward(Split::Eval, &micro, &share.totals, mesh, None, None)?;
            let report = self.report(&micro, compared);
            self.policy.rest();
            reports.set(index, &report, mesh.leads());
        }
        reports.exchange(mesh.world())?;
        Ok(reports.together().sums)
    }

    /// One optimiser step on a batch, of which this rank computes its share; `build` makes the micro-batch of some rows.
    /// `update` is the 1-based count of updates. Every rank returns the same.
    ///
    /// # Errors
    /// If a pass fails, or a rank is lost. A loss or gradient that is not finite is no error: the step is left out.
    pub fn step(
        &mut self,
        learner: &mut Learner,
        mesh: &mut Mesh,
        share: &Share,
        build: &mut dyn FnMut(&[u32]) -> Result<MicroBatch>,
        learning_rate: f64,
        max_grad_norm: Option<f64>,
        update: u64,
    ) -> Result<StepOutcome> {
        let outcome = self.differentiate(learner, mesh, share, build, update)?;
        self.update(learner, mesh, &outcome, learning_rate, max_grad_norm, update)?;
        Ok(outcome)
    }

    /// The first part of a step, in which no weights change: the sums of gradients, and what the step comes to. [`Scorer::update`] is
    /// the other.
    ///
    /// # Errors
    /// As [`Scorer::step`].
    pub fn differentiate(
        &mut self,
        learner: &mut Learner,
        mesh: &mut Mesh,
        share: &Share,
        build: &mut dyn FnMut(&[u32]) -> Result<MicroBatch>,
        update: u64,
    ) -> Result<StepOutcome> {
        self.progress.enter(Phase::Forward);
        self.homes.device.note(format_args!("beginning of a step"));
        let mut reports = Reports::new(share.cuts.len());
        learner.gradients.begin(share.cuts.len())?;
        let (mut under_way, mut last) = (VecDeque::new(), None);
        for turn in turns(mesh.stage(), self.rounds(share)) {
            match turn {
                Turn::Forward(round) => {
                    let Some(&index) = share.mine.get(round) else {
                        self.homes.device.enter("forward");
                        self.idle_forward()?;
                        continue;
                    };
                    self.progress.enter(Phase::Forward);
                    self.homes.device.enter("data");
                    let micro = build(share.rows_of(index))?;
                    let derivative = Some(&mut learner.d_log_prob);
                    let key = dropout_key(self.seed, update, index);
                    let (saved, compared) =
                        self.forward(Split::Train, &micro, &share.totals, mesh, derivative, Some(key))?;
                    under_way.push_back((index, micro, saved, compared));
                }
                Turn::Backward(_) => {
                    self.homes.device.enter("backward");
                    // The ranks of one model have as many micro-batches, and idle together when they are through.
                    let Some((index, micro, saved, compared)) = under_way.pop_front() else {
                        self.idle_backward(learner)?;
                        self.policy.rest();
                        continue;
                    };
                    self.progress.enter(Phase::Backward);
                    self.backward(learner, &micro, saved, mesh, dropout_key(self.seed, update, index))?;
                    self.policy.rest();
                    // Only now: a GPU has its work and does not wait for the metrics.
                    let report = self.report(&micro, compared);
                    reports.set(index, &report, mesh.leads());
                    last = Some((index, report));
                }
            }
        }
        if let Some((index, mut report)) = last {
            // Asked once a step: a GPU comes to an end first.
            report.in_range = learner.gradients.take_in_range()?;
            reports.set(index, &report, mesh.leads());
        }
        self.progress.enter(Phase::Reduce);
        self.homes.device.enter("reduction");
        self.homes.device.note(format_args!("reduction of gradients"));
        reports.exchange(mesh.world())?;
        let whole = reports.together();
        let mut suspects: Vec<u32> = Vec::new();
        for index in 0..share.cuts.len() {
            if !reports.get(index).sums.loss().is_finite() {
                suspects.extend_from_slice(share.rows_of(index));
            }
        }
        learner.gradients.reduce(mesh)?;
        learner.gradients.join_tied(mesh.stages())?;
        let grad_norm = if whole.in_range { learner.gradients.norm(mesh)? } else { f64::INFINITY };
        // A dry run has no numbers, and takes the way of a good step.
        let is_dry = self.homes.device.is_meta();
        let updated = is_dry || (suspects.is_empty() && grad_norm.is_finite());
        if !updated && suspects.is_empty() {
            suspects.clone_from(&share.rows);
        }
        let log_ratio = (whole.log_ratio, whole.scored_tokens as u64);
        Ok(StepOutcome { sums: whole.sums, grad_norm, updated, suspects, log_ratio })
    }

    /// The second part of a step: changes the weights, if the first came to something that they can be changed by.
    ///
    /// # Errors
    /// As [`Scorer::step`].
    pub fn update(
        &mut self,
        learner: &mut Learner,
        mesh: &mut Mesh,
        outcome: &StepOutcome,
        learning_rate: f64,
        max_grad_norm: Option<f64>,
        update: u64,
    ) -> Result<()> {
        if !outcome.updated {
            return Ok(());
        }
        self.progress.enter(Phase::Update);
        self.homes.device.enter("update");
        self.homes.device.note(format_args!("update"));
        let scale = clip_coefficient(outcome.grad_norm, max_grad_norm) as f32;
        let Learner { gradients, optimizer, .. } = learner;
        // What lies in a GPU's file the processor updates, which no stream waits for.
        if self.homes.staged().is_some() {
            self.homes.device.synchronize()?;
        }
        optimizer.update(learning_rate, scale, update, gradients, &mut self.policy)?;
        self.policy.gather(&self.homes.device, optimizer.partition(), mesh.shard())
    }

    /// Pulls such a reference towards the policy: `weight · policy + (1 − weight) · reference`.
    ///
    /// # Errors
    /// If they are of different shapes.
    pub fn pull_follower(&mut self, weight: f32) -> Result<()> {
        let Self { homes, policy, reference, .. } = self;
        match reference {
            Reference::Followed(weights) => weights.follow(&homes.device, policy, weight),
            _ => policy.pull_follower(&homes.device, weight),
        }
    }

    /// How often this rank walks: also where it has nothing to compute, if others need it in their walk.
    fn rounds(&self, share: &Share) -> usize {
        if self.sharded.meets_in_walk() { share.rounds } else { share.mine.len() }
    }

    /// Walks along forward with the ranks that have more micro-batches than this one, where they meet in the walk. The ranks
    /// of one model do so together, and have nothing to sum or to send.
    fn idle_forward(&mut self) -> Result<()> {
        let Self { homes, decoder, dtype, checkpointing, policy, reference, .. } = self;
        let walk = Walk::new(decoder, &homes.device, *dtype, *checkpointing);
        reference.idle(&walk)?;
        Ok(walk.idle_forward(policy)?)
    }

    /// The same backward.
    fn idle_backward(&mut self, learner: &mut Learner) -> Result<()> {
        let Self { homes, decoder, dtype, checkpointing, policy, .. } = self;
        let walk = Walk::new(decoder, &homes.device, *dtype, *checkpointing);
        Ok(walk.idle_backward(policy, &mut learner.gradients)?)
    }

    /// Forward and objective of one micro-batch; the objective is the last stage's, and so is what it compared. If backward is
    /// to follow, the derivative of the loss by each prediction's log-probability is written.
    fn forward(
        &mut self,
        split: Split,
        micro: &MicroBatch,
        totals: &BatchTotals,
        mesh: &Mesh,
        derivative: Option<&mut Vec<f32>>,
        dropout: Option<u64>,
    ) -> Result<(SavedWalk, Option<Compared>)> {
        let Self { homes, decoder, dtype, checkpointing, policy, reference, scores, loss, .. } = self;
        let of_reference = &mut self.reference_scores;
        let walk = Walk {
            split: mesh.split(),
            host: homes.activations(),
            room: if derivative.is_some() { homes.rooms.train } else { homes.rooms.evaluation },
            ..Walk::new(decoder, &homes.device, *dtype, *checkpointing)
        };
        let walk = StagedWalk { walk, stages: mesh.stages() };
        let forest = &micro.forest;
        let is_shared = reference.is_shared();
        let reference = reference.log_probs(&walk, split, micro, of_reference)?;
        let enter = |phase| {
            if split == Split::Train {
                homes.device.enter(phase);
            }
        };
        enter("forward");
        let walk = StagedWalk { walk: Walk { dropout, ..walk.walk }, ..walk };
        let streams = Streams { policy: &mut *scores, reference: is_shared.then_some(&mut *of_reference) };
        let saved = walk.forward(policy, forest, streams, derivative.is_some())?;
        if !walk.is_last() {
            return Ok((saved, None));
        }
        enter("loss");
        let reference = if is_shared { Some(sequence_log_probs(forest, of_reference)) } else { reference };
        let compared = Compared::new(sequence_log_probs(forest, scores), reference, micro);
        let batch =
            ScoredBatch { micro, log_probs: &compared, scores: &*scores, reference_scores: &*of_reference };
        let weight = self.recipe.loss(&batch, totals, &self.objective, self.objective.beta, loss);
        if let Some(derivative) = derivative {
            // The loss is a mean over the whole batch, so its derivative is divided here, before anything is summed.
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
        Ok((saved, Some(compared)))
    }

    /// What is told of the micro-batch that went forward last.
    fn report(&self, micro: &MicroBatch, compared: Option<Compared>) -> Report {
        let mut report = Report { in_range: true, ..Report::default() };
        let Some(compared) = compared else { return report };
        let sums = &mut report.sums;
        sums.add_loss(&self.loss);
        let (scores, reference_scores) = (&self.scores, &self.reference_scores);
        let batch = ScoredBatch { micro, log_probs: &compared, scores, reference_scores };
        self.recipe.add_metrics(&batch, self.objective.beta, sums);
        let Compared { policy, reference, .. } = compared;
        report.log_ratio = reference.map_or(0.0, |r| policy.iter().zip(r).map(|(p, r)| p - r).sum());
        report.scored_tokens = micro.scored_tokens.iter().map(|&n| f64::from(n)).sum();
        report
    }

    /// Backward of a micro-batch that went forward.
    fn backward(
        &mut self,
        learner: &mut Learner,
        micro: &MicroBatch,
        saved: SavedWalk,
        mesh: &Mesh,
        dropout: u64,
    ) -> Result<()> {
        let Self { homes, decoder, dtype, checkpointing, policy, scores, .. } = self;
        let walk = Walk {
            split: mesh.split(),
            host: homes.activations(),
            room: homes.rooms.train,
            ..Walk::new(decoder, &homes.device, *dtype, *checkpointing)
        };
        let walk = Walk { dropout: Some(dropout), ..walk };
        let walk = StagedWalk { walk, stages: mesh.stages() };
        // The last stage goes back before it goes forward again: scores and derivative are this micro-batch's.
        let Learner { gradients, d_log_prob, .. } = learner;
        walk.backward(policy, gradients, &micro.forest, saved, scores, d_log_prob)
    }
}

/// Another number for each micro-batch of a run, whichever rank computes it.
fn dropout_key(seed: u64, update: u64, index: usize) -> u64 {
    draw(&[seed, update, index as u64])
}

impl Learner {
    /// Memory for what this rank keeps of gradient sums and optimiser state.
    ///
    /// # Errors
    /// If memory runs out, or a rank is lost.
    pub fn new(
        config: &Config,
        decoder: &Arc<Decoder>,
        homes: &Homes,
        mesh: &mut Mesh,
        partition: Arc<Partition>,
    ) -> Result<Self> {
        let own = if config.compute.sharded().gradients { Some(mesh.shard().split(0)?) } else { None };
        let form = config.compute.reduction;
        let gradients = Accumulator::new(homes, decoder.clone(), partition.clone(), own, form)?;
        let home = homes.optimizer(decoder.adapter().is_some());
        let optimizer = Optimizer::new(home, decoder, partition, &config.train)?;
        // The last checkpoint is waited for: one that is all there will be needs no copy, but from a GPU, whose memory nobody else
        // reads.
        let copies = config.train.async_checkpoints && config.train.save_every.is_some();
        let snapshot = if copies || homes.device.backend() == Backend::Cuda {
            let share = snapshot::Share::new(decoder, mesh.share());
            let follows = config.reference.kind == ReferenceKind::Sync;
            Some(Snapshot::new(homes.copies(), share, &optimizer, follows)?)
        } else {
            None
        };
        Ok(Self { gradients, optimizer, snapshot, d_log_prob: Vec::new() })
    }
}
