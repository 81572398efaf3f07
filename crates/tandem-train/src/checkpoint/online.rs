//! State of an online run that a checkpoint keeps: responses with their scores.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A judge's score of a completion.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JudgeScore {
    /// The score, if any.
    pub score: Option<f64>,
    /// The judge's reply, or the reason for a missing score.
    pub said: Value,
}

/// An answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// Token ids, including an end token.
    pub tokens: Vec<u32>,
    /// Whether the model ended it, not the length limit.
    pub is_ended: bool,
    /// Log-probability under the generating weights, in nats.
    pub log_prob: f64,
    /// The same of each token, where a loss compares it with the policy's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log_probs: Vec<f32>,
    /// Log-probability of each token under the trainer's weights of the time, where a server gave the answer
    /// and later steps train on it too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub old_log_probs: Vec<f32>,
    /// Weighted sum of the judges' scores; `None` if a counting judge gave none.
    pub score: Option<f64>,
    /// Weighted sum of the judges' scores, each compared with its group's; where the config asks for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub normalized: Option<f64>,
    /// Replies per judge. Only rank 0 has them.
    pub opinions: Vec<JudgeScore>,
}

/// A prompt and its answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletedPrompt {
    /// The data set's row.
    pub row: u32,
    /// Completions in order.
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
    /// Prompts that were answered and replaced, for their answers had equal rewards.
    #[serde(default)]
    pub replaced: usize,
}

/// State of coming steps besides the weights; part of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OnlineState {
    /// Batches that are judged and wait to be trained on.
    pub pending: VecDeque<Batch>,
    /// Batches that are answered and not judged: after `pending`, if there is any. Judging them was
    /// stopped.
    #[serde(default)]
    pub unjudged: Vec<Batch>,
    /// Prompts that were trained on and may be again, the oldest first.
    pub replay: VecDeque<CompletedPrompt>,
}
