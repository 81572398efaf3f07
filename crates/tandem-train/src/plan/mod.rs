//! Memory, placement and step time of a run, known before a byte is allocated.
//!
//! The plan is a dry run of the very code that trains, on
//! [`Device::Meta`](tandem_kernels::Device::Meta): the same stores, the same walk, the same step,
//! over the run's own micro-batches. Nothing is estimated that can be counted; time is, from a
//! table of devices.
//!
//! * [`Plan`]: one rank's. [`RunPlan`]: all ranks', on a device, and whether it fits.
//! * `survey`: the batches, known or assumed. `work`: what a rank computes and sends, from a
//!   [`dry_run`].
//! * [`estimate`]: time, from work and a table of devices; rates of this machine, measured.
//! * [`advise`]: the cheapest changes that make a run fit, and the fastest plans.
//! * [`evaluation`]: plan of a stand-alone evaluation.
//! * [`show`]: a plan for a terminal, a browser, a program.

pub mod advise;
pub mod dry_run;
pub mod estimate;
pub mod evaluation;
mod largest;
pub(crate) mod matmuls;
mod online;
mod phase;
mod run;
pub mod show;
pub(crate) mod survey;
pub(crate) mod work;

use std::ops::Range;

use tandem_comm::{mpi, recorder, tcp};
use tandem_kernels::meta::Ledger;
use tandem_kernels::{DType, cuda};
use tandem_model::{LayerExecutor, PipelineStage};

pub use phase::{Offloaded, PhasePlan};
pub use run::{FitResult, RunPlan, rank_classes};
pub use survey::{PlanInputs, SyntheticBatch};

use crate::config::{ComputeConfig, Config, Engine, ReferenceKind};
use crate::events::Planned;
use crate::inputs::{ModelSpecs, RunInputs};
use crate::online::sources::PolicyAndReference;
use crate::online::{BackgroundGenerator, Generation};
use crate::optimizer::EvaluationWeights;
use crate::parallel::pipeline::most_under_way;
use crate::parallel::{DeviceMesh, mesh};
use crate::placement::{MemoryPlacement, MemoryRequirements, PassCapacities};
use crate::recipe::{self, MicroBatch, RankBatch};
use crate::samples::Sampler;
use crate::step::{StepOptions, TrainState, TrainStep};
use crate::{Result, judges};
use estimate::device::DeviceKind;
use show::text::{counted, grouped};
use survey::{BatchStatistics, MicroBatchCounts, RankLoad};
use work::{StepCost, StepCosts, Topology};

/// Plan of one rank.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Description of the trained parameters.
    pub model: String,
    /// Parameters of the model; a tied table counts once.
    pub num_parameters: usize,
    /// Parameters that train: the model's, or an adapter's, under which the model's are frozen.
    pub num_trained: usize,
    /// Parameters of the policy that do not train.
    pub num_frozen: usize,
    /// Compute type.
    pub dtype: DType,
    /// Ranks; everything below is of one of them.
    pub ranks: usize,
    /// How many of them hold the slices of one stage of a model.
    pub tensor: usize,
    /// Which stage this rank holds, of how many.
    pub stage: PipelineStage,
    /// The blocks of that stage.
    pub blocks: Range<usize>,
    /// Capacity that every micro-batch allocates.
    pub rooms: PassCapacities,
    /// Micro-batches with saved activations at a time.
    pub under_way: usize,
    /// Threads.
    pub threads: usize,
    /// Optimiser steps; 0 where there is no data yet and the run's length is given in epochs.
    pub steps: u64,
    /// Rows in a step.
    pub batch_size: usize,
    /// Whether rows are pairs.
    pub pairs: bool,
    /// Batch statistics.
    pub data: DataShape,
    /// The phases in order.
    pub phases: Vec<PhasePlan>,
    /// Costs of a step, from which time is estimated.
    pub step_costs: StepCosts,
    /// This rank's operations and messages per step.
    pub load: RankLoad,
    /// Approximate bytes of a process outside the arena.
    pub outside: usize,
    /// How many of them are buffers of the engine between processes; 0 for threads.
    pub exchange_buffers: usize,
}

