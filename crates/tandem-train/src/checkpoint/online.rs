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

/// A message of a conversation: `role`, `content`, and what a chat template takes beside.
pub type Message = serde_json::Map<String, Value>;

/// A turn of the policy in a conversation with an environment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turn {
    /// Range of the answer's tokens that the policy sampled.
    pub tokens: [u32; 2],
    /// The environment's messages after it. Only rank 0 has them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<Message>,
}

/// An answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// Token ids, including an end token. With an environment: all turns and the messages between them.
    pub tokens: Vec<u32>,
    /// The policy's turns in a conversation with an environment; without one, none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<Turn>,
    /// Whether the model ended it, or its last turn, not the length limit.
    pub is_ended: bool,
    /// Log-probability under the generating weights, in nats.
    pub log_prob: f64,
    /// The same of each token that the policy sampled, where a loss compares it with the policy's.
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

impl Answer {
    /// Returns the ranges of the tokens that the policy sampled; none where it sampled all.
    pub fn sampled(&self) -> Vec<[u32; 2]> {
        self.turns.iter().map(|turn| turn.tokens).collect()
    }

    /// Returns the tokens of one of its turns.
    pub fn turn(&self, turn: &Turn) -> &[u32] {
        let [begin, end] = turn.tokens.map(|token| token as usize);
        &self.tokens[begin..end]
    }

    /// Returns the number of tokens that the policy sampled.
    pub fn num_sampled(&self) -> usize {
        match self.turns.as_slice() {
            [] => self.tokens.len(),
            turns => turns.iter().map(|turn| (turn.tokens[1] - turn.tokens[0]) as usize).sum(),
        }
    }
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

impl OnlineState {
    /// Returns what does not follow from the weights after `step` steps: answers of earlier weights, without what
    /// judges say of them. A run that was stopped while it answered or judged has the same as one that was not.
    pub(super) fn beside_weights(&self, step: u64) -> Self {
        let batches = self.pending.iter().chain(&self.unjudged);
        let mut pending: VecDeque<Batch> =
            batches.filter(|batch| batch.answered_after < step).cloned().collect();
        let prompts = pending.iter_mut().flat_map(|batch| &mut batch.prompts);
        for answer in prompts.flat_map(|prompt| &mut prompt.answers) {
            (answer.score, answer.normalized) = (None, None);
            answer.opinions.clear();
        }
        Self { pending, unjudged: Vec::new(), replay: self.replay.clone() }
    }
}
