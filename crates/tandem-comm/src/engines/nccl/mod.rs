//! Ranks on GPUs of NVIDIA's: collectives over NCCL.
//!
//! Nothing of NVIDIA's is needed to build this or to start: [`Libraries::open`] looks for `libnccl.so.2` and `libcuda.so.1`, and says
//! what is missing. So far nothing here has run on a GPU; its tests run it on stand-ins for both libraries.
//!
//! *Two planes.* NCCL moves numbers, and knows nothing else: ranks that call different things hang, and so do those of which one
//! has died. So a group is one of another engine's, the *control*, which NCCL carries the numbers for. Before each collective all
//! ranks come to the control's barrier with their call; it finds out who does not come, who is gone and who calls something
//! else, as it does for itself. Messages between two ranks stay with the control: NCCL's wait for their receiver.
//!
//! *Host memory.* Buffers are in the host's memory and travel through a buffer in the GPU's, which grows to the largest. Parts
//! of one length are one operation; parts that differ are a broadcast or a reduction each, all at once.
//!
//! *Failures.* A communicator never blocks: what is called begins, and the rank asks until it is done, looking at the control
//! from time to time. It gives up when the control has failed, when NCCL says that it has, or at the deadline; it aborts NCCL, and
//! through the control all ranks say the same. Where NCCL fails the control gets a moment to find out that a rank is gone.
//! `NCCL_COMM_BLOCKING=1` in the environment would undo all this.
//!
//! *Sums* of floats are in NCCL's order: the same bits on every rank, but not those of another engine.

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
use crate::group::Group;

impl Libraries {
    /// A group of the same ranks as `control`, each on a GPU, that moves numbers by NCCL. All of them call this, each with the number
    /// of its GPU; without one, the first rank of a machine gets its first GPU, and so on; a process that sees one GPU alone gets that.
    ///
    /// # Errors
    /// If there are fewer GPUs than ranks on a machine, NCCL does not come to life within `deadline`, or another rank fails.
    pub fn group(&self, control: Group, ordinal: Option<usize>, deadline: Duration) -> Result<Group> {
        control.carried_by(|control| Ok(Box::new(engine::Nccl::meet(control, self, ordinal, deadline)?)))
    }

    /// GPUs that this process may use.
    ///
    /// # Errors
    /// If CUDA's driver cannot tell.
    pub fn num_devices(&self) -> Result<usize> {
        self.0.num_devices().map_err(|reason| crate::CommError::Engine { reason })
    }
}
