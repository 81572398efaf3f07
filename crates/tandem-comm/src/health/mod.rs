//! Failure detection: heartbeats, the watchdog, progress, and the record of the first failure.

#[cfg(feature = "gloo")]
pub(crate) mod abort_flag;
#[cfg(feature = "gloo")]
pub(crate) mod failure;
#[cfg(feature = "gloo")]
mod heartbeat;
pub(crate) mod progress;
#[cfg(feature = "gloo")]
pub mod watchdog;
