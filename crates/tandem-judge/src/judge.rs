//! Inputs and outputs of judges.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Map, Value};

use crate::{JudgeError, Result};

/// Responses to one prompt.
#[derive(Clone, Debug)]
pub struct PromptWithCompletions<'a> {
    /// File and line of the prompt's row, for messages.
    pub place: &'a str,
    /// The prompt.
    pub prompt: Prompt<'a>,
    /// The row's other fields, such as a reference solution.
    pub row: &'a Map<String, Value>,
    /// The responses.
    pub answers: Vec<Candidate<'a>>,
}

/// A prompt.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'a> {
    /// Plain text that the responses continue.
    Text(&'a str),
    /// A conversation: objects with `role` and `content`.
    Messages(&'a [Value]),
}

impl Prompt<'_> {
    /// Returns the prompt as text. A conversation becomes a paragraph per message, each beginning
    /// with the role.
    pub fn to_text(&self) -> String {
        let messages = match self {
            Self::Text(text) => return (*text).to_owned(),
            Self::Messages(messages) => messages,
        };
        let mut text = String::new();
        for message in *messages {
            let between = if text.is_empty() { "" } else { "\n\n" };
            let role = message["role"].as_str().unwrap_or("message");
            let _ = match &message["content"] {
                Value::String(content) => write!(text, "{between}{role}: {content}"),
                other => write!(text, "{between}{role}: {other}"),
            };
        }
        text
    }
}

/// One response.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its text.
    pub text: &'a str,
    /// Number of tokens, without the stop token.
    pub tokens: usize,
    /// Whether a stop token ended it, instead of the length limit.
    pub is_ended: bool,
}

/// Verdict of a judge on one response.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Score; more is better. `None` if the judge could not score.
    pub score: Option<f64>,
    /// The judge's explanation, or why there is no score. Stored with the samples.
    pub said: Value,
}

impl Verdict {
    /// Creates a verdict with a score.
    pub fn new(score: f64, said: impl Into<Value>) -> Self {
        Self { score: Some(score), said: said.into() }
    }

    /// Creates a verdict without a score, with the reason.
    pub fn none(why: impl Into<Value>) -> Self {
        Self { score: None, said: why.into() }
    }
}

/// A source of scores for responses.
pub trait Judge: Send {
    /// Returns the judge's name, for stored scores and errors.
    fn name(&self) -> &str;

    /// Judges each response of each group, in order.
    ///
    /// # Errors
    /// If judging cannot continue: nothing answers, an option is invalid, or the budget is spent.
    /// [`JudgeError::Stopped`](crate::JudgeError::Stopped) soon after `stop` is set.
    fn judge(&mut self, groups: &[PromptWithCompletions<'_>], stop: &AtomicBool)
    -> Result<Vec<Vec<Verdict>>>;

    /// Returns the work since the judge was built.
    fn counts(&self) -> Counts;
}

/// Judges each response of each group with `verdict`, and adds the verdicts to `counts`.
///
/// # Errors
/// `verdict` fails, or `stop` was set before a group.
pub(crate) fn judge_each(
    groups: &[PromptWithCompletions<'_>],
    stop: &AtomicBool,
    counts: &mut Counts,
    verdict: impl Fn(&PromptWithCompletions<'_>, &Candidate<'_>) -> Result<Verdict>,
) -> Result<Vec<Vec<Verdict>>> {
    let mut verdicts = Vec::with_capacity(groups.len());
    for group in groups {
        if stop.load(Ordering::Relaxed) {
            return Err(JudgeError::Stopped);
        }
        verdicts.push(group.answers.iter().map(|answer| verdict(group, answer)).collect::<Result<_>>()?);
    }
    counts.add_verdicts(&verdicts);
    Ok(verdicts)
}

/// Work of a judge since it was built; 0 where a kind of judge has no such work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Responses with a verdict, scored or not.
    pub judged: u64,
    /// Verdicts without a score.
    pub unscored: u64,
    /// Items or requests that were repeated.
    pub retries: u64,
    /// Restarts of the program.
    pub restarts: u64,
    /// Requests answered by the cache.
    pub cache_hits: u64,
    /// Requests sent, which the budget counts.
    pub spent: u64,
}

impl Counts {
    /// Adds a call's verdicts.
    pub fn add_verdicts(&mut self, verdicts: &[Vec<Verdict>]) {
        for verdict in verdicts.iter().flatten() {
            self.judged += 1;
            self.unscored += u64::from(verdict.score.is_none());
        }
    }
}

/// Returns at most `limit` characters of a text, with an ellipsis if truncated.
pub(crate) fn beginning(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
