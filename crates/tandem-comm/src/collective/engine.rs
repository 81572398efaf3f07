//! The interface of an engine: the transport under a group.

use std::fmt::Display;

use crate::collective::call::Call;
use crate::error::Result;

/// Maximum number of messages in flight from one rank of a group; the next one waits for the
/// oldest.
pub(crate) const MAX_MESSAGES: usize = 64;
/// Maximum bytes of these messages; a single message may be larger.
pub(crate) const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Transport between the ranks of one group. The call describes the bytes; lengths are checked.
///
/// An implementation compares the calls of all ranks and returns
/// [`CommError::Mismatch`](crate::CommError::Mismatch) where they differ. After an error every
/// later call fails.
pub trait Engine: Send {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn size(&self) -> usize;
    /// Reduces in place.
    fn all_reduce(&mut self, call: Call, data: &mut [u8]) -> Result<()>;
    /// Reduces in place in parts of `counts` elements; only this rank's part is specified
    /// afterwards.
    fn reduce_scatter(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()>;
    /// Gathers in place in parts of `counts` elements: each rank provides its own part.
    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()>;
    /// Sends `data` from `root` to all ranks.
    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()>;
    /// Waits for all.
    fn barrier(&mut self, call: Call) -> Result<()>;
    /// Sends a copy to a peer and returns when `data` may be reused. Blocks at the limits of
    /// [`ProcessGroup::send`](crate::ProcessGroup::send).
    fn send(&mut self, to: usize, data: &[u8]) -> Result<()>;
    /// Receives a peer's next message.
    fn recv(&mut self, from: usize, data: &mut [u8]) -> Result<()>;
    /// Returns the group of the ranks of the same colour, in rank order.
    fn split(&mut self, call: Call, color: usize) -> Result<Box<dyn Engine>>;
    /// [`Engine::split`] by the colours of all ranks.
    fn split_by(&mut self, call: Call, colors: &[usize]) -> Result<Box<dyn Engine>> {
        self.split(call, colors[self.rank()])
    }
    /// Records a call without data, in a dry run.
    fn dry(&mut self, _: Call) -> Result<()> {
        Ok(())
    }
    /// Aborts: the other ranks' calls fail with the reason.
    fn abort(&mut self, reason: &str);
    /// Fails if the group has failed or another rank is gone; does not wait.
    fn check(&mut self) -> Result<()>;
    /// Notes a call whose numbers another engine moves, as this rank's next: it is compared with the
    /// others' by the next call of this engine, at the latest. Need not wait.
    fn note(&mut self, call: Call) -> Result<()> {
        self.barrier(call)
    }
    /// Shows the other ranks that this one waits in a noted call, and compares it with those that they
    /// wait in. Does not wait.
    fn look_around(&mut self, _what: &dyn Display) -> Result<()> {
        self.check()
    }
    /// Fails at the deadline of a noted call if other ranks have not come to it.
    fn at_deadline(&mut self, _what: &dyn Display) -> Result<()> {
        self.check()
    }
    /// Ends a noted call: this rank no longer waits.
    fn end_noted(&mut self) {}
    /// Returns whether all ranks are threads of one process.
    fn is_one_process(&self) -> bool {
        false
    }
    /// Returns whether [`Engine::put`] accepts memory of this process's GPU `ordinal`.
    fn takes_device(&self, _ordinal: usize) -> bool {
        false
    }
    /// Puts a collective or a message on GPU memory into a stream of the GPU, and returns when it is
    /// there. `counts` are the elements of each rank, where there are parts. A failure of the operation
    /// is an error of a later call.
    ///
    /// # Panics
    /// If [`Engine::takes_device`] is never true.
    fn put(&mut self, _call: Call, _range: StreamRange, _counts: &[usize]) -> Result<()> {
        panic!("an engine that moves host memory alone")
    }
    /// Makes one operation of the following calls of [`Engine::put`], if it can.
    fn begin_together(&mut self) {}
    /// Ends [`Engine::begin_together`].
    fn end_together(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Numbers in GPU memory, and the stream whose work writes them before and reads them afterwards.
#[derive(Clone, Copy, Debug)]
pub struct StreamRange {
    /// Address of the first.
    pub address: u64,
    /// The stream, a `CUstream`.
    pub stream: u64,
}
