//! Options of a command.

use crate::backoff::{Backoff, check_seconds, is_waitable};
use crate::{JudgeError, Result};

/// How to run a command.
#[derive(Clone, Debug, PartialEq)]
pub struct CommandConfig {
    /// Program and arguments, without a shell.
    pub command: Vec<String>,
    /// Time per item, counted from when no earlier item waits.
    pub timeout_s: f64,
    /// Time for the first answer after a start, if longer: the command may load a model.
    pub start_timeout_s: f64,
    /// Maximum number of unanswered items.
    pub concurrency: usize,
    /// Maximum number of restarts in a row without an answer.
    pub restarts: usize,
    /// Pause before a restart; it doubles with each one in a row.
    pub first_pause_s: f64,
    /// Maximum pause.
    pub longest_pause_s: f64,
    /// Time to end after stdin was closed, before it is killed.
    pub grace_s: f64,
}

impl Default for CommandConfig {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            timeout_s: 60.0,
            start_timeout_s: 300.0,
            concurrency: 16,
            restarts: 5,
            first_pause_s: 0.1,
            longest_pause_s: 10.0,
            grace_s: 2.0,
        }
    }
}

impl CommandConfig {
    /// Checks the options.
    pub fn check(&self, judge: &str) -> Result<()> {
        let bad = |key, reason: &str| Err(JudgeError::option(judge, key, reason));
        if self.command.first().is_none_or(String::is_empty) {
            return bad("command", "is empty; name a program and its arguments");
        }
        if self.concurrency == 0 {
            return bad("concurrency", "is 0; it should be 1 or more");
        }
        let times = [
            ("timeout_s", self.timeout_s),
            ("start_timeout_s", self.start_timeout_s),
            ("first_pause_s", self.first_pause_s),
            ("longest_pause_s", self.longest_pause_s),
        ];
        check_seconds(judge, &times)?;
        if self.grace_s != 0.0 && !is_waitable(self.grace_s) {
            return bad(
                "grace_s",
                &format!("is {}; it should be a number of seconds, 0 or more", self.grace_s),
            );
        }
        Ok(())
    }

    pub(super) fn backoff(&self) -> Backoff {
        Backoff::from_seconds(self.first_pause_s, self.longest_pause_s)
    }
}
