//! Errors between ranks.

use std::time::Duration;

use crate::store::StoreError;

/// A failure of a collective or its group. After any but [`CommError::Invalid`] the group is
/// unusable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "fields are explained by the messages that print them")]
pub enum CommError {
    /// Ranks of a group made different calls, or calls of different sizes.
    #[error(
        "rank {rank} called {call}, but rank {other_rank} called {other_call}: all ranks of a group must make the same calls in the same order"
    )]
    Mismatch {
        rank: usize,
        call: String,
        /// The first rank with a different call.
        other_rank: usize,
        other_call: String,
    },
    /// A rank ended while others waited for it.
    #[error("rank {rank} is gone: it ended, or its process died")]
    PeerLost { rank: usize },
    /// Ranks that missed the deadline of a call.
    #[error("{call}: no response from {} within {} s: hanging, or slower than the deadline allows", ranks(missing), deadline.as_secs_f64())]
    Deadline { call: String, missing: Vec<usize>, deadline: Duration },
    /// Ranks without a heartbeat.
    #[error("no sign of life from {} for {} s: stopped, or its machine or network is down", ranks(silent), limit.as_secs_f64())]
    Silent { silent: Vec<usize>, limit: Duration },
    /// A rank aborted and told the others.
    #[error("rank {rank} gave up: {reason}")]
    Aborted { rank: usize, reason: String },
    /// A signal that ended the wait for the other ranks.
    #[error("stopped by a signal while it waited for {awaited}")]
    Stopped { awaited: String },
    /// A device that could not read or write the numbers of a call.
    #[error("{call}: {reason}")]
    Device { call: String, reason: String },
    /// An invalid call; nothing was sent.
    #[error("{call}: {reason}")]
    Invalid { call: String, reason: String },
    /// A failure of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An engine that cannot work on this machine or network.
    #[error("{reason}")]
    Engine { reason: String },
}

/// Result of this crate's functions.
pub type Result<T> = std::result::Result<T, CommError>;

/// Names ranks in words.
pub(crate) fn ranks(missing: &[usize]) -> String {
    let list = missing.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    format!("rank{} {list}", if missing.len() == 1 { "" } else { "s" })
}
