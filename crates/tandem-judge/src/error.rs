//! What ends judging. Each message begins with the judge's name.

use std::path::PathBuf;

/// Why a judge cannot be built, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum JudgeError {
    /// An option makes no sense.
    #[error("judge `{judge}`: `{key}` {reason}")]
    Option {
        /// The judge.
        judge: String,
        /// The option.
        key: &'static str,
        /// What is wrong with it, and what it should be.
        reason: String,
    },
    /// A row lacks what a rule compares with.
    #[error("judge `{judge}`: {place}: the row's field `{field}` {found}; it should be a text or a number")]
    Field {
        /// The judge.
        judge: String,
        /// The row.
        place: String,
        /// The field.
        field: String,
        /// What it is instead.
        found: String,
    },
    /// The command's program cannot be started.
    #[error("judge `{judge}`: the command `{command}` cannot be started")]
    Start {
        /// The judge.
        judge: String,
        /// Program and arguments.
        command: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The command ends again and again.
    #[error(
        "judge `{judge}`: the command `{command}` ended {times} times in a row without an answer, the last time with {how}; {}",
        last_lines(stderr)
    )]
    Died {
        /// The judge.
        judge: String,
        /// Program and arguments.
        command: String,
        /// How often.
        times: usize,
        /// How it ended the last time.
        how: String,
        /// The last lines that it wrote to stderr.
        stderr: Vec<String>,
    },
    /// The endpoint refuses what no repetition would change.
    #[error("judge `{judge}`: {address} refused with HTTP {status}: {message}")]
    Refused {
        /// The judge.
        judge: String,
        /// Where the request went.
        address: String,
        /// The status.
        status: u16,
        /// The server's words.
        message: String,
    },
    /// Not one pair of answers could be compared.
    #[error(
        "judge `{judge}`: none of {pairs} pairs could be compared by {address}; the last reason: {reason}"
    )]
    NoPair {
        /// The judge.
        judge: String,
        /// Where the requests went.
        address: String,
        /// How many pairs were tried.
        pairs: usize,
        /// Why the last one failed.
        reason: String,
    },
    /// As many requests were sent as may be.
    #[error(
        "judge `{judge}`: the budget of {budget} requests is spent; raise `budget`, or go on with another judge"
    )]
    Budget {
        /// The judge.
        judge: String,
        /// The most requests.
        budget: u64,
    },
    /// The cache cannot be read or written.
    #[error("judge `{judge}`: {what} the cache {}", path.display())]
    Cache {
        /// The judge.
        judge: String,
        /// What was attempted, as in "reading".
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The model that judges cannot be loaded, or fails.
    #[error("judge `{judge}`")]
    Model {
        /// The judge.
        judge: String,
        /// What went wrong with it.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Every score would have the weight 0, or none at all.
    #[error("the panel of judges {0}")]
    Panel(String),
    /// It was asked to stop.
    #[error("judging was stopped")]
    Stopped,
}

impl JudgeError {
    pub(crate) fn option(judge: &str, key: &'static str, reason: impl Into<String>) -> Self {
        Self::Option { judge: judge.to_owned(), key, reason: reason.into() }
    }
}

fn last_lines(stderr: &[String]) -> String {
    match stderr {
        [] => "it wrote nothing to stderr".to_owned(),
        lines => format!("its last lines on stderr:\n  {}", lines.join("\n  ")),
    }
}