/// Counts of a run's data.
#[derive(Clone, Copy, Debug)]
pub struct DataShape {
    /// Assumptions in place of data.
    pub assumed: Option<SyntheticBatch>,
    /// Training rows.
    pub train_rows: usize,
    /// Evaluation rows.
    pub eval_rows: usize,
    /// Tokens of the largest micro-batch.
    pub max_micro_batch_tokens: usize,
    /// Rows that the head scores in the micro-batch that scores most.
    pub max_scored_rows: usize,
    /// Tokens of the typical micro-batch.
    pub micro_batch_tokens: usize,
    /// Tokens of a step, each answer with its own copy of the prompt: the mean.
    pub sequence_tokens: f64,
    /// Rows of a step: the mean.
    pub rows: f64,
}

impl Plan {
    /// Plans a run, as rank `rank` of `num_ranks` sees it.
    pub fn make(config: &Config, prepared: &RunInputs, rank: usize, num_ranks: usize) -> Result<Self> {
        Self::new(config, &PlanInputs::new(prepared), rank, num_ranks)
    }

    /// Plans one rank from data or assumptions.
    pub fn new(config: &Config, outline: &PlanInputs, rank: usize, num_ranks: usize) -> Result<Self> {
        mesh::check(config, num_ranks)?;
        let ComputeConfig { tensor, pipeline, .. } = config.compute;
        let in_rounds = config.compute.sharded().meets_in_walk();
        let survey = outline.survey(config)?;
        let load = survey.load(num_ranks / (tensor * pipeline), in_rounds);
        let mut rehearsal = DryRun { config, outline, survey: &survey, rank, num_ranks, phases: Vec::new() };
        if config.reference.kind == ReferenceKind::Precompute {
            rehearsal.reference()?;
        }
        let mut mesh = DeviceMesh::new(recorder::group(rank, num_ranks).0, &config.compute)?;
        let data = (mesh.data().rank(), mesh.data().size());
        let stage = mesh.stage();
        let blocks = stage.blocks(outline.decoder.spec())?;
        let under_way = most_under_way(stage, load.most_rounds);
        let turns = survey.micro_batch_counts(stage, data.1, in_rounds).swap_remove(data.0);
        let (steps, exchange_buffers) = rehearsal.run(&turns, load.most_rounds)?;
        let DryRun { phases, .. } = rehearsal;
        let data = DataShape {
            assumed: outline.assumed(),
            train_rows: outline.train_rows,
            eval_rows: outline.eval_rows.unwrap_or(0),
            max_micro_batch_tokens: survey.train.room.tokens,
            max_scored_rows: survey.train.room.scored,
            micro_batch_tokens: survey.typical.forest.num_tokens(),
            sequence_tokens: survey.sequence_tokens,
            rows: survey.rows,
        };
        let policy = ModelSpecs::from_config(config, &outline.decoder)?.policy;
        Ok(Self {
            model: config.model.display().to_string(),
            num_parameters: outline.decoder.num_parameters(),
            num_trained: policy.num_trained(),
            num_frozen: if policy.adapter().is_some() { policy.num_parameters() } else { 0 },
            dtype: config.compute.compute_type(),
            ranks: num_ranks,
            tensor,
            stage,
            blocks,
            rooms: survey.rooms(),
            under_way,
            threads: config.compute.num_threads(),
            steps: match (config.train.length, data.assumed) {
                (crate::config::Length::Epochs(_), Some(_)) => 0,
                _ => config.total_steps(data.train_rows),
            },
            batch_size: config.train.batch_size,
            pairs: recipe::for_method(config.method).has_pairs(),
            outside: outside_arena(outline, config.compute.num_threads()) + exchange_buffers,
            exchange_buffers,
            data,
            phases,
            step_costs: steps.with_attention(config.compute.attention),
            load,
        })
    }

    /// Bytes that the run touches of each memory.
    pub fn needs(&self) -> MemoryRequirements {
        MemoryRequirements::new(&self.phases)
    }

    /// Bytes of the device's arenas that the run will touch.
    pub fn arena_bytes(&self) -> usize {
        self.needs().arena
    }

    /// Host bytes outside the device's arena: offloaded tensors.
    pub fn host_bytes(&self) -> usize {
        self.needs().host
    }

    /// Bytes of the file that weights and states are offloaded to.
    pub fn file_bytes(&self) -> usize {
        self.needs().file
    }

    /// Bytes of system memory on a CPU run: the arena and host offload.
    pub fn ram_bytes(&self) -> usize {
        self.needs().ram()
    }

