//! The one step that SFT, DPO and Online DPO share.
//!
//! reference log-probs → policy forward → objective → backward walk → (sum over micro-batches) → norm → clip →
//! optimiser. The recipes differ in the forest that comes in and in the objective; the order lives here alone.

use std::sync::Arc;

use tandem_comm::{Group, Phase, Progress, Reduction};
use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Device};
use tandem_model::{Checkpointing, Decoder, Walk};

use crate::Result;
use crate::config::{Config, Method};
use crate::mesh::Mesh;
use crate::metrics::{MetricSums, Sides, Split};
use crate::micro_batch::{MicroBatch, Share};
use crate::objective::{BatchTotals, Loss, ObjectiveConfig, PairLogProbs, likelihood_loss, preference_loss};
use crate::optimizer::Optimizer;
use crate::prepare::{checkpointing, compute_type};
use crate::reference::{Reference, sequence_log_probs};
use crate::schedule::clip_coefficient;
use crate::snapshot::{self, Snapshot};
use crate::store::{Accumulator, Partition, Policy, Sharding};

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
    pub policy: Policy,
    /// What they are compared with.
    pub reference: Reference,
    /// Where the passes say how far they have come.
    pub progress: Progress,
    sharding: Sharding,
    scores: HeadScores,
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
        policy: Policy,
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
            progress: Progress::default(),
            sharding: config.compute.sharding,
            scores: HeadScores::default(),
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
        for &index in &share.mine {
            let micro = build(share.rows_of(index))?;
            let report = self.pass(Split::Eval, &micro, &share.totals, mesh.split(), None)?;
            reports.set(index, &report, mesh.leads());
        }
        self.idle(share, None)?;
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
        self.progress.enter(Phase::Forward);
        let mut reports = Reports::new(share.cuts.len());
        learner.gradients.begin(share.cuts.len())?;
        for &index in &share.mine {
            let micro = build(share.rows_of(index))?;
            let mut report = self.pass(Split::Train, &micro, &share.totals, mesh.split(), Some(learner))?;
            report.in_range = learner.gradients.in_range();
            reports.set(index, &report, mesh.leads());
        }
        self.idle(share, Some(learner))?;
        self.progress.enter(Phase::Reduce);
        reports.exchange(mesh.world())?;
        let whole = reports.together();
        let mut suspects: Vec<u32> = Vec::new();
        for index in 0..share.cuts.len() {
            if !reports.get(index).sums.loss().is_finite() {
                suspects.extend_from_slice(share.rows_of(index));
            }
        }
        learner.gradients.reduce(mesh)?;
        let grad_norm = if whole.in_range { learner.gradients.norm(mesh)? } else { f64::INFINITY };
        // A dry run has no numbers, and takes the way of a good step.
        let is_dry = matches!(self.device, Device::Meta(_));
        let updated = is_dry || (suspects.is_empty() && grad_norm.is_finite());
        if updated {
            self.progress.enter(Phase::Update);
            let scale = clip_coefficient(grad_norm, max_grad_norm) as f32;
            let Learner { gradients, optimizer, .. } = learner;
            optimizer.update(&self.device, learning_rate, scale, update, gradients, &mut self.policy)?;
            self.policy.gather(&self.device, optimizer.partition(), mesh.shard())?;
        } else if suspects.is_empty() {
            suspects.clone_from(&share.rows);
        }
        let log_ratio = (whole.log_ratio, whole.scored_tokens as u64);
        Ok(StepOutcome { sums: whole.sums, grad_norm, updated, suspects, log_ratio })
    }

    /// Walks along with the ranks that have more micro-batches than this one, where they meet in the walk.
    fn idle(&mut self, share: &Share, learner: Option<&mut Learner>) -> Result<()> {
        if !self.sharding.meets_in_walk() {
            return Ok(());
        }
        let Self { device, decoder, dtype, checkpointing, policy, reference, .. } = self;
        // A tensor group has as many micro-batches on each of its ranks: they idle together, and have nothing to sum.
        let walk = Walk { decoder, device, dtype: *dtype, checkpointing: *checkpointing, split: None };
        let mut learner = learner;
        for _ in share.mine.len()..share.rounds {
            reference.idle(&walk)?;
            walk.idle_forward(policy)?;
            if let Some(learner) = &mut learner {
                walk.idle_backward(policy, &mut learner.gradients)?;
            }
        }
        Ok(())
    }

    /// Forward, objective, metrics and, with a learner, backward of one micro-batch.
    fn pass(
        &mut self,
        split: Split,
        micro: &MicroBatch,
        totals: &BatchTotals,
        split_over: Option<&dyn tandem_model::Split>,
        learner: Option<&mut Learner>,
    ) -> Result<Report> {
        let mut sums = MetricSums::default();
        if learner.is_some() {
            self.progress.enter(Phase::Forward);
        }
        let Self { device, decoder, dtype, checkpointing, policy, reference, scores, loss, .. } = self;
        let walk = Walk { decoder, device, dtype: *dtype, checkpointing: *checkpointing, split: split_over };
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
            self.progress.enter(Phase::Backward);
            // The loss is a mean over the whole batch, so its derivative is divided here, before anything is summed.
            let scale = 1.0 / weight as f64;
            learner.d_log_prob.clear();
            let derivative = |sequence: u32| (loss.d_log_prob[sequence as usize] * scale) as f32;
            learner.d_log_prob.extend(forest.predictions.iter().map(|p| derivative(p.sequence)));
            walk.backward(policy, &mut learner.gradients, forest, saved, scores, &learner.d_log_prob)?;
        }
        let log_ratio = reference.map_or(0.0, |r| log_probs.iter().zip(r).map(|(p, r)| p - r).sum());
        let scored_tokens = micro.scored_tokens.iter().map(|&n| f64::from(n)).sum();
        Ok(Report { sums, log_ratio, scored_tokens, in_range: true })
    }
}

