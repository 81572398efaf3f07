//! Admission: checks of requests, and completions that begin now.

use super::text::{CachedPrompt, Text};
use super::{Generator, Request};
use crate::layers::PolicyAndReferenceScores;
use crate::{ModelError, Result};

impl Generator<'_> {
    /// Refuses a request that can never be completed.
    pub(super) fn check(&self, request: &Request) -> Result<()> {
        let Request { prompt, num_answers, max_new_tokens, sampling, .. } = request;
        let invalid = |problem: String| Err(ModelError::Invalid(problem));
        sampling.check()?;
        if [*num_answers, *max_new_tokens].contains(&0) {
            return invalid(format!(
                "completions ({num_answers}) and new tokens ({max_new_tokens}) must be at least 1"
            ));
        }
        let (tokens, positions) = (prompt.len(), self.models.positions());
        let vocabulary = self.models.vocabulary();
        if tokens == 0 {
            return invalid("it is empty".to_owned());
        }
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocabulary) {
            return invalid(format!("token {token} is outside the model's vocabulary of {vocabulary}"));
        }
        if tokens >= positions {
            return invalid(format!(
                "it has {tokens} tokens, which leaves no room for a completion within {positions} positions"
            ));
        }
        let limit = self.limit(request);
        if tokens + limit - 1 > self.options.cache_tokens {
            return invalid(format!(
                "it has {tokens} tokens and its completion up to {limit}; the cache holds {}",
                self.options.cache_tokens
            ));
        }
        Ok(())
    }

    /// Returns the largest number of tokens of a completion.
    pub(super) fn limit(&self, request: &Request) -> usize {
        request.max_new_tokens.min(self.models.positions() - request.prompt.len())
    }

    /// Begins queued completions while there is room; returns the requests whose prompts are new to
    /// the cache.
    pub(super) fn admit(&mut self) -> Vec<usize> {
        let (mut new_prompts, mut new_tokens) = (Vec::new(), 0);
        while self.texts.len() < self.options.max_batch
            && let Some(&(number, answer)) = self.waiting.front()
        {
            let open = &self.requests[&number];
            let limit = self.limit(&open.request);
            let missing = if open.cached.is_some() { 0 } else { open.request.prompt.len() };
            if missing > 0 && new_tokens > 0 && new_tokens + missing > self.options.prefill_tokens {
                break;
            }
            let Some(prompt_rows) = self.rows.take(missing) else { break };
            let Some(rows) = self.rows.take(limit - 1) else {
                self.rows.give(prompt_rows);
                break;
            };
            // There are slots for as many completions as run at once, and their prompts.
            let mut take_slot = || self.take_slot().expect("a slot for each prompt and completion");
            let slot = take_slot();
            if missing > 0 {
                new_tokens += missing;
                let cached = CachedPrompt {
                    rows: prompt_rows,
                    slot: take_slot(),
                    logits: PolicyAndReferenceScores::default(),
                };
                self.requests.get_mut(&number).expect("found above").cached = Some(cached);
                new_prompts.push(number);
            }
            self.waiting.pop_front();
            let (tokens, log_probs) = (Vec::with_capacity(limit), Vec::new());
            self.texts.push(Text { request: number, answer, tokens, log_probs, rows, slot, limit });
        }
        new_prompts
    }
}
