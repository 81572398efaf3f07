//! Where weights and gradients live, and which part of them is whose.

mod courier;
mod gradients;
mod partition;
mod policy;
mod reducer;
mod sharded;
mod weights;

pub use gradients::{Accumulator, SumForm};
pub use partition::{Partition, Sharding};
pub use policy::{Policy, SharedReference, Trained};
pub use sharded::ShardedWeights;
pub(crate) use sharded::lost;
pub use weights::{FrozenWeights, ReplicatedWeights};

#[cfg(test)]
mod tests;
