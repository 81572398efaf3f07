//! File descriptor limit: ranks are connected in each of their groups.

use std::fmt;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{CommError, Result};

/// Maximum number of groups: the job's, its splits, and five for the axes of the mesh.
const GROUPS: u64 = 9;
/// Descriptors of a group beside its connections: those that wake its calls.
const PER_GROUP: u64 = 2;
/// Connections with a neighbour of the mesh for messages, one in each direction.
const MESSAGES: u64 = 4;
/// Descriptors of a process of a rank: listeners, the poll thread's, clients of the store.
const PER_PROCESS: u64 = 8;
/// Descriptors of the store per client.
const PER_CLIENT: u64 = 3;
/// Store clients per rank: the groups', and those of heartbeat, failure report and reachability
/// check.
const CLIENTS: u64 = 4;
/// Data, checkpoints, inherited descriptors.
const FILES: u64 = 128;

/// A limit of open files that was raised for the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdLimit {
    /// The limit before.
    pub from: u64,
    /// The limit now.
    pub to: u64,
    /// Number of ranks that it allows.
    pub num_ranks: usize,
}

impl fmt::Display for FdLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, num_ranks } = self;
        write!(f, "raised this process's limit of open files from {from} to {to}, for {num_ranks} ranks")
    }
}

/// Returns the descriptors that a rank of `num_ranks`, or the store's process, or both in one may
/// need.
pub fn needed(num_ranks: usize, is_rank: bool, serves: bool) -> u64 {
    let ranks = num_ranks as u64;
    // Connections to as many ranks as a group has rounds, and from as many.
    let rounds = u64::from(ranks.next_power_of_two().trailing_zeros());
    let of_group = PER_GROUP + MESSAGES + 2 * rounds;
    let of_rank = if is_rank { GROUPS * of_group + PER_PROCESS } else { 0 };
    let of_store = if serves { ranks * CLIENTS * PER_CLIENT } else { 0 };
    FILES + of_rank + of_store
}

/// Raises the soft limit of open files to `needed` if it is lower.
pub fn suffice(needed: u64, num_ranks: usize) -> Result<Option<FdLimit>> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // `None` is no limit.
    let Some(from) = current.filter(|&current| current < needed) else { return Ok(None) };
    let refused = |why: String| CommError::Engine {
        reason: format!(
            "{num_ranks} ranks need {needed} open files in this process, and {why}: raise it (`ulimit -n {needed}`, \
             LimitNOFILE, or the container's) and start again"
        ),
    };
    if let Some(maximum) = maximum.filter(|&maximum| maximum < needed) {
        return Err(refused(format!("the hard limit is {maximum}")));
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum })
        .map_err(|error| refused(format!("the limit of {from} cannot be raised ({error})")))?;
    Ok(Some(FdLimit { from, to: needed, num_ranks }))
}
