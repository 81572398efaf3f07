//! Where weights and gradients live, and which part of them is whose.

mod gradients;
mod partition;
mod weights;

pub use gradients::{Accumulator, SumForm};
pub use partition::{Partition, Sharding};
pub use weights::{FrozenWeights, ReplicatedWeights};
