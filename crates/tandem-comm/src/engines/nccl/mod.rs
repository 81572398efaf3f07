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
//! after a second shows its call to the others. Messages of host memory also use the control:
//! NCCL's wait for their receiver.
//!
//! *GPU memory.* An operation is put into the stream that writes the numbers before and reads them
//! afterwards, so the stream alone keeps their order. A call returns when the operation is in the
//! stream: the host runs ahead of the GPU. Events before and after it tell a thread of the group how
//! far the stream is. While operations are in flight the thread looks after them: for lost ranks, for
//! errors of NCCL, and for the deadline, which counts from where the stream comes to the operation.
//! Several calls can be one operation ([`ProcessGroup::together`]).
//!
//! *Host memory.* Host buffers travel through a buffer in GPU memory and a stream of the group; a call
//! returns when it is done. The buffer grows to the largest, and nothing is freed before the group
//! ends: CUDA frees memory when the GPU is idle.
//!
//! *Parts.* Equal parts are one operation, and what the last rank has beyond them another. Parts that
//! differ otherwise are a group of broadcasts or reductions.
//!
//! *Division.* `ncclCommSplit` divides a communicator in which nothing is in flight. No id is sent.
//!
//! *Failures.* A communicator never blocks: a call starts an operation, and the rank polls until it
//! is in its stream or done, checking the control from time to time. The rank gives up if the control
//! or NCCL fails, or at the deadline: it aborts NCCL, and through the control all ranks report the
//! same error. If NCCL fails, the control gets a moment to find a lost rank. An abort may wait for NCCL
//! and the GPU, so it has a thread, which the rank waits for for two seconds at most.
//! `NCCL_COMM_BLOCKING=1` in the environment would disable all this.
//!
//! An abort lets a stream go on without the result, and a host that waits for the stream as well. So the
//! failure is kept before: from then on every call fails, of this group and of all that were divided
//! from the same one. Nothing that was computed without the result leaves the rank.
//!
//! *Sums* of floats are in NCCL's order: the same bits on every rank, but not those of another
//! engine.

mod communicator;
mod engine;
#[cfg(test)]
mod fake;
mod gpu;
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
