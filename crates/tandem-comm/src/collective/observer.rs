//! Observer of a group's calls and their durations.

use std::time::Instant;

use crate::collective::call::Call;

/// Observer of every completed call of a group and its subgroups, on the thread that made the call.
pub trait CollectiveObserver: Send + Sync {
    /// Called when a call among `num_ranks`, begun at `began`, ends.
    fn called(&self, call: &Call, num_ranks: usize, began: Instant);
}