    /// Bytes of a device's memory that its rank needs. On a CPU, host offload uses the same memory as the arena.
    pub fn needed_of(&self, device: &DeviceKind) -> usize {
        if device.is_processor() { self.ram_bytes() } else { self.arena_bytes() }
    }

    /// Bytes of a device's memory outside the arenas: of the process on a CPU, of further streams on a GPU, whose
    /// first one is no part of what it has.
    pub fn outside_of(&self, device: &DeviceKind) -> usize {
        if device.is_processor() {
            return self.outside;
        }
        let MemoryRequirements { beside, judges, .. } = self.needs();
        [beside, judges].into_iter().filter(|&own| own > 0).count() * cuda::OF_STREAM
    }

    /// The phase that needs most.
    pub fn fullest(&self) -> &PhasePlan {
        self.phases.iter().max_by_key(|phase| phase.memory.peak).expect("every run has a phase")
    }

    /// A sentence about ranks that have nothing to compute in any step, if there are some.
    pub fn idle_ranks(&self) -> Option<String> {
        let RankLoad { most_micro_batches: most, data_ranks, .. } = self.load;
        let (idle, of_model) = (self.load.idle_ranks(), self.ranks / data_ranks);
        if idle == 0 {
            return None;
        }
        let needed = (self.batch_size * data_ranks).div_ceil(most.max(1));
        let [idle, data_ranks, needed] = [idle * of_model, data_ranks, needed].map(grouped);
        let (rows, micro_batches) = (counted(self.batch_size, "row"), counted(most, "micro-batch"));
        let ranks = grouped(self.ranks);
        let each =
            if of_model == 1 { String::new() } else { format!(" for {data_ranks} copies of the model") };
        let have = if idle == "1" { "has" } else { "have" };
        Some(format!(
            "{idle} of {ranks} ranks {have} nothing to compute: a step of {rows} has at most \
             {micro_batches}{each}; raise train.batch_size (about {needed} gives every rank one), lower \
             train.micro_batch_tokens, or take fewer ranks"
        ))
    }

    /// Bytes that this rank sends in a step in which each rank has one micro-batch.
    pub fn bytes_sent(&self, to: Option<Topology>) -> u64 {
        let StepCosts { count, fewer, more, .. } = &self.step_costs;
        let (of_fewer, of_more) = (fewer.bytes_sent(to), more.bytes_sent(to));
        of_fewer - (*count as u64 - 1) * (of_more - of_fewer)
    }
}

impl Planned for Plan {
    fn arena_bytes(&self) -> usize {
        Self::arena_bytes(self)
    }

    fn host_bytes(&self) -> usize {
        Self::host_bytes(self)
    }

    fn file_bytes(&self) -> usize {
        Self::file_bytes(self)
    }
}

/// Picture and advice for a run that does not fit, as the rest of a sentence.
pub fn story(config: &Config, outline: &PlanInputs, num_ranks: usize, device: &DeviceKind) -> Result<String> {
    let plan = RunPlan::make(config, outline, num_ranks, device)?;
    let advice = advise::advice::in_words(config, outline, num_ranks, device);
    Ok(format!("\n\n{}\n\n{}\n{advice}", plan.picture(false), plan.verdict()))
}

/// Dry run of generation by the weights that are in place, for prompts of at most `longest` tokens.
fn generate(
    generation: &Generation,
    longest: usize,
    scorer: &mut TrainStep,
    mesh: &mut DeviceMesh,
) -> Result<()> {
    let TrainStep { placement, decoder, dtype, checkpointing, policy, reference, .. } = scorer;
    let executor = LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing);
    let executor = mesh.join_generation(executor);
    generation.dry_run(&executor, &mut PolicyAndReference::new(policy, reference), longest)
}

/// A run's code, on devices that compute nothing.
struct DryRun<'a> {
    config: &'a Config,
    outline: &'a PlanInputs<'a>,
    survey: &'a BatchStatistics,
    rank: usize,
    num_ranks: usize,
    phases: Vec<PhasePlan>,
}

