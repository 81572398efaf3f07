//! Someone who is told how long the calls of a group take.

use std::time::Instant;

use crate::collective::call::Call;

/// Told of every call of a group when it is over, by the thread that made it. The group's parts tell the same one.
pub trait Watch: Send + Sync {
    /// A call among so many ranks, which began then and ends now.
    fn called(&self, call: &Call, num_ranks: usize, began: Instant);
}
