//! The cheapest change with which a run fits.
//!
//! Changes are tried in registry order by planning again: each alone, then the first with the
//! second, the third, and so on. Redundant changes of a combination are removed again, keeping the
//! earliest. Changes that would train something else come only when all others fail.

use crate::config::Config;
use crate::plan::advise::change::{CHANGES, Change, overrides_of};
use crate::plan::estimate::device::DeviceKind;
use crate::plan::{PlanInputs, RunPlan};
use crate::size;

/// Description of the change.
#[derive(Clone, Debug)]
pub struct Advice {
    /// The changes.
    pub changes: Vec<&'static Change>,
    /// The same as `--set` overrides.
    pub overrides: Vec<&'static str>,
    /// The plan with them.
    pub plan: RunPlan,
}

/// Changes that apply to a config; those that divide ranks' memory only if `may_divide`.
pub fn possible(config: &Config, may_divide: bool) -> Vec<&'static Change> {
    let divides = |change: &Change| change.keys().any(|key| key == "compute.sharding");
    let goes_on = |change: &&Change| !is_step_back(config, change) && change.applies(config);
    CHANGES.iter().filter(|change| (may_divide || !divides(change)) && goes_on(change)).collect()
}

/// Returns whether a change would undo part of the config: less sharding, larger micro-batches.
fn is_step_back(config: &Config, change: &Change) -> bool {
    let Ok(changed) = config.with(change.overrides) else { return false };
    let size = |config: &Config| match config.train.micro_batch {
        crate::config::MicroBatchSize::Tokens(tokens) => tokens,
        crate::config::MicroBatchSize::Rows(_) => 0,
    };
    let kept = |config: &Config| {
        let checkpointing = crate::config::Checkpointing::NAMES;
        checkpointing.iter().position(|(_, mode)| *mode == config.compute.checkpointing)
    };
    changed.compute.sharding < config.compute.sharding
        || size(&changed) > size(config)
        || kept(&changed) < kept(config)
}

/// The cheapest of these changes, or heap of them, with which every rank fits; `None` if there is
/// none.
pub fn advise(
    config: &Config,
    outline: &PlanInputs,
    num_ranks: usize,
    device: &DeviceKind,
    possible: &[&'static Change],
) -> Option<Advice> {
    let plan_with = |changes: &[&'static Change]| -> Option<Advice> {
        let overrides = overrides_of(changes);
        let config = config.with(&overrides).ok()?;
        // A change that the model or ranks refuse is no advice.
        let plan = RunPlan::sketch(&config, outline, num_ranks, device).ok()?;
        Some(Advice { changes: changes.to_vec(), overrides, plan })
    };
    // One rank of each stage tells what does not fit. Of what seems to, the others may need a little more.
    let fitting = |advice: &Advice| {
        let every_rank = || {
            let config = config.with(&advice.overrides).ok()?;
            RunPlan::make(&config, outline, num_ranks, device).ok()
        };
        advice.plan.fits() && (num_ranks == 1 || every_rank().is_some_and(|plan| plan.fits()))
    };
    let alone = |some: &[&'static Change]| some.iter().find_map(|c| plan_with(&[c]).filter(fitting));
    let heaped = |count: usize| {
        let mut found = plan_with(&possible[..count]).filter(fitting)?;
        // Another change may make one of them redundant.
        loop {
            let before = found.changes.len();
            for change in found.changes.clone().into_iter().rev() {
                let rest: Vec<_> = found.changes.iter().filter(|c| **c != change).copied().collect();
                if let Some(without) = plan_with(&rest).filter(fitting) {
                    found = without;
                }
            }
            if found.changes.len() == before {
                break;
            }
        }
        Some(found)
    };
    // An adapter instead of full training is advised last.
    let kept = possible.partition_point(|change| !change.alters_what_trains());
    let (keeping, altering) = possible.split_at(kept);
    alone(keeping)
        .or_else(|| (2..=kept).find_map(heaped))
        .or_else(|| alone(altering))
        .or_else(|| (kept.max(1) + 1..=possible.len()).find_map(heaped))
}

/// The plan with all of these changes.
pub fn with_all(
    config: &Config,
    outline: &PlanInputs,
    num_ranks: usize,
    device: &DeviceKind,
    changes: &[&'static Change],
) -> Option<RunPlan> {
    let config = config.with(&overrides_of(changes)).ok()?;
    RunPlan::sketch(&config, outline, num_ranks, device).ok()
}

/// Advice for a run that does not fit, or the memory missing after all changes.
pub fn in_words(config: &Config, outline: &PlanInputs, num_ranks: usize, device: &DeviceKind) -> String {
    let possible = possible(config, num_ranks > 1);
    if let Some(advice) = advise(config, outline, num_ranks, device, &possible) {
        return advice.to_string();
    }
    let overrides = overrides_of(&possible);
    match with_all(config, outline, num_ranks, device, &possible) {
        Some(plan) if !overrides.is_empty() => format!(
            "no change makes it fit; with {} it needs {} a rank: take more ranks, shorter sequences (data.max_length) or a \
             smaller model",
            overrides.join(", "),
            size::in_words(plan.fit().needed)
        ),
        _ => {
            "no change makes it fit: take more ranks, shorter sequences (data.max_length) or a smaller model"
                .to_owned()
        }
    }
}
