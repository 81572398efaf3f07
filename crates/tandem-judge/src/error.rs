//! Errors that end judging. Each message begins with the judge's name, or with "environment".

use std::path::PathBuf;

/// Reason why a judge cannot be built, or cannot continue.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "fields are explained by the messages that print them")]
pub enum JudgeError {
    /// An invalid option.
    #[error("judge `{judge}`: `{key}` {reason}")]
    Option { judge: String, key: &'static str, reason: String },
    /// A row without the field that a rule compares with.
    #[error("judge `{judge}`: {place}: the row's field `{field}` {found}; it should be a text or a number")]
    Field { judge: String, place: String, field: String, found: String },
    /// A command whose program cannot be started.
    #[error("{owner}: the command `{command}` cannot be started")]
    Start {
        /// The judge, as in "judge `name`", or "environment".
        owner: String,
        /// Program and arguments.
        command: String,
        source: std::io::Error,
    },
    /// A command that ends again and again.
    #[error(
        "{owner}: the command `{command}` ended {times} times in a row without an answer, the last time with {how}; {}",
        last_lines(stderr)
    )]
    Died {
        /// As for a program that cannot be started.
        owner: String,
        /// Program and arguments.
        command: String,
        times: usize,
        /// The last exit status.
        how: String,
        stderr: Vec<String>,
    },
    /// A refusal by the endpoint that no retry would change.
    #[error("judge `{judge}`: {address} refused with HTTP {status}: {message}")]
    Refused { judge: String, address: String, status: u16, message: String },
    /// An endpoint that compared none of the pairs.
    #[error(
        "judge `{judge}`: none of {pairs} pairs could be compared by {address}; the last reason: {reason}"
    )]
    NoPair { judge: String, address: String, pairs: usize, reason: String },
    /// A judge that counts and may not abstain scored no response of a call.
    #[error(
        "judge `{judge}`: 0 of {answers} answers scored: {reason}; `may_abstain = true` allows a judge to score none"
    )]
    NoScore { judge: String, answers: usize, reason: String },
    /// An environment that ended all conversations of a round without a reward.
    #[error("environment: 0 of {conversations} conversations rewarded; the last reason: {reason}")]
    NoReward { conversations: usize, reason: String },
    /// The budget of requests is spent.
    #[error(
        "judge `{judge}`: the budget of {budget} requests is spent; raise `budget`, or continue with another judge"
    )]
    Budget { judge: String, budget: u64 },
    /// A cache that cannot be read or written.
    #[error("judge `{judge}`: {what} the cache {}", path.display())]
    Cache {
        judge: String,
        /// The operation that failed, as in "reading".
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// A judging model that cannot be loaded, or that fails.
    #[error("judge `{judge}`")]
    Model { judge: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// A panel in which no score has a weight, or with equal names.
    #[error("the panel of judges {0}")]
    Panel(String),
    /// Judging was stopped on request.
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
