//! The fastest plans that fit: every way to divide the ranks, each with the cheapest changes with
//! which it fits.

use rayon::prelude::*;

use crate::config::{Config, ShardedState, Sharding};
use crate::plan::advise::advice::{advise, possible, with_all};
use crate::plan::estimate::device::DeviceKind;
use crate::plan::{PlanInputs, RunPlan};

/// A plan that fits.
#[derive(Clone, Debug)]
pub struct Found {
    /// `--set` overrides; empty for the config itself.
    pub overrides: Vec<String>,
    /// The plan with it.
    pub plan: RunPlan,
}

impl Found {
    /// Steps of a hundredth on a logarithmic scale of time, then the number of changes: what is as fast with
    /// fewer changes comes first.
    fn rank(&self) -> (i64, usize) {
        let step = self.plan.estimate.step_seconds.max(f64::MIN_POSITIVE);
        ((step.ln() * 100.0).round() as i64, self.overrides.len())
    }
}

/// Plans that fit, the fastest first.
pub fn search(config: &Config, outline: &PlanInputs, num_ranks: usize, device: &DeviceKind) -> Vec<Found> {
    let divided = |mesh: &Vec<String>| {
        let divided = config.with(mesh).ok()?;
        let plan = RunPlan::sketch(&divided, outline, num_ranks, device).ok()?;
        let (overrides, plan) = if plan.fits() {
            (Vec::new(), plan)
        } else {
            // Changes that divide ranks further are meshes of their own.
            let possible = possible(&divided, false);
            // If all changes together do not fit, none does.
            with_all(&divided, outline, num_ranks, device, &possible).filter(RunPlan::fits)?;
            let advice = advise(&divided, outline, num_ranks, device, &possible)?;
            (advice.overrides, advice.plan)
        };
        let changed = overrides.iter().map(|&text| text.to_owned());
        let all: Vec<String> = mesh.iter().cloned().chain(changed).collect();
        Some(Found { overrides: differing(config, &all), plan })
    };
    let mut found: Vec<_> = meshes(outline, num_ranks, device).par_iter().filter_map(divided).collect();
    found.sort_by(|a, b| {
        let by_time = || a.plan.estimate.step_seconds.total_cmp(&b.plan.estimate.step_seconds);
        a.rank().cmp(&b.rank()).then_with(by_time)
    });
    found
}

/// The overrides that say something else than the config.
fn differing(config: &Config, overrides: &[String]) -> Vec<String> {
    let differs = |text: &&String| config.with(&[text]).map_or(true, |changed| changed != *config);
    overrides.iter().filter(differs).cloned().collect()
}

/// Sensible meshes: tensor slices within a box, stages of at least one block, sharding over all
/// ranks or within each box.
fn meshes(outline: &PlanInputs, num_ranks: usize, device: &DeviceKind) -> Vec<Vec<String>> {
    let divisors = |n: usize| (1..=n).filter(move |d| n.is_multiple_of(*d));
    let most_slices = if device.is_processor() { num_ranks } else { device.devices_per_box };
    let mut meshes = Vec::new();
    for tensor in divisors(num_ranks).filter(|&n| n <= most_slices) {
        let num_blocks = outline.decoder.spec().num_layers;
        for pipeline in divisors(num_ranks / tensor).filter(|&n| n <= num_blocks) {
            let data = num_ranks / tensor / pipeline;
            for (name, sharding) in Sharding::NAMES {
                let is_divided = !ShardedState::from(sharding).is_none();
                if is_divided && data == 1 {
                    continue;
                }
                // Everything once, or once in each box.
                let in_box = divisors(data).rfind(|shard| shard * tensor <= device.devices_per_box);
                let boxes = data / in_box.unwrap_or(data);
                for replicate in divisors(data).filter(|&r| r == 1 || (is_divided && r == boxes && r < data))
                {
                    let mesh = [("tensor", tensor), ("pipeline", pipeline), ("replicate", replicate)];
                    let mut overrides = vec![format!("compute.sharding={name}")];
                    overrides.extend(mesh.iter().map(|(key, count)| format!("compute.{key}={count}")));
                    meshes.push(overrides);
                }
            }
        }
    }
    meshes
}
