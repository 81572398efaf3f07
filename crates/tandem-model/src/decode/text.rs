//! What is under way: requests, their prompts in the cache, and answers to them.

use std::ops::Range;

use super::{Answer, Finish, Request};
use crate::layers::Streams;

/// A request that has answers to come.
pub(super) struct Open {
    pub(super) request: Request,
    /// Answers that have not ended.
    pub(super) remaining: usize,
    pub(super) cached: Option<CachedPrompt>,
}

/// A prompt whose keys and values are in the cache.
pub(super) struct CachedPrompt {
    pub(super) rows: Range<u32>,
    /// Each model's logits after its last token `[V]`, from which each answer's first token is drawn.
    pub(super) logits: Streams<Vec<f32>>,
}

/// An answer under way.
pub(super) struct Text {
    pub(super) request: usize,
    pub(super) answer: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) log_probs: Vec<f32>,
    /// Cache rows for its tokens: all but the last, which nothing follows.
    pub(super) rows: Range<u32>,
    /// Tokens it may have.
    pub(super) limit: usize,
}

impl Open {
    /// The prompt in the cache.
    pub(super) fn cached(&self) -> &CachedPrompt {
        self.cached.as_ref().expect("it is kept for its answers")
    }
}

impl Text {
    pub(super) fn end(self, finish: Finish) -> Answer {
        let Self { request, answer, tokens, log_probs, .. } = self;
        Answer { request, answer, tokens, log_probs, finish }
    }
}
