//! The run's own code on a device that computes nothing, among ranks that do not exist: what the plan is made from.

use std::sync::Arc;

use tandem_comm::{Call, Group, recorder};
use tandem_data::token_cache::TokenCache;
use tandem_kernels::Device;

use crate::Result;
use crate::config::{Config, ReferenceKind};
use crate::micro_batch::MicroBatch;
use crate::prepare::{Prepared, partition, to_walk};
use crate::reference::{Reference, RowScores};
use crate::start::Start;
use crate::step::{Learner, Scorer};

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
    let mut weights = START.reference(config, &prepared.decoder, device, group, |_| {})?;
    let walk = to_walk(config, &prepared.decoder, device);
    walk.forward(weights.as_mut(), &batch.forest, &mut Default::default())?;
    Ok(())
}

/// What rank `rank` of `num_ranks` calls in the first step of a run: the group, counted from 0, and the call.
///
/// # Errors
/// If the model does not fit its config, or the data does not fit the model.
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
    let (mut scorer, mut learner) = load(config, prepared, &Device::meta(), &mut group)?;
    scorer.step(&mut learner, &mut group, &share, build, 0.0, None, 1)?;
    Ok(log.take())
}

/// Everything that training needs in memory.
///
/// # Errors
/// If the model does not fit its config.
pub fn load(
    config: &Config,
    prepared: &Prepared,
    device: &Device,
    group: &mut Group,
) -> Result<(Scorer, Learner)> {
    let decoder = &prepared.decoder;
    let reference = match config.reference.kind {
        ReferenceKind::Model => Reference::Model(START.reference(config, decoder, device, group, |_| {})?),
        ReferenceKind::None => Reference::None,
        ReferenceKind::Precompute => {
            let rows = prepared.train.num_rows().max(prepared.eval.as_ref().map_or(0, TokenCache::num_rows));
            let scores = RowScores(vec![[0.0; 2]; rows]);
            Reference::Precomputed { train: Some(scores.clone()), eval: Some(scores) }
        }
    };
    let partition = Arc::new(partition(config, decoder, group.rank(), group.size()));
    let policy = START.policy(config, decoder, device, group, &partition)?;
    let learner = Learner::new(config, decoder, device, group, partition)?;
    Ok((Scorer::new(config, device.clone(), decoder.clone(), policy, reference), learner))
}

/// No file is opened: a device that computes nothing takes no content.
const START: Start = Start::Random(0);
