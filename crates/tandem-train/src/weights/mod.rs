//! Weights: whole on every rank, sharded or offloaded; those that train and those that are frozen.

mod check;
mod frozen;
mod gather;
pub mod initial_weights;
mod policy;
mod replicated;
mod sharded;
#[cfg(test)]
mod tests;

pub(crate) use check::check_all;
pub use check::check_given;
pub use frozen::{FrozenWeights, Packings};
pub use policy::{Policy, SharedReference, Trained};
pub use replicated::ReplicatedWeights;
pub use sharded::ShardedWeights;
