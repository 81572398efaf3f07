//! The reference policy: a view, not a second model wherever that can be had.
//!
//! `precompute` runs the reference once over the rows that the run's steps read, and caches two numbers per row on disk,
//! keyed by the content of weights and tokens. `model` keeps a second set of weights and scores each
//! micro-batch.

mod precompute;
mod row_scores;
mod teacher;

use std::sync::Arc;

use tandem_comm::ProcessGroup;
use tandem_kernels::ops::{HeadScores, RowDivergence};
use tandem_kernels::{DType, Device, MemoryKind, ops};
use tandem_model::{Decoder, FlatWeights, LayerExecutor, PolicyAndReferenceScores, WeightSource};

use crate::Result;
use crate::config::{Config, ReferenceKind};
use crate::events::Observer;
use crate::inputs::{ModelSpecs, RunInputs};
use crate::metrics::Split;
use crate::parallel::{DeviceMesh, Partition, StagedExecutor};
use crate::placement::{MemoryPlacement, OffloadedStorage};
use crate::recipe::MicroBatch;
use crate::weights::initial_weights::{InitialWeights, LoadObserver, adapter_masters};
use crate::weights::{FrozenWeights, Policy, ReplicatedWeights, SharedReference};

pub(crate) use row_scores::RowScores;
pub(crate) use teacher::Teacher;

pub(crate) use precompute::layer_executor;
use precompute::{Fingerprint, Precompute};

/// Source of reference log-probabilities.
pub enum Reference {
    /// The loss uses none.
    None,
    /// Computed once, before training.
    Precomputed {
        /// Training rows, if used.
        train: Option<RowScores>,
        /// Evaluation rows, if used.
        eval: Option<RowScores>,
    },
    /// A second set of weights.
    Model(Box<FrozenWeights>),
    /// A second set of weights that is pulled towards the policy.
    Followed(Box<Policy>),
    /// Another model, whose distributions the policy learns.
    Teacher(Box<Teacher>),
    /// The policy's base, with another adapter or none: it goes along with the policy.
    Shared,
}

impl Reference {
    /// Returns whether it shares the policy's forward pass.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Shared)
    }

    /// Weights of its own that follow the policy.
    pub fn ema_reference(&mut self) -> Option<&mut Policy> {
        match self {
            Self::Followed(weights) => Some(weights.as_mut()),
            _ => None,
        }
    }

    fn weights(&mut self) -> Option<&mut dyn WeightSource> {
        match self {
            Self::Model(weights) => Some(weights.as_mut()),
            Self::Followed(weights) => Some(weights.as_mut()),
            Self::None | Self::Precomputed { .. } | Self::Teacher(_) | Self::Shared => None,
        }
    }

    /// Divergences of the scored rows from a teacher; none without one.
    pub(crate) fn divergences(&self) -> &[RowDivergence] {
        match self {
            Self::Teacher(teacher) => teacher.divergences(),
            _ => &[],
        }
    }

    /// The teacher of a distillation.
    pub(crate) fn teacher(&mut self) -> Option<&mut Teacher> {
        match self {
            Self::Teacher(teacher) => Some(teacher),
            _ => None,
        }
    }

    /// Summed log-probability of each sequence of a micro-batch; `None` without a reference, where
    /// a model's come out on another stage, or where they come with the policy's. A teacher keeps its
    /// rows instead.
    pub fn log_probs(
        &mut self,
        executor: &StagedExecutor<'_>,
        split: Split,
        batch: &MicroBatch,
        scores: &mut HeadScores,
    ) -> Result<Option<Vec<f64>>> {
        match self {
            Self::None | Self::Shared => Ok(None),
            Self::Precomputed { train, eval } => {
                let rows = match split {
                    Split::Train => train,
                    Split::Eval => eval,
                };
                let rows = rows.as_ref().expect("precomputed for every split that is used");
                Ok(Some(rows.of(batch)))
            }
            Self::Teacher(teacher) => {
                if split == Split::Train {
                    executor.executor.device.begin_phase("reference pass");
                }
                teacher.forward(&executor.executor, &batch.forest, scores)?;
                Ok(None)
            }
            Self::Model(_) | Self::Followed(_) => {
                if split == Split::Train {
                    executor.executor.device.begin_phase("reference pass");
                }
                let weights = self.weights().expect("it has some");
                executor.forward(weights, &batch.forest, PolicyAndReferenceScores::one(scores), false)?;
                weights.release_all();
                Ok(executor.is_last().then(|| batch.sequence_log_probs(scores)))
            }
        }
    }
}

