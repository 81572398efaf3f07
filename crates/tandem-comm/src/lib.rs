//! Launch environments, process groups and their collectives.
//!
//! * `launch/`: [`launch`] reads a launcher's environment: rank, world size and rendezvous.
//! * [`store`]: small values under keys that all processes of a job can read and write.
//! * [`ProcessGroup`]: one rank's membership of a process group, with the collectives of its ranks.
//! * `collective/`: what a collective is: calls, element types, volume, the [`Engine`] interface.
//! * `engines/`: what moves the bytes: [`threads`] for ranks that are threads of one process,
//!   [`tcp`] and [`mpi`] for processes, [`nccl`] for GPUs over any of them, [`recorder`] for dry
//!   runs.
//! * `health/`: heartbeats, watchdog, progress and the record of the first failure.

#![warn(unreachable_pub)]

// Engines share the conformance tests, which name the crate as its users do.
#[cfg(test)]
extern crate self as tandem_comm;

mod collective;
mod engines;
mod error;
mod group;
mod health;
pub mod launch;
pub mod store;

pub use collective::call::{Call, Operation};
pub use collective::element::{CollectiveBuffer, DeviceNumbers, Element, ElementKind, Reduction};
pub use collective::engine::{Engine, StreamRange};
pub use collective::observer::CollectiveObserver;
pub use collective::volume::Volume;
pub use engines::{mpi, nccl, recorder, tcp, threads};
pub use error::{CommError, Result};
pub use group::ProcessGroup;
pub use health::abort_flag::AbortFlag;
pub use health::progress::{Phase, Place, Progress};
pub use health::watchdog;
pub use launch::open_files;
pub use launch::processes;
pub use launch::{Environment, Launch, LaunchError, Launcher, LocalRanks, RendezvousEndpoint};
