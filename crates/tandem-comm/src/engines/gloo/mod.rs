//! Engine for ranks that are processes, on one machine or several, over Gloo's TCP transport.
//!
//! Needs the feature `gloo`, a C++ compiler, and Gloo (Debian: `libgloo-dev`).
//!
//! Ranks meet in a [`Store`]: each publishes its address there and connects to all others. Bytes
//! then travel from rank to rank; the store is used again only after failures, for splitting a
//! group, and at its end.
//!
//! *Same calls.* Before each collective every rank sends its call's fingerprint to rank 0, which
//! replies to all. A rank that makes another call, is dead or does not arrive is known by name
//! before data moves. This costs a barrier, about 0.1 ms.
//!
//! *Failures.* The first rank that fails files the reason in the store and closes its connections.
//! The others find them closed, read the store and return the same error. A killed process closes
//! its connections without a record: its peers notice at once. A process that hangs, or a vanished
//! machine, is noticed at the deadline or some seconds later; if it is rank 0, at twice the
//! deadline. If the store itself is lost, each rank reports a closed connection. A group and its
//! splits fail independently, unless the rank's [`AbortFlag`] is cut, which ends the waits in all of
//! them.
//!
//! *Network.* A rank listens at the address from which it reaches the store. If the others cannot
//! reach that address, `GLOO_SOCKET_IFNAME` names the network interface, as for PyTorch.

mod call_check;
mod engine;
mod mesh;
mod rendezvous;
mod ring;

pub use crate::health::abort_flag::AbortFlag;

use std::time::Duration;

use crate::error::Result;
use crate::group::ProcessGroup;
use crate::store::Store;

/// Creates the group of `size` processes that meet in `store`, as rank `rank`. Returns when all
/// have arrived.
///
/// A call in which a rank waits longer than `deadline` for another fails. The store's prefix must
/// belong to this group alone: `store.prefixed("attempt-3/")` for the fourth attempt of a job.
///
/// Dropping the group waits, at most `deadline`, until sent messages are received, and briefly for
/// the other ranks to finish.
///
/// # Errors
/// If a rank does not arrive within `deadline`, dies, or already used the same prefix; if this
/// rank's address is unavailable or unreachable for the others.
///
/// # Panics
/// If `rank` is not below `size`.
pub fn group(
    store: Store,
    rank: usize,
    size: usize,
    deadline: Duration,
    abort_flag: AbortFlag,
) -> Result<ProcessGroup> {
    assert!(rank < size, "there is no rank {rank} in a group of {size}");
    let members = (0..size).collect();
    Ok(ProcessGroup::new(Box::new(engine::Gloo::meet(
        store,
        String::new(),
        rank,
        members,
        deadline,
        abort_flag,
    )?)))
}