impl DryRun<'_> {
    /// Plans the reference pass. Its memory is free when the run loads its weights.
    fn reference(&mut self) -> Result<()> {
        let placement = MemoryPlacement::meta(&self.config.compute, self.survey.rooms());
        let batches = &self.survey.reference.largest;
        let mut mesh = DeviceMesh::new(recorder::group(self.rank, self.num_ranks).0, &self.config.compute)?;
        let idles = self.config.compute.sharded().weights && mesh.data().size() > 1;
        let mut all = batches.iter().map(|batch| Ok(batch.clone()));
        dry_run::reference_pass(self.config, self.outline, &placement, &mut mesh, &mut all, idles)?;
        let flops = total_flops(&placement) / batches.len() as f64;
        self.phases.push(PhasePlan::new("reference", &placement, flops));
        Ok(())
    }

    /// Plans loading, steps, a checkpoint and an evaluation in one arena; then the cost of steps, of which none
    /// has more than `most_rounds` micro-batches, and the bytes of the buffers of all groups of ranks.
    fn run(&mut self, turns: &[MicroBatchCounts], most_rounds: usize) -> Result<(StepCosts, usize)> {
        let Self { config, outline, survey, .. } = *self;
        let placement = MemoryPlacement::meta(&config.compute, survey.rooms());
        let (group, log) = recorder::group(self.rank, self.num_ranks);
        let mut mesh = DeviceMesh::new(group, &config.compute)?;
        let (mut scorer, mut learner) = dry_run::load(config, outline, &placement, &mut mesh)?;
        self.phases.push(PhasePlan::new("load", &placement, 0.0));

        let (mut beside, mut here) = (None, None);
        if let Some(online) = config.online.as_ref().filter(|online| online.server.is_none()) {
            let longest = outline.longest_prompt(config);
            let generation = Generation::from_config(config, longest, mesh.data().size());
            if online.overlap {
                let device = placement.device.with_own_stream_and_arena(0)?;
                BackgroundGenerator::new(generation, config, &scorer, device.clone(), &mut mesh)?
                    .dry_run(&scorer, longest)?;
                beside = Some(device);
            } else {
                begin(&placement);
                placement.device.set_place(format_args!("generation"));
                generate(&generation, longest, &mut scorer, &mut mesh)?;
                self.phases.push(PhasePlan::new("generate", &placement, 0.0));
                here = Some((generation, longest));
            }
        }

        begin(&placement);
        let mut flops: f64 = 0.0;
        // Every micro-batch makes the same allocations in the same order, except scratch memory of
        // operations.
        for batch in &survey.train.largest {
            for turns in turns {
                let before = total_flops(&placement);
                step(&mut scorer, &mut learner, &mut mesh, batch, *turns)?;
                flops = flops.max((total_flops(&placement) - before) / turns.own.max(1) as f64);
            }
        }
        self.phases.push(PhasePlan::new("train", &placement, flops));

        placement.device.set_place(format_args!("between steps"));
        begin(&placement);
        self.phases.push(PhasePlan::new("save", &placement, 0.0));

        // The held-out prompts of an online run were a part of its generation, but other weights may answer
        // them, beside those that train.
        if config.method.generates()
            && self.outline.eval_rows.is_some()
            && config.train.evaluation_weights() != EvaluationWeights::Trained
        {
            scorer.with_evaluation_weights(&mut learner, &mut mesh, |scorer, mesh| {
                placement.device.set_place(format_args!("evaluation"));
                let generation = here.as_ref();
                generation
                    .map_or(Ok(()), |(generation, longest)| generate(generation, *longest, scorer, mesh))
            })?;
            self.phases.push(PhasePlan::new("evaluate", &placement, 0.0));
        }
        if self.outline.eval_rows.is_some() && !survey.evaluation.largest.is_empty() {
            let idles = turns.iter().any(|turns| turns.own < turns.all);
            let flops = scorer.with_evaluation_weights(&mut learner, &mut mesh, |scorer, mesh| {
                for batch in &survey.evaluation.largest {
                    placement.device.set_place(format_args!("evaluation"));
                    scorer.evaluate(mesh, &RankBatch::uniform(batch, 1), &mut |_| Ok(batch.clone()))?;
                }
                let flops = total_flops(&placement) / survey.evaluation.largest.len() as f64;
                if idles {
                    let share =
                        RankBatch { own_micro_batches: Vec::new(), ..RankBatch::uniform(&survey.typical, 1) };
                    scorer.evaluate(mesh, &share, &mut |_| Ok(survey.typical.clone()))?;
                }
                Ok(flops)
            })?;
            self.phases.push(PhasePlan::new("evaluate", &placement, flops));
        }
        let takes_part = Sampler::takes_part(config, self.rank);
        // Ranks that do not sample put their weights aside too, if others stand in for them.
        if let Some(sampler) = self.outline.sampler(config)
            && (takes_part || config.train.evaluation_weights() != EvaluationWeights::Trained)
        {
            begin(&placement);
            scorer.with_evaluation_weights(&mut learner, &mut mesh, |scorer, mesh| {
                if takes_part { sampler.dry_run(scorer, mesh) } else { Ok(()) }
            })?;
            self.phases.push(PhasePlan::new("sample", &placement, 0.0));
        }

        if let Some(device) = beside {
            self.phases
                .iter_mut()
                .skip_while(|phase| phase.name != "train")
                .for_each(|phase| phase.with_generation(&device));
        }
        if config.online.is_some()
            && self.rank == 0
            && let Some(device) =
                judges::memory(&config.judges, placement.device.backend(), config.compute.compute_type())?
        {
            // They come when the run is loaded.
            self.phases
                .iter_mut()
                .skip_while(|phase| phase.name != "load")
                .skip(1)
                .for_each(|phase| phase.with_judges(&device));
        }

        let mut cost = |batch: &MicroBatch, count: usize| -> Result<StepCost> {
            log.take();
            begin(&placement);
            step(&mut scorer, &mut learner, &mut mesh, batch, MicroBatchCounts { own: count, all: count })?;
            Ok(StepCost::from_log(&placement, &log, self.rank, config.compute.tensor > 1))
        };
        let typical = &survey.typical;
        // A step's only micro-batch may be summed otherwise than several.
        let count = most_rounds.clamp(1, 2);
        let (fewer, more) = (cost(typical, count)?, cost(typical, count + 1)?);
        let tokens = typical.forest.num_tokens();
        let other = survey.train.largest.iter().find(|batch| batch.forest.num_tokens() != tokens);
        let other = other.map(|batch| cost(batch, count)).transpose()?;
        let steps = StepCosts::new(count, fewer, more, other.as_ref());
        let sizes = (0..log.num_groups()).map(|group| log.size(group));
        Ok((steps, exchange_buffers(&config.compute, self.num_ranks, sizes)))
    }
}

