//! The plans of all ranks, on a kind of device.

use std::cmp::Reverse;
use std::collections::HashMap;

use rayon::prelude::*;
use tandem_model::{Decoder, PipelineStage, TensorParallelShard};

use super::estimate::Estimate;
use super::estimate::device::DeviceKind;
use super::survey::MicroBatchCounts;
use super::{Plan, PlanInputs};
use crate::Result;
use crate::config::{ComputeConfig, Config};
use crate::inputs::ModelSpecs;
use crate::optimizer::EvaluationWeights;
use crate::parallel::{Partition, mesh};
use crate::samples::Sampler;
use crate::weights::Packings;

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

/// Fit of what is needed in what there is: of a rank's arena, or of a host's memory.
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
    /// Plans every rank, those of a class once.
    pub fn make(
        config: &Config,
        outline: &PlanInputs,
        num_ranks: usize,
        device: &DeviceKind,
    ) -> Result<Self> {
        Self::plan_classes(config, outline, num_ranks, device, rank_classes(config, outline, num_ranks)?)
    }

    /// Plans one rank of each stage, the first, which holds as much as any other of it, up to a few
    /// cache lines.
    pub fn sketch(
        config: &Config,
        outline: &PlanInputs,
        num_ranks: usize,
        device: &DeviceKind,
    ) -> Result<Self> {
        let first = (0..config.compute.pipeline).map(|stage| vec![stage * config.compute.tensor]).collect();
        Self::plan_classes(config, outline, num_ranks, device, first)
    }

    fn plan_classes(
        config: &Config,
        outline: &PlanInputs,
        num_ranks: usize,
        device: &DeviceKind,
        classes: Vec<Vec<usize>>,
    ) -> Result<Self> {
        let device = &device.clone().with_tf32(config.compute.tf32);
        let plans = classes.par_iter().map(|ranks| Plan::new(config, outline, ranks[0], num_ranks));
        let plans: Vec<Plan> = plans.collect::<Result<_>>()?;
        let mut groups: Vec<(Vec<usize>, Plan)> = Vec::new();
        for (ranks, plan) in classes.into_iter().zip(plans) {
            match groups.iter_mut().find(|(_, other)| is_alike(other, &plan)) {
                Some((members, of_all)) => {
                    members.extend(ranks);
                    if plan.needed_of(device) > of_all.needed_of(device) {
                        *of_all = plan;
                    }
                }
                None => groups.push((ranks, plan)),
            }
        }
        groups.iter_mut().for_each(|(ranks, _)| ranks.sort_unstable());
        let estimates = groups.iter().map(|(_, plan)| Estimate::new(plan, device));
        let slowest = estimates.max_by(|a, b| a.step_seconds.total_cmp(&b.step_seconds));
        let estimate = slowest.expect("a run has a rank");
        Ok(Self { ranks: groups, device: device.clone(), cap: config.compute.memory, estimate })
    }

    /// The plan of the rank that needs most.
    pub fn fullest(&self) -> &Plan {
        let plans = self.ranks.iter().map(|(_, plan)| plan);
        plans.max_by_key(|plan| plan.needed_of(&self.device)).expect("a run has a rank")
    }

    /// The plan of the rank whose step takes longest, by the estimate.
    pub fn slowest(&self) -> &Plan {
        let seconds = |plan: &Plan| Estimate::new(plan, &self.device).step_seconds;
        let plans = self.ranks.iter().map(|(_, plan)| plan);
        plans.max_by(|a, b| seconds(a).total_cmp(&seconds(b))).expect("a run has a rank")
    }

    /// Bytes that all ranks together offload to files.
    pub fn file_bytes(&self) -> u64 {
        self.ranks.iter().map(|(ranks, plan)| (ranks.len() * plan.file_bytes()) as u64).sum()
    }

    /// Returns whether every device and every host has enough memory, as far as that is known.
    pub fn fits(&self) -> bool {
        self.fit().fits() && self.host_fit().is_none_or(|host| host.fits())
    }

    /// Ranks on the devices of one box.
    pub fn ranks_of_box(&self) -> usize {
        self.fullest().ranks.min(self.device.devices_per_box)
    }

    /// Compares the memory of a box's host with what its ranks need there: what they offload, and their
    /// processes. `None` on CPUs, where that is a part of [`RunPlan::fit`], and where nothing is offloaded
    /// and the host is not known.
    pub fn host_fit(&self) -> Option<FitResult> {
        let of_rank = self.ranks.iter().map(|(_, plan)| plan.host_bytes() + plan.outside).max()?;
        let is_offloaded = self.ranks.iter().any(|(_, plan)| plan.host_bytes() > 0);
        let limit = self.device.host_memory();
        let is_told = !self.device.is_processor() && (is_offloaded || limit.is_some());
        is_told.then(|| FitResult { needed: (of_rank * self.ranks_of_box()) as u64, limit })
    }

    /// Compares the need with the cap and the device.
    pub fn fit(&self) -> FitResult {
        let plan = self.fullest();
        let needed = plan.needed_of(&self.device) as u64;
        // Memory outside the arena counts, but is not capped.
        let outside = plan.outside_of(&self.device) as u64;
        let memory = self.device.memory(plan.ranks).map(|memory| memory.saturating_sub(outside));
        FitResult { needed, limit: self.cap.into_iter().chain(memory).min() }
    }
}

