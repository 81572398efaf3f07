//! Enough file descriptors: every rank is connected to every other, once for each group that it is in.

use std::fmt;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{CommError, Result};

/// Groups of all ranks that a rank may be in: the job's, and those that split off from it. Where ranks are a grid, these are
/// more groups of fewer ranks, no more together.
const WHOLE_GROUPS: u64 = 4;
/// The most groups: those of the grid's five axes are more.
const GROUPS: u64 = WHOLE_GROUPS + 5;
/// Descriptors of a group beside its connections: where it listens, what it polls with, and its client of the store.
const PER_GROUP: u64 = 4;
/// Descriptors of the store for one of its clients.
const PER_CLIENT: u64 = 3;
/// Clients of the store in a rank: one a group, one that beats, one that tells the story, one that looks whether it is there.
const CLIENTS: u64 = GROUPS + 3;
/// Data, checkpoints, what the process was born with.
const FILES: u64 = 128;

/// The limit was too low for the job and is not any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raised {
    /// The limit before.
    pub from: u64,
    /// The limit now.
    pub to: u64,
    /// Ranks that it is for.
    pub num_ranks: usize,
}

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { from, to, num_ranks } = self;
        write!(f, "raised this process's limit of open files from {from} to {to}, for {num_ranks} ranks")
    }
}

/// Descriptors that a rank of `num_ranks` may need, or a process that serves the store to them, or both.
pub fn needed(num_ranks: usize, is_rank: bool, serves: bool) -> u64 {
    let ranks = num_ranks as u64;
    let of_rank = if is_rank { WHOLE_GROUPS * ranks + GROUPS * PER_GROUP } else { 0 };
    let of_store = if serves { ranks * CLIENTS * PER_CLIENT } else { 0 };
    FILES + of_rank + of_store
}

/// Raises the soft limit of open files to `needed` if it is lower.
///
/// # Errors
/// If the hard limit is lower too.
pub fn suffice(needed: u64, num_ranks: usize) -> Result<Option<Raised>> {
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
    Ok(Some(Raised { from, to: needed, num_ranks }))
}