impl Reference {
    /// Creates a read-only view of the weights for another thread, like [`Policy::reader`]. A
    /// shared base is covered by the policy's reader.
    pub fn reader(
        &self,
        placement: &MemoryPlacement,
        device: &Device,
        shard: &mut ProcessGroup,
    ) -> Result<Self> {
        Ok(match self {
            // Nothing is generated by a teacher.
            Self::None | Self::Precomputed { .. } | Self::Teacher(_) => Self::None,
            Self::Shared => Self::Shared,
            Self::Model(weights) => Self::Model(Box::new(weights.reader(
                device,
                OffloadedStorage::from_placement(placement)?,
                shard,
            )?)),
            Self::Followed(weights) => Self::Followed(Box::new(weights.reader(placement, device, shard)?)),
        })
    }

    /// Lends a reference's weights to a reader of them.
    pub fn share_with(&self, reader: &mut Self) {
        if let (Self::Followed(own), Self::Followed(reader)) = (self, reader) {
            own.share_with(reader);
        }
    }

    /// Releases the shared weights of a reader.
    pub fn release_shared(&mut self) {
        if let Self::Followed(weights) = self {
            weights.release_shared();
        }
    }

    /// Counterpart of [`Reference::log_probs`] on a rank without a batch in lockstep.
    pub fn idle(&mut self, executor: &LayerExecutor<'_>) -> Result<()> {
        if let Self::Teacher(teacher) = self {
            return teacher.idle(executor);
        }
        let Some(weights) = self.weights() else { return Ok(()) };
        executor.idle_forward(weights)?;
        weights.release_all();
        Ok(())
    }
}

/// The policy as it starts, and the configured reference, ready for the splits that will be scored:
/// loads weights, and reads or computes log-probabilities that are wanted beforehand.
pub(crate) fn load(
    config: &Config,
    prepared: &RunInputs,
    placement: &MemoryPlacement,
    mesh: &mut DeviceMesh,
    splits: &[Split],
    observer: &mut dyn Observer,
) -> Result<(Policy, Reference)> {
    let decoder = &mesh.part(&prepared.decoder)?;
    let wanted = &config.reference;
    let precomputes = wanted.kind == ReferenceKind::Precompute;
    let mut pass = Precompute { config, prepared, placement, decoder, splits, observer };
    // Another model's weights are gone before the policy's come.
    let mut precomputed = match &wanted.model {
        Some(_) if precomputes => {
            let mut print = Fingerprint::new(decoder);
            let start = InitialWeights::for_reference(config, &prepared.folder, decoder)?;
            let see: LoadObserver = &mut |layer, flat| print.see(layer, flat);
            let mut weights =
                start.frozen(config, decoder, placement, mesh.shard(), MemoryKind::Reference, Some(see))?;
            Some(pass.run(mesh, weights.as_mut(), &print, start.frozen_format(config))?)
        }
        _ => None,
    };
    let mut print = Fingerprint::new(decoder);
    let (mut policy, format) = {
        let start = InitialWeights::for_policy(config, &prepared.folder, decoder)?;
        let partition = Arc::new(Partition::for_run(&config.compute, decoder, mesh));
        let see: LoadObserver = &mut |layer, flat| print.see(layer, flat);
        let see = Some(see).filter(|_| precomputes && precomputed.is_none());
        let policy = start.policy(config, decoder, placement, mesh, &partition, see)?;
        (policy, start.frozen_format(config))
    };
    if precomputes && precomputed.is_none() {
        precomputed = Some(match prepared.reference_decoder {
            Some(_) => {
                let start =
                    &|decoder: &Decoder| InitialWeights::for_policy(config, &prepared.folder, decoder);
                share_base(config, &prepared.decoders(), &placement.device, mesh, &mut policy, start)?;
                let adapter = policy.reference().expect("just put there").masters();
                for (layer, flat) in decoder.layers().into_iter().zip(&adapter.layers) {
                    placement.device.host_read(flat.view(), |flat| print.see(layer, flat))?;
                }
                let scores = pass.run(mesh, &mut SharedReference(&mut policy), &print, format)?;
                policy.share_base(None);
                scores
            }
            None => pass.run(mesh, &mut policy, &print, format)?,
        });
    }
    let reference = match precomputed {
        Some(precomputed) => precomputed,
        None => {
            let start = &|decoder: &Decoder| InitialWeights::for_reference(config, &prepared.folder, decoder);
            kept(config, &prepared.decoders(), placement, mesh, &mut policy, start)?
        }
    };
    Ok((policy, reference))
}

