//! Verdict on ranks that made different calls: each reports its last calls in the store, and the
//! first to come compares those of all.

use std::time::Duration;

use super::failure;
use crate::collective::call_chain::{Difference, END, first_difference};
use crate::error::CommError;
use crate::store::{Store, StoreError};

/// Time for all ranks to report their calls.
const REPORTS: Duration = Duration::from_secs(5);
/// Time for the rank that compares them.
const COMPARISON: Duration = Duration::from_secs(10);
/// Timeout of requests that need no waiting.
const PATIENCE: Duration = Duration::from_secs(2);
/// Key of the rank that compares the calls of all.
const COMPARER: &str = "comparer";

/// Writes a rank's last calls into its group's store.
pub(crate) fn tell(store: &Store, rank: usize, report: &str) -> Result<(), StoreError> {
    store.set(&key(rank), report.as_bytes())
}

/// Returns whether the last calls that `other` has told differ from this rank's.
pub(crate) fn is_told_of(store: &Store, report: &str, other: usize) -> Result<bool, StoreError> {
    let reports = [Some(report.to_owned()), told(store, other)?].into_iter().flatten().enumerate();
    Ok(first_difference(&reports.collect::<Vec<_>>()).is_some())
}

/// Returns whether a rank has found different calls, so that all must report theirs.
pub(crate) fn is_found(store: &Store) -> Result<bool, StoreError> {
    store.check(&[COMPARER])
}

/// Reports this rank's last calls and returns the verdict. `on_first` makes the other ranks report
/// theirs, if this rank is the one that compares.
pub(crate) fn verdict(
    store: &Store,
    (rank, size): (usize, usize),
    report: &str,
    deadline: Duration,
    on_first: impl FnOnce(),
) -> Result<CommError, StoreError> {
    tell(store, rank, report)?;
    let own = rank.to_string();
    let comparer = store.compare_set(COMPARER, b"", own.as_bytes())?;
    if comparer != own.as_bytes() {
        return await_verdict(store, rank, &comparer);
    }
    on_first();
    let keys: Vec<String> = (0..size).map(key).collect();
    let names: Vec<&str> = keys.iter().map(String::as_str).collect();
    match store.wait(&names, deadline.min(REPORTS)) {
        Err(StoreError::Timeout { .. }) => {}
        other => other?,
    }
    let mut reports = Vec::new();
    for rank in 0..size {
        reports.extend(told(store, rank)?.map(|report| (rank, report)));
    }
    Ok(match first_difference(&reports) {
        Some(Difference { rank, call, .. }) if call == END => CommError::PeerLost { rank },
        Some(Difference { other_rank, other_call, .. }) if other_call == END => {
            CommError::PeerLost { rank: other_rank }
        }
        Some(Difference { rank, call, other_rank, other_call }) => {
            CommError::Mismatch { rank, call, other_rank, other_call }
        }
        None => {
            let reason = "ranks made different calls, but those that did ended before they could tell";
            CommError::Aborted { rank, reason: reason.to_owned() }
        }
    })
}

/// Waits for the failure that the comparing rank files.
fn await_verdict(store: &Store, rank: usize, comparer: &[u8]) -> Result<CommError, StoreError> {
    match failure::await_filed(store, COMPARISON) {
        Err(StoreError::Timeout { .. }) | Ok(None) => {
            let rank = String::from_utf8_lossy(comparer).parse().unwrap_or(rank);
            Ok(CommError::PeerLost { rank })
        }
        Ok(Some(verdict)) => Ok(verdict),
        Err(error) => Err(error),
    }
}

fn told(store: &Store, rank: usize) -> Result<Option<String>, StoreError> {
    let key = key(rank);
    if !store.check(&[&key])? {
        return Ok(None);
    }
    let report = store.get(&key, PATIENCE)?;
    Ok(Some(String::from_utf8_lossy(&report).into_owned()))
}

fn key(rank: usize) -> String {
    format!("calls/{rank}")
}
