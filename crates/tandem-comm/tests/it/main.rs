//! Launch environments, the store, and collectives: on threads, over MPI, and with the feature `gloo` on
//! processes.

mod conformance;
#[cfg(feature = "gloo")]
mod gloo;
mod launch;
mod mpi;
#[cfg(feature = "gloo")]
mod nccl;
#[cfg(feature = "gloo")]
mod processes;
mod store;
mod threads;
#[cfg(feature = "gloo")]
mod watchdog;