/// What a micro-batch came to.
struct Report {
    sums: MetricSums,
    /// Σ over sequences of log π − log π_ref.
    log_ratio: f64,
    scored_tokens: f64,
    /// Whether the gradient up to here is finite and in range.
    in_range: bool,
}

/// The reports of all micro-batches of a batch. They are added up in their order, whoever made them, so that metrics are the
/// same bits on any number of ranks. Of the ranks that compute a micro-batch together one reports, and each whether its own
/// part of the gradient is in range.
struct Reports(Vec<[f64; MetricSums::WIDTH + 3]>);

impl Reports {
    fn new(num_micro_batches: usize) -> Self {
        Self(vec![[0.0; MetricSums::WIDTH + 3]; num_micro_batches])
    }

    fn set(&mut self, index: usize, report: &Report, leads: bool) {
        let [sums @ .., log_ratio, scored_tokens, out_of_range] = &mut self.0[index];
        if leads {
            sums.copy_from_slice(&report.sums.to_numbers());
            *log_ratio = report.log_ratio;
            *scored_tokens = report.scored_tokens;
        }
        *out_of_range = f64::from(u8::from(!report.in_range));
    }

    fn get(&self, index: usize) -> Report {
        let [sums @ .., log_ratio, scored_tokens, out_of_range] = &self.0[index];
        let sums = MetricSums::from_numbers(sums);
        Report { sums, log_ratio: *log_ratio, scored_tokens: *scored_tokens, in_range: *out_of_range == 0.0 }
    }

    /// Every rank gets what the others reported: sums are of one rank, the others hold zeros; any may be out of range.
    fn exchange(&mut self, group: &mut Group) -> Result<()> {
        if group.size() > 1 {
            group.all_reduce(self.0.as_flattened_mut(), Reduction::Sum)?;
        }
        Ok(())
    }

    fn together(&self) -> Report {
        let mut whole =
            Report { sums: MetricSums::default(), log_ratio: 0.0, scored_tokens: 0.0, in_range: true };
        for report in (0..self.0.len()).map(|index| self.get(index)) {
            whole.sums.merge(&report.sums);
            whole.log_ratio += report.log_ratio;
            whole.scored_tokens += report.scored_tokens;
            whole.in_range &= report.in_range;
        }
        whole
    }
}

impl Learner {
    /// Memory for what this rank keeps of gradient sums and optimiser state.
    ///
    /// # Errors
    /// If memory runs out, or a rank is lost.
    pub fn new(
        config: &Config,
        decoder: &Arc<Decoder>,
        device: &Device,
        mesh: &mut Mesh,
        partition: Arc<Partition>,
    ) -> Result<Self> {
        let own =
            if config.compute.sharding >= Sharding::Zero2 { Some(mesh.shard().split(0)?) } else { None };
        let form = config.compute.reduction;
        let gradients = Accumulator::new(device, decoder.clone(), partition.clone(), own, form)?;
        let optimizer = Optimizer::new(device, decoder, partition, &config.train)?;
        // The last checkpoint is waited for: one that is all there will be needs no copy.
        let snapshot = if config.train.async_checkpoints && config.train.save_every.is_some() {
            let share = snapshot::Share::new(decoder, mesh.share());
            Some(Snapshot::new(device, share, &optimizer)?)
        } else {
            None
        };
        Ok(Self { gradients, optimizer, snapshot, d_log_prob: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Else the others would update their slices while it leaves its own as it is.
    #[test]
    fn a_slice_that_is_out_of_range_speaks_for_all() {
        let groups = tandem_comm::threads::groups(2, Duration::from_secs(60)).into_iter();
        let rank = |mut group: Group| {
            let slice = group.rank();
            let mut reports = Reports::new(2);
            for index in 0..2 {
                let in_range = (index, slice) != (1, 1);
                let sums = MetricSums::default();
                let report = Report { sums, log_ratio: 2.0, scored_tokens: 3.0, in_range };
                reports.set(index, &report, slice == 0);
            }
            reports.exchange(&mut group).unwrap();
            let whole = reports.together();
            assert!(!whole.in_range && reports.get(0).in_range && !reports.get(1).in_range);
            assert_eq!((whole.log_ratio, whole.scored_tokens), (4.0, 6.0), "counted once");
        };
        std::thread::scope(|scope| groups.for_each(|group| drop(scope.spawn(move || rank(group)))));
    }
}