/// A step of one micro-batch again and again.
fn step(
    scorer: &mut TrainStep,
    learner: &mut TrainState,
    mesh: &mut DeviceMesh,
    batch: &MicroBatch,
    turns: MicroBatchCounts,
) -> Result<()> {
    let share = RankBatch {
        own_micro_batches: (0..turns.own).collect(),
        ..RankBatch::uniform(batch, turns.all.max(1))
    };
    scorer.step(learner, mesh, &share, &mut |_| Ok(batch.clone()), &StepOptions::dry())?;
    Ok(())
}

/// Begins the records of a dry run anew.
fn begin(placement: &MemoryPlacement) {
    placement.ledgers().into_iter().flatten().for_each(Ledger::begin);
}

fn total_flops(placement: &MemoryPlacement) -> f64 {
    let calls = placement.ledgers().into_iter().flatten().flat_map(Ledger::calls);
    calls.map(|(work, calls)| calls as f64 * work.flops).sum()
}

/// Bytes of the buffers of groups of these sizes, where ranks are processes.
fn exchange_buffers(compute: &ComputeConfig, num_ranks: usize, sizes: impl Iterator<Item = usize>) -> usize {
    if num_ranks <= compute.devices.num_ranks() {
        return 0;
    }
    let of_group = match compute.engine {
        Engine::Threads => return 0,
        Engine::Mpi => mpi::buffer_bytes,
        Engine::Auto | Engine::Tcp | Engine::Nccl => tcp::buffer_bytes,
    };
    sizes.map(of_group).sum::<u64>() as usize
}

/// Approximate bytes of a process outside the arena. Measured: program, heap, and packing buffers
/// per thread. Counted: the longest layer in f32, which passes through host memory on load and
/// save.
fn outside_arena(outline: &PlanInputs, threads: usize) -> usize {
    let decoder = &outline.decoder;
    let longest = decoder.layers().into_iter().map(|layer| decoder.layout(layer).len).max().unwrap_or(0);
    PROGRAM_BYTES + threads * THREAD_BYTES + longest * DType::F32.size()
}

/// Program, heap and shared matmul buffers.
const PROGRAM_BYTES: usize = 40 << 20;
/// A thread's packing buffers and stack.
const THREAD_BYTES: usize = 4 << 20;