/// What a rank's plan depends on.
#[derive(PartialEq, Eq, Hash)]
struct RankClass {
    stage: usize,
    /// The first slice counts what all slices hold.
    is_first_slice: bool,
    /// Elements of each layer of its slice: all, and those that train.
    layers: Vec<(usize, usize)>,
    /// Elements of each bucket that it holds a part of.
    part: Vec<usize>,
    /// Elements of each bucket that it writes to checkpoints.
    share: Vec<usize>,
    micro_batches: Vec<MicroBatchCounts>,
    /// Rank 0 of an online run has the judges.
    judges: bool,
    /// Whether it answers the prompts of samples, where the other ranks only put their weights aside.
    samples: bool,
}

/// Returns the ranks in classes of equal plans. Parts of frozen weights, which are cut between units of
/// some bytes, may differ by a unit a layer; the first rank of a class has most of them.
///
/// # Errors
/// The ranks cannot be divided as the config asks, or a file of the run is wrong.
pub fn rank_classes(config: &Config, outline: &PlanInputs, num_ranks: usize) -> Result<Vec<Vec<usize>>> {
    mesh::check(config, num_ranks)?;
    let ComputeConfig { tensor, pipeline, replicate, .. } = config.compute;
    let (of_model, sharded) = (tensor * pipeline, config.compute.sharded());
    let data = num_ranks / of_model;
    let parts = if sharded.is_none() { 1 } else { data / replicate };
    let ModelSpecs { policy: whole, teacher, .. } = ModelSpecs::from_config(config, &outline.decoder)?;
    let survey = outline.survey(config)?;
    let are_put_aside = config.train.evaluation_weights() != EvaluationWeights::Trained;
    let has_samples = are_put_aside && outline.sampler(config).is_some();
    let mut classes: HashMap<RankClass, Vec<(Reverse<usize>, usize)>> = HashMap::new();
    for place in 0..of_model {
        let stage = PipelineStage { index: place / tensor, count: pipeline };
        let slice = TensorParallelShard { index: place % tensor, count: tensor };
        let decoder = Decoder::staged(&Decoder::sliced(&whole, slice)?, stage)?;
        let layers = decoder.layers().into_iter();
        let layers = layers.map(|layer| (decoder.layout(layer).len, decoder.trained(layer).len));
        let layers: Vec<_> = layers.collect();
        let by_rank = |count: usize| {
            let partition = Partition::among(&config.compute, &decoder, (0, count), data);
            move |rank: usize| {
                let buckets = 0..partition.buckets().len();
                buckets.map(|bucket| partition.bucket_counts(bucket)[rank]).collect()
            }
        };
        let (part, share) = (by_rank(parts), by_rank(data));
        let frozen = if sharded.weights {
            let all = [Some(&decoder), teacher.as_ref()];
            frozen_bytes(config, outline, &all.map(|decoder| decoder.map(|decoder| &**decoder)), parts)
        } else {
            vec![0; parts]
        };
        let counts = survey.micro_batch_counts(stage, data, sharded.meets_in_walk());
        for (member, micro_batches) in counts.into_iter().enumerate() {
            let rank = member * of_model + place;
            let class = RankClass {
                stage: stage.index,
                is_first_slice: slice.index == 0,
                layers: layers.clone(),
                part: part(member % parts),
                share: share(member % parts * (data / parts) + member / parts),
                micro_batches,
                judges: rank == 0 && config.online.is_some(),
                samples: has_samples && Sampler::takes_part(config, rank),
            };
            classes.entry(class).or_default().push((Reverse(frozen[member % parts]), rank));
        }
    }
    let mut classes: Vec<_> = classes.into_values().collect();
    classes.iter_mut().for_each(|ranks| ranks.sort_unstable());
    let mut classes: Vec<Vec<usize>> =
        classes.into_iter().map(|ranks| ranks.into_iter().map(|(_, rank)| rank).collect()).collect();
    classes.sort_unstable();
    Ok(classes)
}

/// Bytes of all frozen layers of some models that each of `parts` ranks holds.
fn frozen_bytes(
    config: &Config,
    outline: &PlanInputs,
    decoders: &[Option<&Decoder>],
    parts: usize,
) -> Vec<usize> {
    let format = config.frozen_format(outline.quantised);
    let mut bytes = vec![0; parts];
    for decoder in decoders.iter().copied().flatten() {
        let packings = Packings::new(decoder, format, config.compute.compute_type());
        for layer in decoder.layers() {
            let counts = packings.packing(layer).counts(parts);
            bytes.iter_mut().zip(counts).for_each(|(sum, own)| *sum += own);
        }
    }
    bytes
}

/// Returns whether two ranks have equal plans: same stage, same peak moments, and bytes of every
/// kind within half a percent, since dividing layers is uneven.
fn is_alike(a: &Plan, b: &Plan) -> bool {
    let slack = (a.arena_bytes() / 200).max(1 << 16);
    let near = |a: usize, b: usize| a.abs_diff(b) <= slack;
    let phases = || a.phases.iter().zip(&b.phases);
    a.stage == b.stage
        && near(a.arena_bytes(), b.arena_bytes())
        && near(a.host_bytes(), b.host_bytes())
        && near(a.file_bytes(), b.file_bytes())
        && phases().all(|(a, b)| {
            let kinds = a.memory.at_peak.iter().zip(&b.memory.at_peak);
            a.moment == b.moment && kinds.into_iter().all(|(a, b)| near(*a, *b))
        })
}
