//! The options of a command.

use crate::backoff::{Backoff, check_seconds, is_waitable};
use crate::{JudgeError, Result};

/// How a command is run.
#[derive(Clone, Debug, PartialEq)]
pub struct CommandConfig {
    /// Program and arguments. No shell is between, unless it is the program.
    pub command: Vec<String>,
    /// How long it may take for an item, counted from when no item before it waits.
    pub timeout_s: f64,
    /// The same for its first answer after it was started, where that is longer: it may have a model to load.
    pub start_timeout_s: f64,
    /// How many items it is given at most before it answers.
    pub concurrency: usize,
    /// How often in a row it is started again without having answered anything.
    pub restarts: usize,
    /// The pause before it is started again; it doubles with each time in a row.
    pub first_pause_s: f64,
    /// No pause is longer.
    pub longest_pause_s: f64,
    /// How long it may take to end after its stdin was closed. Then it is killed.
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
    /// Whether the options make sense.
    ///
    /// # Errors
    /// If one does not.
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
        Backoff::of_seconds(self.first_pause_s, self.longest_pause_s)
    }
}
