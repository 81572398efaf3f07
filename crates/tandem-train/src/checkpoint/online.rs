//! State of an online run that a checkpoint keeps: responses with their scores.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What a judge said of an answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JudgeScore {
    /// Its score; `None` where it had none.
    pub score: Option<f64>,
    /// What it said, or why there is no score.
    pub said: Value,
}

/// An answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// Its tokens, with the end token that it may have.
    pub tokens: Vec<u32>,
    /// Whether it ended by itself, not by the limit of length.
    pub is_ended: bool,
    /// Its log-probability under the weights that gave it, nats.
    pub log_prob: f64,
    /// What the judges' scores add up to; `None` where one that counts had none.
    pub score: Option<f64>,
    /// What each judge said. Only the first rank, which asks them, knows.
    pub opinions: Vec<JudgeScore>,
}

/// A prompt and its answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletedPrompt {
    /// The data set's row.
    pub row: u32,
    /// In the order of their numbers.
    pub answers: Vec<Answer>,
}

/// The prompts of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// The 0-based step.
    pub step: u64,
    /// Steps that the weights had taken which answered.
    pub answered_after: u64,
    /// The prompts.
    pub prompts: Vec<CompletedPrompt>,
}

/// What the steps to come depend on besides the weights: a part of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnlineState {
    /// Batches that are judged and wait to be trained on.
    pub pending: VecDeque<Batch>,
    /// Batches that are answered and not judged: after `pending`, if there is any. Judging them was stopped.
    #[serde(default)]
    pub unjudged: Vec<Batch>,
    /// Prompts that were trained on and may be again, the oldest first.
    pub replay: VecDeque<CompletedPrompt>,
}
