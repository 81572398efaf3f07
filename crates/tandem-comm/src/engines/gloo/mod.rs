//! Ranks as processes, on one machine or several: collectives over Gloo's TCP transport.
//!
//! Needs the feature `gloo`, a C++ compiler, and Gloo (Debian: `libgloo-dev`).
//!
//! Ranks meet in a [`Store`]: each leaves there where its connections listen, and connects to all others. From then on bytes
//! go from rank to rank; the store is asked again only when something went wrong, when a group divides, and when it ends.
//!
//! *Same calls.* Before each collective every rank sends a fingerprint of its call to the first, which hears them all and
//! answers; so a rank that calls something else, one that has died and one that does not come are known by name before data
//! moves. That is the price of a barrier, some 0.1 ms.
//!
//! *Failures.* The first rank that fails files why in the store and closes its connections; the others find them closed, look
//! there, and return the same error. A killed process closes its connections without filing anything: its peers find out at
//! once. A process that hangs, and a machine that vanishes, are found out at the deadline or some seconds later; where it is the
//! first rank, at twice the deadline. If the store itself dies, each rank says what it sees: a closed connection.
//! A group and those that it divided into fail apart from each other, unless the rank's [`Lifeline`] is cut: then nobody waits
//! in any of them.
//!
//! *Network.* A rank listens at the address from which it reaches the store. Where that is not the one at which the others can
//! reach it, `GLOO_SOCKET_IFNAME` names the network interface, as for PyTorch.

mod call_check;
mod engine;
mod mesh;
mod rendezvous;
mod ring;

pub use crate::health::abort_flag::Lifeline;

use std::time::Duration;

use crate::error::Result;
use crate::group::Group;
use crate::store::Store;

/// The group of `size` processes that meet in `store`, as rank `rank` of it. Returns when all have come.
///
/// A call in which a rank waits longer than `deadline` for another fails. The store's prefix must be this group's alone:
/// `store.prefixed("attempt-3/")` for the fourth attempt of a job.
///
/// Dropping the group waits, at most `deadline`, until messages that were sent have been received, and shortly for the other
/// ranks to be done too.
///
/// # Errors
/// If a rank does not come within `deadline`, dies meanwhile, or was here before under the same prefix; if the address at
/// which this rank would listen cannot be had, or the others cannot reach it.
///
/// # Panics
/// If there is no rank `rank` among `size`.
pub fn group(
    store: Store,
    rank: usize,
    size: usize,
    deadline: Duration,
    lifeline: Lifeline,
) -> Result<Group> {
    assert!(rank < size, "there is no rank {rank} in a group of {size}");
    let members = (0..size).collect();
    Ok(Group::new(Box::new(engine::Gloo::meet(store, String::new(), rank, members, deadline, lifeline)?)))
}
