//! Dry run: the run's own code on a device without arithmetic and among simulated ranks. The plan
//! is made from it.

use std::sync::Arc;

use tandem_comm::{Call, recorder};
use tandem_kernels::MemoryKind;
use tandem_model::{ModelFolder, PolicyAndReferenceScores, WeightSource};

use crate::Result;
use crate::config::{Config, ReferenceKind};
use crate::inputs::{ModelSpecs, RunInputs};
use crate::parallel::{DeviceMesh, Partition, StagedExecutor};
use crate::placement::{MemoryPlacement, PassCapacities};
use crate::plan::PlanInputs;
use crate::recipe::{BatchPart, MicroBatch};
use crate::reference::{Reference, RowScores, kept, layer_executor, share_base};
use crate::step::{StepOptions, TrainState, TrainStep};
use crate::weights::SharedReference;
use crate::weights::initial_weights::InitialWeights;

/// The pass that precomputes the reference, over some micro-batches, and with `idles` over none
/// while others have one.
pub fn reference_pass(
    config: &Config,
    outline: &PlanInputs,
    placement: &MemoryPlacement,
    mesh: &mut DeviceMesh,
    batches: &mut dyn Iterator<Item = Result<MicroBatch>>,
    idles: bool,
) -> Result<()> {
    let decoders = ModelSpecs::from_config(config, &outline.decoder)?;
    let decoder = mesh.part(&decoders.policy)?;
    placement.device.set_place(format_args!("loading of the reference"));
    let mut frozen;
    let mut policy;
    let mut shared;
    let weights: &mut dyn WeightSource = if config.reference.model.is_some() {
        let start = reference_start(config, outline)?;
        frozen = start.frozen(config, &decoder, placement, mesh.shard(), MemoryKind::Reference, None)?;
        frozen.as_mut()
    } else {
        let partition = Arc::new(Partition::for_run(&config.compute, &decoder, mesh));
        let start = InitialWeights::dry(outline.quantised);
        policy = start.policy(config, &decoder, placement, mesh, &partition, None)?;
        if decoders.reference.is_some() {
            let start = &|_: &_| Ok(InitialWeights::dry(outline.quantised));
            share_base(config, &decoders, &placement.device, mesh, &mut policy, start)?;
            shared = SharedReference(&mut policy);
            &mut shared
        } else {
            &mut policy
        }
    };
    let executor = layer_executor(config, &decoder, placement, mesh.split());
    let executor = StagedExecutor { executor, stages: mesh.stages() };
    for batch in batches {
        executor.forward(
            weights,
            &batch?.forest,
            PolicyAndReferenceScores::one(&mut Default::default()),
            false,
        )?;
        weights.release_all();
    }
    if idles {
        executor.executor.idle_forward(weights)?;
        weights.release_all();
    }
    Ok(())
}

/// Collective calls of rank `rank` of `num_ranks` in the first step: group index and call. Group 0
/// is the world. With a tensor or pipeline axis, group 1 is the data group. With a tensor axis,
/// [`TENSOR_GROUP`] is the tensor group. Groups of more than two slices that [keep
/// bits](tandem_model::TensorParallelShard::keeps_bits) have a group of two ranks for each level of
/// their sums. The next is the pipeline group, if that axis exists.
/// Further groups divide the data group: with a replicate axis first the shard group and the
/// replicas.
pub fn calls(
    config: &Config,
    prepared: &RunInputs,
    rank: usize,
    num_ranks: usize,
) -> Result<Vec<(usize, Call)>> {
    let (group, log) = recorder::group(rank, num_ranks);
    let mut mesh = DeviceMesh::new(group, &config.compute)?;
    let (data_rank, data_size) = (mesh.data().rank(), mesh.data().size());
    let mut batcher = prepared.batcher(config);
    let mut batches = prepared.batches(config);
    let share = batcher.share(&prepared.train, batches.rows(0), data_rank, data_size);
    let build = &mut |part: BatchPart<'_>| batcher.build(&prepared.train, part);
    let (mut scorer, mut learner) = load(
        config,
        &PlanInputs::new(prepared),
        &MemoryPlacement::meta(&config.compute, PassCapacities::default()),
        &mut mesh,
    )?;
    scorer.step(&mut learner, &mut mesh, &share, build, &StepOptions::dry())?;
    Ok(log.take())
}

/// Everything that training needs in memory.
pub fn load(
    config: &Config,
    outline: &PlanInputs,
    placement: &MemoryPlacement,
    mesh: &mut DeviceMesh,
) -> Result<(TrainStep, TrainState)> {
    let scorer = scorer(config, outline, placement, mesh)?;
    let partition = Arc::new(Partition::for_run(&config.compute, &scorer.decoder, mesh));
    let single = outline.survey(config)?.single_micro_batches;
    let learner = TrainState::new(config, &scorer.decoder, placement, mesh, partition, single)?;
    Ok((scorer, learner))
}

/// The part that an evaluation needs.
pub fn scorer(
    config: &Config,
    outline: &PlanInputs,
    placement: &MemoryPlacement,
    mesh: &mut DeviceMesh,
) -> Result<TrainStep> {
    placement.device.set_place(format_args!("loading"));
    let decoders = ModelSpecs::from_config(config, &outline.decoder)?;
    let decoder = &mesh.part(&decoders.policy)?;
    let partition = Arc::new(Partition::for_run(&config.compute, decoder, mesh));
    let start = InitialWeights::dry(outline.quantised);
    let mut policy = start.policy(config, decoder, placement, mesh, &partition, None)?;
    let reference = if config.reference.kind == ReferenceKind::Precompute {
        let rows = outline.train_rows.max(outline.eval_rows.unwrap_or(0));
        let scores = RowScores(vec![[0.0; 2]; rows]);
        Reference::Precomputed { train: Some(scores.clone()), eval: Some(scores) }
    } else {
        kept(config, &decoders, placement, mesh, &mut policy, &|_| reference_start(config, outline))?
    };
    Ok(TrainStep::new(config, placement.clone(), decoder.clone(), policy, reference))
}

/// Initial weights of a reference with its own weights.
fn reference_start(config: &Config, outline: &PlanInputs) -> Result<InitialWeights> {
    Ok(InitialWeights::dry(match &config.reference.model {
        Some(path) => ModelFolder::open(path)?.quantised(),
        None => outline.quantised,
    }))
}

/// The number that [`calls`] gives the group of the ranks that hold the slices of one stage.
pub const TENSOR_GROUP: usize = 2;
