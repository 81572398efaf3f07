//! File descriptor limit: every rank has a connection to every other rank in each of its groups.

use std::fmt;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{CommError, Result};

/// Groups of all ranks that a rank may be in: the job's and its splits. On a mesh there are more
/// groups of fewer ranks, with no more connections in total.
const WHOLE_GROUPS: u64 = 4;
/// Maximum number of groups: five more for the axes of the mesh.
const GROUPS: u64 = WHOLE_GROUPS + 5;
/// Descriptors of a group beside its connections: listener, poller, client of the store.
const PER_GROUP: u64 = 4;
/// Descriptors of the store per client.
const PER_CLIENT: u64 = 3;
/// Store clients per rank: one per group, and those of heartbeat, failure report and reachability
/// check.
const CLIENTS: u64 = GROUPS + 3;
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
    let of_rank = if is_rank { WHOLE_GROUPS * ranks + GROUPS * PER_GROUP } else { 0 };
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
