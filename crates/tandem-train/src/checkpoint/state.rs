//! View of a run's state for checkpoints.

use tandem_kernels::{Device, Tensor};
use tandem_model::FlatWeights;

use crate::optimizer::Optimizer;
use crate::parallel::Partition;
use crate::reference::Reference;
use crate::weights::{Policy, ReplicatedWeights};

/// State of a run in a checkpoint.
#[derive(Clone, Copy)]
pub struct CheckpointState<'a> {
    /// The weights that train.
    pub policy: MasterWeights<'a>,
    /// The optimiser's states.
    pub optimizer: &'a Optimizer,
    /// The weights of a reference that follows the policy.
    pub follower: Option<MasterWeights<'a>>,
}

/// Masters that a rank holds.
#[derive(Clone, Copy)]
pub struct MasterWeights<'a> {
    /// Held part per layer.
    pub weights: &'a FlatWeights,
    /// Partition of that part.
    pub partition: &'a Partition,
    /// Device that holds and updates them.
    pub home: &'a Device,
}

impl<'a> MasterWeights<'a> {
    fn new(policy: &'a Policy) -> Self {
        let (weights, partition) = policy.masters();
        Self { weights, partition, home: policy.home() }
    }

    fn for_adapter(adapter: &'a ReplicatedWeights) -> Self {
        Self { weights: adapter.masters(), partition: adapter.partition(), home: adapter.device() }
    }
}

impl<'a> CheckpointState<'a> {
    /// Creates it for a run.
    pub fn new(policy: &'a Policy, reference: &'a Reference, optimizer: &'a Optimizer) -> Self {
        let follower = match reference {
            Reference::Followed(weights) => Some(MasterWeights::new(weights)),
            _ => policy.ema_reference().map(MasterWeights::for_adapter),
        };
        Self { policy: MasterWeights::new(policy), optimizer, follower }
    }

    /// Evicts file-backed pages from memory.
    pub fn evict_pages(&self) {
        self.optimizer.evict_pages();
        let masters = [self.policy].into_iter().chain(self.follower);
        masters.flat_map(|masters| &masters.weights.layers).for_each(Tensor::evict_pages);
    }
}
