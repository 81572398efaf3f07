//! Engine for ranks that are processes, on one machine or several, over TCP and shared memory.
//!
//! Ranks meet in a [`Store`]: each publishes its address there. A connection is made when a call
//! first needs it, and carries one group's bytes from one rank to another. A group of `N` ranks
//! needs at most `⌈log₂ N⌉` connections to each rank and as many from it. Ranks of one host connect
//! through a Unix socket, and bytes of collectives go through shared memory: see [`buffer_bytes`].
//!
//! *Threads.* The thread that makes a call moves its bytes, on sockets that do not block. One thread
//! per process polls the sockets of all groups: it accepts connections, notices lost ones, and sends
//! messages that wait.
//!
//! *Same calls.* Each rank chains a hash of its calls. The first frame that a call sends through a
//! connection carries the chain, and the receiver compares it before it takes any byte. If chains
//! differ, all ranks report their last calls to the store, and the first that differs is named. A
//! rank that waits for a second shows its chain to the next rank without being asked.
//!
//! *Failures.* The first rank that fails files the reason in the store and closes its connections.
//! Its neighbours notice at once, whatever they do, read the store, and close theirs. A process that
//! hangs, or a vanished machine, is noticed at the deadline: each rank that waits says so in the
//! store, and the others hang. A group and its splits fail independently, unless the rank's
//! [`AbortFlag`] is cut.
//!
//! *Strangers.* A connection begins with a token that the store hands out. Without it a connection
//! is closed. Bytes are not encrypted.
//!
//! *Network.* A rank listens at the address from which it reaches the store. If the others cannot
//! reach that address, `TANDEM_SOCKET_IFNAME` (or PyTorch's `GLOO_SOCKET_IFNAME`) names the network
//! interface or the address.

mod address_book;
mod collectives;
mod engine;
mod flow;
mod handshake;
mod header;
mod interface;
mod link;
mod mail;
mod member;
mod memory;
mod node;
mod post;
mod rendezvous;
mod schedule;
mod socket;
mod wire;

pub use crate::health::abort_flag::AbortFlag;

use std::sync::Arc;
use std::time::Duration;

use crate::collective::call::fnv1a;
use crate::error::{CommError, Result};
use crate::group::ProcessGroup;
use crate::health::failure;
use crate::launch::meeting::Meeting;
use crate::store::Store;

use interface::{GLOO_INTERFACE, INTERFACE};

/// Bytes of shared memory from a rank to the next of the ring.
const RING_BYTES: usize = 1 << 20;
/// Bytes of shared memory from a rank to one that only short rounds send to.
const SMALL_RING_BYTES: usize = 64 << 10;

/// Settings of a rank's connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Network interface, or address of this machine, to listen at. By default the address from
    /// which the rank reaches the store.
    pub interface: Option<String>,
    /// Whether ranks of one host use shared memory and Unix sockets; otherwise TCP.
    pub same_host: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { interface: None, same_host: true }
    }
}

impl Options {
    /// Reads `TANDEM_SOCKET_IFNAME`, else `GLOO_SOCKET_IFNAME`, and `TANDEM_SHARED_MEMORY` (0: TCP
    /// also between ranks of one host).
    pub fn from_environment() -> Self {
        let set = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        Self {
            interface: set(INTERFACE).or_else(|| set(GLOO_INTERFACE)),
            same_host: set("TANDEM_SHARED_MEMORY").is_none_or(|value| value != "0"),
        }
    }
}

/// Creates the group of `size` processes that meet in `store`, as rank `rank`. Returns when all
/// have arrived.
///
/// A call in which a rank waits longer than `deadline` for another fails. The store's prefix must
/// belong to this group alone: `store.prefixed("attempt-3/")` for the fourth attempt of a job.
///
/// Dropping the group waits, at most `deadline`, until messages are handed to the network.
///
/// # Errors
/// If a rank does not arrive within `deadline`, dies, or already used the same prefix; if this
/// rank's address is unavailable.
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
    let mut meeting = Meeting::silent(deadline);
    group_with(store, (rank, size), &mut meeting, deadline, abort_flag, &Options::from_environment())
}

/// [`group`] with a deadline of the meeting's own, and settings that are not the environment's.
///
/// # Errors
/// As [`group`].
///
/// # Panics
/// As [`group`].
pub fn group_with(
    store: Store,
    (rank, size): (usize, usize),
    meeting: &mut Meeting<'_>,
    deadline: Duration,
    abort_flag: AbortFlag,
    options: &Options,
) -> Result<ProcessGroup> {
    assert!(rank < size, "there is no rank {rank} in a group of {size}");
    let node = rendezvous::meet(&store, rank, size, meeting, options).map_err(|error| match error {
        // A surplus process must not break the others' group.
        CommError::Invalid { .. } => error,
        // The others learn that this rank will not come; it ends as the signal says.
        CommError::Stopped { .. } => {
            failure::report(&store, rank, error.clone());
            error
        }
        error => failure::report(&store, rank, error),
    })?;
    let members = (0..size).collect();
    let member = member::Member::new(store, String::new(), rank, members, deadline, abort_flag)?;
    Ok(ProcessGroup::new(Box::new(engine::Tcp::new(Arc::new(node), member))))
}

/// Returns the most bytes of buffers that a rank needs for a group of `size` ranks, beside those of
/// its calls and of messages: shared memory to ranks of the same host, elements that arrive through
/// sockets, and the buffers of a small reduction.
pub fn buffer_bytes(size: usize) -> u64 {
    if size <= 1 {
        return 0;
    }
    let num_links = size.next_power_of_two().trailing_zeros() as usize;
    let shared = RING_BYTES + (num_links - 1) * SMALL_RING_BYTES + num_links * 4096;
    (shared + flow::PIECE + collectives::GATHERED_BYTES + 8 * size) as u64
}

/// Reason for which a call ends.
enum Fault {
    /// A rank has left, or its connection has ended.
    Gone(usize),
    /// A rank moves nothing for a deadline.
    Late(usize),
    /// The group or the job has failed.
    Over,
    /// Another rank makes another call.
    Different,
    Other(CommError),
}

/// Number of the group with a path.
fn group_id(path: &str) -> u64 {
    fnv1a(path.bytes().map(u64::from))
}
