//! How a process finds its peers, and how ranks exchange numbers.
//!
//! [`launch`] answers the first question, "which rank am I, of how many, and where do we meet?", from the
//! variables that launchers set. It reads a map that it is given and touches nothing else, so every launcher's
//! environment is a row of a table in the tests.
//!
//! A [`store`] is the place where the processes of several machines meet: small values under keys that all of them can read.
//!
//! A [`Group`] is one rank's membership of a set of ranks, with the collectives that they call together. What moves the
//! bytes is an engine: [`threads`] for ranks that are threads of one process, [`recorder`] for dry runs, with the feature
//! `gloo` the module of that name for ranks that are processes, and over any of them [`nccl`] for ranks on GPUs.

// The tests that engines share name the crate as its users do.
#[cfg(test)]
extern crate self as tandem_comm;

#[cfg(feature = "gloo")]
mod beat;
mod call;
mod element;
mod error;
#[cfg(feature = "gloo")]
pub mod gloo;
mod group;
pub mod launch;
pub mod nccl;
pub mod open_files;
#[cfg(feature = "gloo")]
pub mod processes;
mod progress;
pub mod recorder;
mod spare;
pub mod store;
pub mod threads;
#[cfg(feature = "gloo")]
pub mod vigil;
mod volume;
mod watch;

pub use call::{Call, Operation};
pub use element::{DeviceNumbers, Element, ElementKind, Numbers, Reduction};
pub use error::{CommError, Result};
pub use group::{DeviceEngine, Engine, Group};
pub use launch::{Environment, Launch, LaunchError, Launcher, MeetingPoint, RanksHere};
pub use progress::{Phase, Place, Progress};
pub use volume::Volume;
pub use watch::Watch;
