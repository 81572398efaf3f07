//! What a checkpoint holds of a run, where it lies.

use tandem_kernels::{Device, Tensor};
use tandem_model::FlatWeights;

use crate::optimizer::Optimizer;
use crate::parallel::Partition;
use crate::reference::Reference;
use crate::weights::{Policy, ReplicatedWeights};

/// What a checkpoint holds of a run.
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
    /// What it holds of each layer.
    pub weights: &'a FlatWeights,
    /// Whose part that is.
    pub partition: &'a Partition,
    /// Where they lie, and what works on them there.
    pub home: &'a Device,
}

impl<'a> MasterWeights<'a> {
    fn of(policy: &'a Policy) -> Self {
        let (weights, partition) = policy.masters();
        Self { weights, partition, home: policy.home() }
    }

    fn of_adapter(adapter: &'a ReplicatedWeights) -> Self {
        Self { weights: adapter.masters(), partition: adapter.partition(), home: adapter.device() }
    }
}

impl<'a> CheckpointState<'a> {
    /// Of a run.
    pub fn of(policy: &'a Policy, reference: &'a Reference, optimizer: &'a Optimizer) -> Self {
        let follower = match reference {
            Reference::Followed(weights) => Some(MasterWeights::of(weights)),
            _ => policy.follower().map(MasterWeights::of_adapter),
        };
        Self { policy: MasterWeights::of(policy), optimizer, follower }
    }

    /// Tells that it is not needed for now: what lies in a file leaves this process's memory.
    pub fn let_go(&self) {
        self.optimizer.let_go();
        let masters = [self.policy].into_iter().chain(self.follower);
        masters.flat_map(|masters| &masters.weights.layers).for_each(Tensor::let_go);
    }
}
