//! The interface of an engine: the transport under a group.

use crate::collective::call::Call;
use crate::collective::element::Reduction;
use crate::error::Result;

/// Messages that may be under way from one rank of a group. One more waits for the oldest to be received.
pub(crate) const MAX_MESSAGES: usize = 64;
/// Their bytes; one message may have more, if it is the only one.
pub(crate) const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Moves bytes between the ranks of one group. What the bytes are is said by the call; lengths have been checked.
///
/// An implementation compares the calls of all ranks and answers [`CommError::Mismatch`] where they differ. After an
/// error the engine is dead: every later call fails.
pub trait Engine: Send {
    /// This rank, from 0.
    fn rank(&self) -> usize;
    /// Number of ranks.
    fn size(&self) -> usize;
    /// In place.
    fn all_reduce(&mut self, call: Call, reduction: Reduction, data: &mut [u8]) -> Result<()>;
    /// In place, in parts of `counts` elements: afterwards this rank's is reduced, the rest is unspecified.
    fn reduce_scatter(
        &mut self,
        call: Call,
        reduction: Reduction,
        data: &mut [u8],
        counts: &[usize],
    ) -> Result<()>;
    /// In place, in parts of `counts` elements: each rank gives its own and gets the others'.
    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()>;
    /// From `root` to all.
    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()>;
    /// Waits for all.
    fn barrier(&mut self, call: Call) -> Result<()>;
    /// Hands a copy to a peer; returns when `data` may be used again. May wait where as many messages or bytes of this rank are
    /// under way as [`Group::send`] says.
    fn send(&mut self, to: usize, data: &[u8]) -> Result<()>;
    /// Waits for what a peer sends next.
    fn recv(&mut self, from: usize, data: &mut [u8]) -> Result<()>;
    /// The group of the ranks that gave the same colour, in the order of their ranks here.
    fn split(&mut self, call: Call, color: usize) -> Result<Box<dyn Engine>>;
    /// As [`Engine::split`], by the colours of all ranks.
    fn split_by(&mut self, call: Call, colors: &[usize]) -> Result<Box<dyn Engine>> {
        self.split(call, colors[self.rank()])
    }
    /// A call without its data, in a dry run. Only a recorder has a use for it.
    fn dry(&mut self, _: Call) -> Result<()> {
        Ok(())
    }
    /// Tells the others that this rank cannot go on; their calls fail with the reason.
    fn abort(&mut self, reason: &str);
    /// Fails if the group has failed, or if another rank can be seen to be gone; waits for nobody.
    fn check(&mut self) -> Result<()>;
    /// Whether numbers may stay in the memory of this process's GPU `ordinal`: then [`Engine::on_device`] takes them there.
    fn takes_device(&self, _ordinal: usize) -> bool {
        false
    }
    /// The same collectives, of numbers in the memory of a GPU.
    ///
    /// # Panics
    /// If the engine knows no GPU.
    fn on_device(&mut self) -> &mut dyn DeviceEngine {
        panic!("an engine that moves host memory alone")
    }
}

/// As [`Engine`], of numbers at an address of a GPU's memory that nothing else uses meanwhile.
pub trait DeviceEngine {
    /// As [`Engine::all_reduce`].
    fn all_reduce(&mut self, call: Call, reduction: Reduction, address: u64) -> Result<()>;
    /// As [`Engine::reduce_scatter`].
    fn reduce_scatter(
        &mut self,
        call: Call,
        reduction: Reduction,
        address: u64,
        counts: &[usize],
    ) -> Result<()>;
    /// As [`Engine::all_gather`].
    fn all_gather(&mut self, call: Call, address: u64, counts: &[usize]) -> Result<()>;
}
