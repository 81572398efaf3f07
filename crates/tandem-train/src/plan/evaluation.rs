//! Plan of an evaluation alone: policy, reference and forward passes over held-out rows.

use super::{PhasePlan, PlanInputs};
use crate::config::{Config, ReferenceKind};
use crate::inputs::RunInputs;
use crate::parallel::DeviceMesh;
use crate::placement::{MemoryPlacement, MemoryRequirements, PassCapacities};
use crate::plan::dry_run;
use crate::step::evaluation_record;
use crate::{Result, TrainError, size};

/// Plans one rank by a dry run over every held-out row, so that no row needs more memory.
///
/// # Panics
/// If there are no held-out rows.
pub fn needs(config: &Config, prepared: &RunInputs) -> Result<MemoryRequirements> {
    let cache = prepared.eval.as_ref().expect("held-out rows");
    let (outline, mut batcher) = (PlanInputs::new(prepared), prepared.batcher(config));
    let mut phases = Vec::new();
    if config.reference.kind == ReferenceKind::Precompute {
        let placement = MemoryPlacement::meta(&config.compute, PassCapacities::default());
        let rows: Vec<u32> = (0..cache.num_rows() as u32).collect();
        let share = batcher.share(cache, &rows, 0, 1);
        let mut batches =
            share.own_micro_batches.iter().map(|&index| batcher.build(cache, share.part(index)));
        dry_run::reference_pass(config, &outline, &placement, &mut DeviceMesh::alone(), &mut batches, false)?;
        phases.push(PhasePlan::new("reference", &placement, 0.0));
    }
    let (placement, mut mesh) =
        (MemoryPlacement::meta(&config.compute, PassCapacities::default()), DeviceMesh::alone());
    let mut scorer = dry_run::scorer(config, &outline, &placement, &mut mesh)?;
    evaluation_record(&mut scorer, &mut mesh, &mut batcher, cache, 0)?;
    phases.push(PhasePlan::new("evaluate", &placement, 0.0));
    Ok(MemoryRequirements::new(&phases))
}

/// Refuses an evaluation that needs more than `compute.memory`, before anything is loaded.
pub fn refuse_too_large(config: &Config, needs: MemoryRequirements) -> Result<()> {
    match config.compute.memory {
        Some(cap) if needs.ram() as u64 > cap => Err(TrainError::TooLarge {
            story: format!(
                "the evaluation needs {}, and compute.memory allows {}; nothing was loaded: allow more, or make its pieces smaller \
                 with train.micro_batch_tokens",
                size::in_words(needs.ram() as u64),
                size::in_words(cap)
            ),
        }),
        _ => Ok(()),
    }
}