/// Creates an in-memory reference, or none. `start` holds its initial weights; a shared base starts
/// with the policy's.
pub(crate) fn kept(
    config: &Config,
    decoders: &ModelSpecs,
    placement: &MemoryPlacement,
    mesh: &mut DeviceMesh,
    policy: &mut Policy,
    start: &dyn Fn(&Decoder) -> Result<InitialWeights>,
) -> Result<Reference> {
    let decoder = &mesh.part(&decoders.policy)?;
    if let Some((teacher, distill)) = decoders.teacher.as_ref().zip(config.distill) {
        let kind = MemoryKind::Reference;
        let weights = start(teacher)?.frozen(config, teacher, placement, mesh.shard(), kind, None)?;
        return Ok(Reference::Teacher(Box::new(Teacher::new(teacher.clone(), weights, distill.beta))));
    }
    Ok(match config.reference.kind {
        ReferenceKind::None | ReferenceKind::Precompute => Reference::None,
        ReferenceKind::Model => Reference::Model(start(decoder)?.frozen(
            config,
            decoder,
            placement,
            mesh.shard(),
            MemoryKind::Reference,
            None,
        )?),
        ReferenceKind::Sync if decoder.adapter().is_none() => {
            let partition = Arc::new(Partition::for_run(&config.compute, decoder, mesh));
            let (start, shard) = (start(decoder)?, mesh.shard());
            let weights =
                start.trained(config, decoder, placement, shard, &partition, MemoryKind::Reference, None)?;
            Reference::Followed(Box::new(Policy::full(weights)))
        }
        ReferenceKind::Base | ReferenceKind::Adapter | ReferenceKind::Sync => {
            share_base(config, decoders, &placement.device, mesh, policy, start)?;
            Reference::Shared
        }
    })
}

/// Lets the reference share the policy's base, which begins at `start`: with the adapter that the
/// config gives it, or with none.
pub(crate) fn share_base(
    config: &Config,
    decoders: &ModelSpecs,
    device: &Device,
    mesh: &mut DeviceMesh,
    policy: &mut Policy,
    start: &dyn Fn(&Decoder) -> Result<InitialWeights>,
) -> Result<()> {
    if config.reference.kind == ReferenceKind::Base {
        policy.share_base(None);
        return Ok(());
    }
    let own = decoders.reference.as_ref().unwrap_or(&decoders.policy);
    let decoder = mesh.part(own)?;
    let masters = match &config.reference.adapter {
        Some(folder) => {
            let from = start(&decoder)?.adapter(Some(folder), &decoder, device)?;
            adapter_masters(config, &decoder, device, mesh.split(), MemoryKind::Reference, &from, policy)?
        }
        // A copy of the policy's initial weights.
        None => {
            let mut layers = Vec::new();
            for master in &policy.masters().0.layers {
                let mut copy = device.alloc(MemoryKind::Reference, 1, master.cols(), DType::F32)?;
                ops::cast(device, master.view(), copy.view_mut())?;
                layers.push(copy);
            }
            FlatWeights { layers }
        }
    };
    let copy = ReplicatedWeights::new(device, decoder, masters, config.compute.compute_type())?;
    match config.reference.kind {
        ReferenceKind::Sync => policy.attach_ema_reference(copy),
        _ => policy.share_base(Some(copy)),
    }
    Ok(())
}
