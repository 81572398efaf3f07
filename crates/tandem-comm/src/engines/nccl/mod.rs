//! Engine for ranks on NVIDIA GPUs, over NCCL.
//!
//! Neither building nor starting needs NVIDIA's libraries: [`Libraries::open`] looks for
//! `libnccl.so.2` and `libcuda.so.1` and reports a missing one. This engine has not run on a GPU
//! yet; its tests use fakes of both libraries.
//!
//! *Two planes.* NCCL moves numbers only: ranks that make different calls, or of which one has
//! died, hang. A group therefore keeps another engine as its *control*, which notes each call and
//! sends nothing for it: the hash of all calls goes out with its next message. That is a barrier at
//! every 32nd call at the latest. A rank that waits for NCCL asks the control for lost ranks, and
//! after a second shows its call to the others. Messages between two ranks also use the control:
//! NCCL's wait for their receiver.
//!
//! *Host memory.* Host buffers travel through a buffer in GPU memory, which grows to the largest.
//! Equal parts are one operation; unequal parts are a group of broadcasts or reductions.
//!
//! *Failures.* A communicator never blocks: a call starts an operation, and the rank polls until it
//! is done, checking the control from time to time. The rank gives up if the control or NCCL fails,
//! or at the deadline: it aborts NCCL, and through the control all ranks report the same error. If
//! NCCL fails, the control gets a moment to find a lost rank. `NCCL_COMM_BLOCKING=1` in the
//! environment would disable all this.
//!
//! *Sums* of floats are in NCCL's order: the same bits on every rank, but not those of another
//! engine.

mod communicator;
mod engine;
#[cfg(test)]
mod fake;
mod libraries;
mod raw;
mod staging;
#[cfg(test)]
mod tests;

pub use libraries::Libraries;

use std::time::Duration;

use crate::error::Result;
use crate::group::ProcessGroup;

impl Libraries {
    /// Creates a group of the ranks of `control`, each on a GPU, with collectives over NCCL. All
    /// ranks call this with their GPU's ordinal. By default the first rank of a machine gets its
    /// first GPU, and so on; a process that sees a single GPU uses it.
    pub fn group(
        &self,
        control: ProcessGroup,
        ordinal: Option<usize>,
        deadline: Duration,
    ) -> Result<ProcessGroup> {
        control.carried_by(|control| Ok(Box::new(engine::Nccl::meet(control, self, ordinal, deadline)?)))
    }

    /// Returns the number of GPUs that this process may use.
    pub fn num_devices(&self) -> Result<usize> {
        self.0.num_devices().map_err(|reason| crate::CommError::Engine { reason })
    }
}
