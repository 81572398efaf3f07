//! What is judged, and what a judge says.

use std::fmt::Write;
use std::sync::atomic::AtomicBool;

use serde_json::{Map, Value};

use crate::Result;

/// Answers to one prompt.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// Where the prompt comes from, for messages: the file and line of its row.
    pub place: &'a str,
    /// What was asked.
    pub prompt: Prompt<'a>,
    /// The row's other fields, as the right answer.
    pub row: &'a Map<String, Value>,
    /// What was answered.
    pub answers: Vec<Candidate<'a>>,
}

/// What was asked.
#[derive(Clone, Copy, Debug)]
pub enum Prompt<'a> {
    /// Plain text, which the answers continue.
    Text(&'a str),
    /// A conversation: objects with `role` and `content`.
    Messages(&'a [Value]),
}

impl Prompt<'_> {
    /// The prompt as one text. Of a conversation a paragraph for each message, that begins with its role.
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

/// One answer.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its text.
    pub text: &'a str,
    /// How many tokens it has, without the stop token.
    pub tokens: usize,
    /// Whether it ended by a stop token, not by the limit of length.
    pub is_ended: bool,
}

/// What a judge says of one answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// More is better. `None` where the judge could not say.
    pub score: Option<f64>,
    /// What it said, or why there is no score. Stored beside the samples.
    pub said: Value,
}

impl Verdict {
    /// A score and what goes with it.
    pub fn of(score: f64, said: impl Into<Value>) -> Self {
        Self { score: Some(score), said: said.into() }
    }

    /// No score, and why.
    pub fn none(why: impl Into<Value>) -> Self {
        Self { score: None, said: why.into() }
    }
}

/// Scores answers.
pub trait Judge: Send {
    /// The name under which its scores are stored, and which its errors begin with.
    fn name(&self) -> &str;

    /// A verdict for each answer of each group, in their order.
    ///
    /// # Errors
    /// If judging makes no sense any longer: nothing answers, an option is wrong, the budget is spent. And
    /// [`JudgeError::Stopped`](crate::JudgeError::Stopped) soon after `stop` is set.
    fn judge(&mut self, groups: &[Group<'_>], stop: &AtomicBool) -> Result<Vec<Vec<Verdict>>>;

    /// What was done since the judge was built.
    fn counts(&self) -> Counts;
}

/// What a judge did since it was built. What a kind of judge does not have stays 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Answers it gave a verdict of, with a score or without.
    pub judged: u64,
    /// Of these, the ones without a score.
    pub unscored: u64,
    /// Items or requests that were asked again.
    pub retries: u64,
    /// How often its program was started again.
    pub restarts: u64,
    /// Requests that the cache answered.
    pub cache_hits: u64,
    /// Requests that were sent, which are what the budget is spent on.
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

/// The beginning of a text, for messages: at most `limit` characters, and an ellipsis where there is more.
pub(crate) fn beginning(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
