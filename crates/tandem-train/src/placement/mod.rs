//! Placement of tensors: which device a rank computes on, and which memory holds what.
//!
//! [`gpus`] resolves the devices. [`MemoryPlacement`] has the memories of a rank. `prefetch` and
//! `async_transfer` bring layers to the device while others compute; `offload` copies from host
//! memory or a file.

pub(crate) mod async_transfer;
pub mod gpus;
mod memory;
pub(crate) mod offload;
pub(crate) mod prefetch;

pub use memory::{MemoryPlacement, MemoryRequirements, PassCapacities, check, check_room};
pub use offload::OffloadedStorage;
