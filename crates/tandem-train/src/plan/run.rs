//! The plans of all ranks, on a kind of device.

use super::estimate::Estimate;
use super::estimate::device::DeviceKind;
use super::{Plan, PlanInputs};
use crate::Result;
use crate::config::Config;

/// Plan of a run: memory per rank, step time and fit.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// Groups of ranks with equal plans.
    pub ranks: Vec<(Vec<usize>, Plan)>,
    /// Device of each rank.
    pub device: DeviceKind,
    /// Memory cap per rank in bytes.
    pub cap: Option<u64>,
    /// Estimate of the slowest rank.
    pub estimate: Estimate,
}

/// Fit of a rank's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FitResult {
    /// Peak need in bytes.
    pub needed: u64,
    /// Available bytes; `None` if unknown.
    pub limit: Option<u64>,
}

impl FitResult {
    /// Returns whether it fits.
    pub fn fits(&self) -> bool {
        self.limit.is_none_or(|limit| self.needed <= limit)
    }
}

impl RunPlan {
    /// Plans every rank.
    pub fn make(
        config: &Config,
        outline: &PlanInputs,
        num_ranks: usize,
        device: &DeviceKind,
    ) -> Result<Self> {
        let all: Vec<usize> = (0..num_ranks).collect();
        Self::plan_ranks(config, outline, num_ranks, device, &all)
    }

    /// Plans one rank of each stage, the first, which holds as much as any other of it, up to a few
    /// cache lines.
    pub fn sketch(
        config: &Config,
        outline: &PlanInputs,
        num_ranks: usize,
        device: &DeviceKind,
    ) -> Result<Self> {
        let first: Vec<usize> =
            (0..config.compute.pipeline).map(|stage| stage * config.compute.tensor).collect();
        Self::plan_ranks(config, outline, num_ranks, device, &first)
    }

    fn plan_ranks(
        config: &Config,
        outline: &PlanInputs,
        num_ranks: usize,
        device: &DeviceKind,
        ranks: &[usize],
    ) -> Result<Self> {
        let device = &device.clone().with_tf32(config.compute.tf32);
        let mut groups: Vec<(Vec<usize>, Plan)> = Vec::new();
        for &rank in ranks {
            let plan = Plan::new(config, outline, rank, num_ranks)?;
            match groups.iter_mut().find(|(_, other)| is_alike(other, &plan)) {
                Some((members, of_all)) => {
                    members.push(rank);
                    if plan.arena_bytes() > of_all.arena_bytes() {
                        *of_all = plan;
                    }
                }
                None => groups.push((vec![rank], plan)),
            }
        }
        let estimates = groups.iter().map(|(_, plan)| Estimate::new(plan, device));
        let slowest = estimates.max_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
        let estimate = slowest.expect("a run has a rank");
        Ok(Self { ranks: groups, device: device.clone(), cap: config.compute.memory, estimate })
    }

    /// The plan of the rank that needs most.
    pub fn fullest(&self) -> &Plan {
        let plans = self.ranks.iter().map(|(_, plan)| plan);
        plans.max_by_key(|plan| plan.arena_bytes()).expect("a run has a rank")
    }

    /// Bytes that all ranks together offload to files.
    pub fn file_bytes(&self) -> u64 {
        self.ranks.iter().map(|(ranks, plan)| (ranks.len() * plan.file_bytes()) as u64).sum()
    }

    /// Compares the need with the cap and the device.
    pub fn fit(&self) -> FitResult {
        let plan = self.fullest();
        // On a CPU run, host offload uses the same memory as the arena.
        let (needed, outside) = match self.device.is_processor() {
            true => (plan.ram_bytes() as u64, plan.outside as u64),
            false => (plan.arena_bytes() as u64, 0),
        };
        // Memory outside the arena counts, but is not capped.
        let memory = self.device.memory(plan.ranks).map(|memory| memory.saturating_sub(outside));
        FitResult { needed, limit: self.cap.into_iter().chain(memory).min() }
    }
}

/// Returns whether two ranks have equal plans: same stage, same peak moments, and bytes of every
/// kind within half a percent, since dividing layers is uneven.
fn is_alike(a: &Plan, b: &Plan) -> bool {
    let slack = (a.arena_bytes() / 200).max(1 << 16);
    let near = |a: usize, b: usize| a.abs_diff(b) <= slack;
    let phases = || a.phases.iter().zip(&b.phases);
    a.stage == b.stage
        && near(a.arena_bytes(), b.arena_bytes())
        && phases().all(|(a, b)| {
            let kinds = a.memory.at_peak.iter().zip(&b.memory.at_peak);
            a.moment == b.moment && kinds.into_iter().all(|(a, b)| near(*a, *b))
        })
}
