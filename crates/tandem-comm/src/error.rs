//! What can go wrong between ranks.

use std::time::Duration;

use crate::store::StoreError;

/// A collective, or the group it ran in, failed. After any of these but [`CommError::Invalid`] the group is of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// The ranks of a group called different things, or the same thing with different sizes.
    #[error(
        "rank {rank} called {call}, but rank {other_rank} called {other_call}: all ranks of a group must make the same calls in the same order"
    )]
    Mismatch {
        /// A rank.
        rank: usize,
        /// What it called.
        call: String,
        /// The first rank that called something else.
        other_rank: usize,
        /// What that was.
        other_call: String,
    },
    /// A rank ended while others waited for it.
    #[error("rank {rank} is gone: it ended, or its process died")]
    PeerLost {
        /// The rank.
        rank: usize,
    },
    /// Not all ranks came in time.
    #[error("{call}: no word from {} within {} s; they hang, or are slower than the deadline allows", ranks(missing), deadline.as_secs_f64())]
    Deadline {
        /// What was waited in.
        call: String,
        /// Who did not come.
        missing: Vec<usize>,
        /// How long was waited.
        deadline: Duration,
    },
    /// Ranks of which nothing was heard for some time, not even that they live.
    #[error("no sign of life from {} for {} s: stopped, or its machine or network is down", ranks(silent), limit.as_secs_f64())]
    Silent {
        /// Who.
        silent: Vec<usize>,
        /// For how long.
        limit: Duration,
    },
    /// A rank gave up and told the others.
    #[error("rank {rank} gave up: {reason}")]
    Aborted {
        /// The rank.
        rank: usize,
        /// Its own words.
        reason: String,
    },
    /// A device did not give the numbers of a call, or did not take them.
    #[error("{call}: {reason}")]
    Device {
        /// What was called.
        call: String,
        /// What the device says.
        reason: String,
    },
    /// The call makes no sense; nothing was sent.
    #[error("{call}: {reason}")]
    Invalid {
        /// What was called.
        call: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The place at which ranks meet failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The engine cannot work on this machine, or on this network.
    #[error("{reason}")]
    Engine {
        /// Why, and what to do.
        reason: String,
    },
}

/// What this crate's functions return.
pub type Result<T> = std::result::Result<T, CommError>;

fn ranks(missing: &[usize]) -> String {
    let list = missing.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    format!("rank{} {list}", if missing.len() == 1 { "" } else { "s" })
}
