//! Running requests: their prompts in the cache, and their completions.

use std::ops::Range;

use super::{Answer, Finish, Request};
use crate::layers::PolicyAndReferenceScores;

/// Request with completions to come.
pub(super) struct Open {
    pub(super) request: Request,
    /// Completions that have not ended.
    pub(super) remaining: usize,
    pub(super) cached: Option<CachedPrompt>,
}

/// Prompt in the cache.
pub(super) struct CachedPrompt {
    pub(super) rows: Range<u32>,
    /// Slot of the state after it, if texts have slots.
    pub(super) slot: Option<u32>,
    /// Each model's logits `[V]` after the prompt, from which each completion's first token is
    /// sampled.
    pub(super) logits: PolicyAndReferenceScores<Vec<f32>>,
}

/// Prompt that is prefilled in parts.
pub(super) struct LongPrompt {
    pub(super) request: usize,
    /// Its tokens in the cache.
    pub(super) num_cached: usize,
    /// The completion that begins after its last part; others of the request begin later.
    pub(super) text: Text,
}

/// Running completion.
pub(super) struct Text {
    pub(super) request: usize,
    pub(super) answer: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) log_probs: Vec<f32>,
    /// Cache rows of its tokens: all but the last, which nothing follows.
    pub(super) rows: Range<u32>,
    /// Slot of its state, if texts have slots.
    pub(super) slot: Option<u32>,
    /// Largest number of tokens.
    pub(super) limit: usize,
}

impl Open {
    /// Returns the prompt in the cache.
    pub(super) fn cached(&self) -> &CachedPrompt {
        self.cached.as_ref().expect("it is kept for its answers")
    }

    /// Returns the number of the prompt's tokens, if it is not in the cache, nor on its way into it.
    pub(super) fn missing(&self) -> usize {
        if self.cached.is_some() { 0 } else { self.request.prompt.len() }
    }
}

impl Text {
    pub(super) fn end(self, finish: Finish) -> Answer {
        let Self { request, answer, tokens, log_probs, .. } = self;
        Answer { request, answer, tokens, log_probs, finish }
    }
}
