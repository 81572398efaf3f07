//! State that training adds to scoring.

use std::sync::Arc;

use tandem_kernels::Backend;
use tandem_model::Decoder;

use crate::Result;
use crate::checkpoint::snapshot::{self, Snapshot};
use crate::config::{Config, ReferenceKind};
use crate::gradients::{Accumulator, ReductionGroups, SumOptions};
use crate::optimizer::Optimizer;
use crate::optimizer::groups::ParameterGroups;
use crate::parallel::{DeviceMesh, Partition};
use crate::placement::MemoryPlacement;

/// Gradients, optimiser states, and the copy that a checkpoint is written from.
pub struct TrainState {
    /// Gradient sums.
    pub gradients: Accumulator,
    /// Optimiser states.
    pub optimizer: Optimizer,
    /// The copy that a checkpoint is written from while training goes on, if that is asked for.
    pub snapshot: Option<Snapshot>,
    /// Derivative of the loss by each prediction's log-probability.
    pub(super) d_log_prob: Vec<f32>,
}

impl TrainState {
    /// Allocates this rank's gradient sums and optimiser states. `single_micro_batches` as in
    /// [`SumOptions`].
    pub fn new(
        config: &Config,
        decoder: &Arc<Decoder>,
        placement: &MemoryPlacement,
        mesh: &mut DeviceMesh,
        partition: Arc<Partition>,
        single_micro_batches: bool,
    ) -> Result<Self> {
        let (shard, replicas) = mesh.duplicate_reduction_groups()?;
        let has_parts = config.compute.sharded().gradients;
        let (of_parts, of_all) = if has_parts { (Some(shard), None) } else { (None, Some(shard)) };
        let groups = ReductionGroups { of_parts, of_all, replicas };
        let parameters = ParameterGroups::new(&config.train, decoder)?;
        let frozen: Vec<_> =
            decoder.layers().into_iter().map(|layer| parameters.frozen(decoder, layer)).collect();
        let options = SumOptions {
            form: config.compute.reduction,
            wire: config.compute.reduce_dtype,
            single_micro_batches,
        };
        let gradients =
            Accumulator::new(placement, decoder.clone(), partition.clone(), groups, options, frozen)?;
        let home = placement.optimizer(decoder.adapter().is_some());
        let optimizer = Optimizer::new(home, decoder, partition, &config.train, &parameters)?;
        // The last checkpoint is waited for, so a run with only that one needs no copy; except from
        // a GPU, whose memory the host does not read.
        let copies = config.train.async_checkpoints && config.train.save_every.is_some();
        let snapshot = if copies || placement.device.backend() == Backend::Cuda {
            let share = snapshot::CheckpointShard::new(decoder, &config.compute, mesh.share());
            let follows = config.reference.kind == ReferenceKind::Sync;
            Some(Snapshot::new(placement.checkpoint_device(), share, &optimizer, follows)?)
        } else {
            None
        };
        Ok(Self { gradients, optimizer, snapshot, d_log_prob: Vec::new() })
    }
}
