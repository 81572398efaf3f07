//! Engines: transports of a group's collectives.

mod buffer_pool;
#[cfg(feature = "gloo")]
pub mod gloo;
pub mod mpi;
pub mod nccl;
pub mod recorder;
pub mod tcp;
pub mod threads;
