//! The run's own code on a device that computes nothing, among ranks that do not exist: what the plan is made from.

use std::sync::Arc;

use tandem_comm::{Call, Group, recorder};
use tandem_data::token_cache::TokenCache;
use tandem_kernels::{DType, Device, Kind};
use tandem_model::{FlatWeights, WeightSource};

use crate::Result;
use crate::config::{Config, ReferenceKind};
use crate::micro_batch::{MicroBatch, Share};
use crate::optimizer::Optimizer;
use crate::prepare::{Prepared, compute_type, partition, to_walk};
use crate::reference::{Reference, RowScores};
use crate::step::{Learner, Scorer};
use crate::store::{
    Accumulator, FrozenWeights, Partition, Policy, ReplicatedWeights, ShardedWeights, Sharding,
};

/// The pass that precomputes the reference, over one micro-batch.
///
/// # Errors
/// If the model does not fit its config.
pub fn reference_pass(
    config: &Config,
    prepared: &Prepared,
    device: &Device,
    group: &mut Group,
    batch: &MicroBatch,
) -> Result<()> {
    let mut weights = frozen(config, prepared, device, group)?;
    let walk = to_walk(config, &prepared.decoder, device);
    walk.forward(weights.as_mut(), &batch.forest, &mut Default::default())?;
    Ok(())
}

/// One optimiser step with everything it needs.
///
/// # Errors
/// If the model does not fit its config, or the data does not fit the model.
pub fn step(
    config: &Config,
    prepared: &Prepared,
    device: &Device,
    group: &mut Group,
    share: &Share,
    build: &mut dyn FnMut(&[u32]) -> Result<MicroBatch>,
) -> Result<()> {
    let (mut scorer, mut learner) = load(config, prepared, device, group)?;
    scorer.step(&mut learner, group, share, build, 0.0, None, 1)?;
    Ok(())
}

/// One evaluation while everything that training needs is in memory.
///
/// # Errors
/// As [`step`].
pub fn evaluate(
    config: &Config,
    prepared: &Prepared,
    device: &Device,
    group: &mut Group,
    share: &Share,
    build: &mut dyn FnMut(&[u32]) -> Result<MicroBatch>,
) -> Result<()> {
    let (mut scorer, _learner) = load(config, prepared, device, group)?;
    scorer.evaluate(group, share, build)?;
    Ok(())
}

/// What rank `rank` of `num_ranks` calls in the first step of a run: the group, counted from 0, and the call.
///
/// # Errors
/// As [`step`].
pub fn calls(
    config: &Config,
    prepared: &Prepared,
    rank: usize,
    num_ranks: usize,
) -> Result<Vec<(usize, Call)>> {
    let (mut group, log) = recorder::group(rank, num_ranks);
    let mut batcher = prepared.batcher(config);
    let mut batches = prepared.batches(config);
    let share = batcher.share(&prepared.train, batches.rows(0), rank, num_ranks);
    let build = &mut |rows: &[u32]| batcher.build(&prepared.train, rows);
    step(config, prepared, &Device::meta(), &mut group, &share, build)?;
    Ok(log.take())
}

fn load(
    config: &Config,
    prepared: &Prepared,
    device: &Device,
    group: &mut Group,
) -> Result<(Scorer, Learner)> {
    let (decoder, dtype) = (&prepared.decoder, compute_type(config));
    let reference = match config.reference.kind {
        ReferenceKind::Model => Reference::Model(frozen(config, prepared, device, group)?),
        ReferenceKind::None => Reference::None,
        ReferenceKind::Precompute => {
            let rows = prepared.train.num_rows().max(prepared.eval.as_ref().map_or(0, TokenCache::num_rows));
            let scores = RowScores(vec![[0.0; 2]; rows]);
            Reference::Precomputed { train: Some(scores.clone()), eval: Some(scores) }
        }
    };
    let partition = Arc::new(partition(config, decoder, group.rank(), group.size()));
    let (form, sharding) = (config.compute.reduction, config.compute.sharding);
    let policy = if sharding == Sharding::Zero3 {
        let parts = empty_parts(device, &partition, Kind::Master)?;
        let (decoder, own) = (decoder.clone(), group.split(0)?);
        let weights = ShardedWeights::masters(device, decoder, partition.clone(), own, parts, dtype);
        Policy::Sharded(Box::new(weights))
    } else {
        let masters = prepared.empty_weights(device, Kind::Master)?;
        Policy::Replicated(ReplicatedWeights::new(device, decoder.clone(), masters, dtype)?)
    };
    let own = if sharding >= Sharding::Zero2 { Some(group.split(0)?) } else { None };
    let gradients = Accumulator::new(device, decoder.clone(), partition.clone(), own, form)?;
    let optimizer = Optimizer::new(device, decoder, partition, &config.train)?;
    let scorer = Scorer::new(config, device.clone(), decoder.clone(), policy, reference);
    Ok((scorer, Learner::new(gradients, optimizer)))
}

fn frozen(
    config: &Config,
    prepared: &Prepared,
    device: &Device,
    group: &mut Group,
) -> Result<Box<dyn WeightSource + Send>> {
    let (decoder, dtype) = (prepared.decoder.clone(), compute_type(config));
    if config.compute.sharding == Sharding::Zero3 {
        let partition = Arc::new(Partition::new(&decoder, group.rank(), group.size()));
        let parts = empty_parts(device, &partition, Kind::Reference)?;
        let own = group.split(0)?;
        return Ok(Box::new(ShardedWeights::frozen(device, decoder, partition, own, parts, dtype)?));
    }
    let weights = prepared.empty_weights(device, Kind::Reference)?;
    Ok(Box::new(FrozenWeights::new(device, decoder, weights, dtype)?))
}

/// Memory for one rank's part of every layer.
fn empty_parts(device: &Device, partition: &Partition, kind: Kind) -> Result<FlatWeights> {
    let owned = (0..partition.num_layers()).map(|layer| partition.owned(layer).len());
    let parts = owned.map(|len| device.alloc(kind, 1, len, DType::F32));
    Ok(FlatWeights { layers: parts.collect::<Result<_, _>>()? })
}
