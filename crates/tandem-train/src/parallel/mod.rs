//! Parallelism of a run: which ranks hold the same weights, which hold shards, slices or stages of
//! them, and what travels.
//!
//! [`mesh`] divides the ranks into process groups. [`Partition`] says which part of a layer a rank
//! owns. `stages` carries the residual stream between pipeline stages, on GPUs over `links`; `pipeline` is the order
//! of their micro-batches. `tensor_group` sums over the slices. [`collective_buffer`] hands device memory to collectives.

pub mod collective_buffer;
mod links;
pub mod mesh;
mod partition;
pub(crate) mod pipeline;
pub(crate) mod stages;
mod tensor_group;

pub use mesh::DeviceMesh;
pub use partition::Partition;
pub use stages::{PipelineGroup, StagedExecutor};
