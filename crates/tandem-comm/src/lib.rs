//! How a process finds its peers.
//!
//! [`launch`] answers the first question, "which rank am I, of how many, and where do we meet?", from the
//! variables that launchers set. It reads a map that it is given and touches nothing else, so every launcher's
//! environment is a row of a table in the tests.

pub mod launch;

pub use launch::{Environment, Launch, LaunchError, Launcher, MeetingPoint, RanksHere};
