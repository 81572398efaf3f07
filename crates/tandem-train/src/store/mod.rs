//! Where weights and gradients live, and which part of them is whose.

mod away;
mod courier;
mod frozen;
mod gradients;
mod partition;
mod policy;
mod reducer;
mod sharded;
mod slots;
mod weights;

pub use away::Away;
pub use frozen::{FrozenWeights, Packings};
pub use gradients::Accumulator;
pub use partition::Partition;
pub use policy::{Policy, SharedReference, Trained};
pub use sharded::ShardedWeights;
pub use weights::ReplicatedWeights;

#[cfg(test)]
mod tests;
