//! Failure detection: heartbeats, the watchdog, progress, and the record of the first failure.

pub(crate) mod abort_flag;
pub(crate) mod disagreement;
pub(crate) mod failure;
pub(crate) mod heartbeat;
pub(crate) mod progress;
pub(crate) mod wake;
pub mod watchdog;
