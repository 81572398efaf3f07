//! Out-of-memory handling: refusal before loading, or an explained error later.

use tandem_comm::{ProcessGroup, Reduction};
use tandem_kernels::{ArenaPlace, KernelError};

use crate::config::Config;
use crate::inputs::RunInputs;
use crate::plan::estimate::Gpu;
use crate::plan::estimate::device::{DeviceKind, DeviceTable, host_memory_and_swap};
use crate::plan::{self, Plan, PlanInputs};
use crate::{Result, TrainError, size};

/// Refuses a run if a rank needs more than `compute.memory`, its GPU or, on a CPU, its machine has. Collective, before
/// anything is loaded.
pub(super) fn refuse_too_large(
    config: &Config,
    prepared: &RunInputs,
    plan: &Plan,
    group: &mut ProcessGroup,
) -> Result<()> {
    let mut gpu = Gpu::for_rank(&config.compute, group.rank())?;
    if let Some(gpu) = &mut gpu {
        gpu.usable = gpu.usable.saturating_sub(plan.outside_of(&gpu.kind) as u64);
    }
    let needed = if gpu.is_some() { plan.arena_bytes() } else { plan.ram_bytes() };
    let over = |limit: Option<u64>| limit.map_or(f64::NEG_INFINITY, |limit| needed as f64 - limit as f64);
    let host = if gpu.is_none() { host_memory_and_swap() } else { None };
    let usable = gpu.as_ref().map(|gpu| gpu.usable);
    let mut most = [over(config.compute.memory), over(usable), over(host), needed as f64];
    if group.size() > 1 {
        group.all_reduce(&mut most, Reduction::Max)?;
    }
    let [excess @ .., most] = most;
    let [own, needed] = [needed as u64, most as u64].map(size::in_words);
    let (mut story, gpu) = match (excess, gpu) {
        ([over, ..], gpu) if over > 0.0 => {
            let cap = size::in_words(config.compute.memory.expect("it is exceeded"));
            (format!("a rank needs {needed}, and compute.memory allows {cap}; nothing was loaded"), gpu)
        }
        ([_, over, _], Some(gpu)) if over > 0.0 => {
            let (free, total) = (size::in_words(gpu.usable), size::in_words(gpu.total));
            let story = format!(
                "this rank needs {own} of its GPU ({}), which has {free} free of {total}, or another rank needs more than its GPU \
                 has; nothing was loaded",
                gpu.kind.name
            );
            (story, Some(gpu))
        }
        ([.., over], gpu) if over > 0.0 => {
            let whole = host.map_or_else(|| "less".to_owned(), size::in_words);
            let others =
                if group.size() > 1 { ", or another rank needs more than its machine has" } else { "" };
            let story = format!(
                "a rank needs {needed}, and this machine has {whole} with its swap{others}; nothing was loaded"
            );
            (story, gpu)
        }
        _ => return Ok(()),
    };
    if group.rank() == 0 {
        let kind = kind_of(gpu)?;
        story += &*plan::story(config, &PlanInputs::new(prepared), group.size(), &kind)?;
    }
    Err(TrainError::TooLarge { story })
}

/// Explains an out-of-memory error of one of `num_ranks` ranks with the plan's picture and advice;
/// `held` is the arena's device memory.
pub(super) fn explained(
    error: TrainError,
    config: &Config,
    prepared: &RunInputs,
    (rank, num_ranks): (usize, usize),
    held: usize,
) -> TrainError {
    let Some(reason) = error.out_of_memory() else { return error };
    let missing = match reason {
        // The picture is of the device's memory, which was not what was full.
        KernelError::OutOfMemory { place: ArenaPlace::PinnedHost | ArenaPlace::File, .. } => return error,
        KernelError::GpuFull { wanted, free, .. } => {
            wanted.map_or(UNKNOWN, |wanted| wanted.saturating_sub(*free))
        }
        KernelError::OutOfMemory { requested, .. } => *requested,
        _ => UNKNOWN,
    };
    let story = || -> Result<String> {
        let plan = Plan::make(config, prepared, rank, num_ranks)?;
        let gpu = Gpu::for_rank(&config.compute, rank)?;
        let free = gpu.as_ref().map_or(u64::MAX, |gpu| gpu.usable + held as u64);
        let kind = kind_of(gpu)?;
        // Memory free now may have been taken a moment ago.
        let room = free.min(plan.needed_of(&kind).saturating_sub(missing) as u64);
        let whole = room + plan.outside_of(&kind) as u64;
        // A CPU is shared by its ranks.
        let whole = if kind.is_processor() { whole * num_ranks as u64 } else { whole };
        let kind = DeviceKind { memory_gib: Some(whole as f64 / (1u64 << 30) as f64), ..kind };
        plan::story(config, &PlanInputs::new(prepared), num_ranks, &kind)
    };
    match story() {
        Ok(story) => TrainError::OutOfMemory { error: Box::new(error), story },
        // Report the missing memory, not a failed query.
        Err(_) => error,
    }
}

/// Missing bytes assumed where the failed size is unknown.
const UNKNOWN: usize = 256 << 20;

/// Device-table row of the rank's device.
fn kind_of(gpu: Option<Gpu>) -> Result<DeviceKind> {
    gpu.map_or_else(|| Ok(DeviceTable::built_in().find("cpu")?.clone()), |gpu| Ok(gpu.kind))
}
