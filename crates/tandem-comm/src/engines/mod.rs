//! Engines: transports of a group's collectives.

mod buffer_pool;
pub mod mpi;
pub mod nccl;
pub mod recorder;
pub mod tcp;
pub mod threads;
