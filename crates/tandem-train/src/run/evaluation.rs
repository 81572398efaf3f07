//! Evaluation of a model or a checkpoint outside a run: `tandem eval`.

use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::config::{ComputeConfig, Config};
use crate::events::{Event, Observer};
use crate::inputs::RunInputs;
use crate::metrics::{Record, Split};
use crate::parallel::DeviceMesh;
use crate::placement::{MemoryPlacement, PassCapacities, gpus};
use crate::run::resume;
use crate::step::{TrainStep, evaluation_record};
use crate::{Result, TrainError, plan, recipe, reference, weights};

/// Evaluates a config's model, or a checkpoint of its run, on `data.eval`. Uses the memory of a dry
/// run, capped by `compute.memory`. Writes only caches.
///
/// # Errors
/// The config has no `data.eval` or generates, an input is missing or wrong, `compute.memory` does not suffice,
/// or a pass fails.
pub fn evaluate(config: &Config, checkpoint: Option<&Path>, observer: &mut dyn Observer) -> Result<Record> {
    if config.data.eval.is_empty() || config.method.generates() {
        let reason = recipe::for_method(config.method).no_held_out_rows();
        return Err(TrainError::Mismatch { reason: reason.to_owned() });
    }
    // One rank, whatever the run had: with every core.
    let mut compute = config.compute.clone();
    gpus::resolve(&mut compute)?;
    let compute = ComputeConfig {
        devices: gpus::one_of(compute.devices),
        replicate: 1,
        tensor: 1,
        pipeline: 1,
        ..compute
    };
    let config = &Config { compute, ..config.clone() };
    weights::check_all(config)?;
    let prepared = RunInputs::open(config, observer)?;
    let needs = plan::evaluation::needs(config, &prepared)?;
    plan::evaluation::refuse_too_large(config, needs)?;
    let placement =
        MemoryPlacement::open(config, config.compute.attention, needs, PassCapacities::default(), 0)?;
    let mut mesh = DeviceMesh::alone();
    let (policy, reference) =
        reference::load(config, &prepared, &placement, &mut mesh, &[Split::Eval], observer)?;
    let mut scorer = TrainStep::new(config, placement, prepared.decoder.clone(), policy, reference);
    let mut step = 0;
    if let Some(path) = checkpoint {
        let checkpoint = Checkpoint::open(path)?;
        resume::restore_evaluated(&checkpoint, config.train.evaluation_weights(), &mut scorer)?;
        step = checkpoint.cursor().step;
        scorer.rewards = checkpoint.cursor().rewards.unwrap_or_default();
    }
    scorer.placement.reserve()?;
    let Some(cache) = &prepared.eval else { unreachable!("data.eval is not empty") };
    let mut record = evaluation_record(&mut scorer, &mut mesh, &mut prepared.batcher(config), cache, step)?;
    record.set_count("arena", scorer.placement.device.high_water() as u64);
    observer.event(&Event::Record(&record));
    Ok(record)
}
