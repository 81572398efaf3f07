//! Admission: checks of requests, and completions that begin now.

use std::ops::Range;

use super::text::{CachedPrompt, LongPrompt, Open, Text};
use super::waiting::Turn;
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
    /// the cache. The first completion of a long prompt begins after the prompt's last part, and others of it later.
    pub(super) fn admit(&mut self) -> Vec<usize> {
        let (mut new_prompts, mut new_tokens) = (Vec::new(), 0);
        while self.texts.len() + self.long.len() < self.options.max_batch
            && let Some(turn) = self.waiting.next(|request| self.may_begin(request))
        {
            let Turn { request: number, answer, .. } = turn;
            let open = &self.requests[&number];
            let limit = self.limit(&open.request);
            let (missing, is_long) = (open.missing(), open.missing() > self.options.prefill_tokens);
            if !is_long && new_tokens > 0 && new_tokens + missing > self.options.prefill_tokens {
                break;
            }
            let Some(place) = self.take_place(missing, limit - 1) else {
                // Prompts that only wait may leave: they are computed again at their turn.
                if self.forget_waiting_prompt(number, &new_prompts) {
                    continue;
                }
                break;
            };
            let Place { prompt_rows, prompt_slot, rows, slot } = place;
            if missing > 0 {
                let cached = CachedPrompt {
                    rows: prompt_rows,
                    slot: prompt_slot,
                    logits: PolicyAndReferenceScores::default(),
                };
                self.requests.get_mut(&number).expect("found above").cached = Some(cached);
            }
            self.waiting.take(&turn);
            let (tokens, log_probs) = (Vec::with_capacity(limit), Vec::new());
            let text = Text { request: number, answer, tokens, log_probs, rows, slot, limit };
            if is_long {
                self.long.push_back(LongPrompt { request: number, num_cached: 0, text });
                continue;
            }
            if missing > 0 {
                new_tokens += missing;
                new_prompts.push(number);
            }
            self.texts.push(text);
        }
        new_prompts
    }

    /// Returns whether a completion of a request may begin: its prompt is not on its way into the cache, and no other
    /// long prompt has to be read first. Half of the batch is for others.
    fn may_begin(&self, request: usize) -> bool {
        let most_long = (self.options.max_batch / 2).max(1);
        let is_long = self.requests[&request].missing() > self.options.prefill_tokens;
        !self.is_being_read(request) && (!is_long || self.long.len() < most_long)
    }

    /// Returns whether a prompt is on its way into the cache.
    fn is_being_read(&self, request: usize) -> bool {
        self.long.iter().any(|long| long.request == request)
    }

    /// Takes cache rows, and slots if texts have slots, for a completion of `limit` rows and a prompt of
    /// `missing` tokens, if it is not cached. `None` takes nothing.
    fn take_place(&mut self, missing: usize, limit: usize) -> Option<Place> {
        let prompt_rows = self.rows.take(missing)?;
        let Some(rows) = self.rows.take(limit) else {
            self.rows.give(prompt_rows);
            return None;
        };
        let slot = self.take_slot();
        let prompt_slot = if missing > 0 { self.take_slot() } else { Some(None) };
        if let (Some(slot), Some(prompt_slot)) = (slot, prompt_slot) {
            return Some(Place { prompt_rows, prompt_slot, rows, slot });
        }
        self.give(prompt_rows, prompt_slot.flatten());
        self.give(rows, slot.flatten());
        None
    }

    /// Frees the cache rows of a prompt without running completions, other than `next` and those that are new.
    /// Returns false if there is none.
    fn forget_waiting_prompt(&mut self, next: usize, new: &[usize]) -> bool {
        let is_running =
            |number| self.is_being_read(number) || self.texts.iter().any(|text| text.request == number);
        let may_leave = |&(&number, open): &(&usize, &Open)| {
            open.cached.is_some() && number != next && !new.contains(&number) && !is_running(number)
        };
        let found = self.requests.iter().rev().find(may_leave).map(|(&number, _)| number);
        let prompt = found.and_then(|number| self.requests.get_mut(&number)?.cached.take());
        prompt.map(|prompt| self.forget(prompt)).is_some()
    }
}

/// Cache rows and slots of a completion that begins, and of its prompt.
struct Place {
    prompt_rows: Range<u32>,
    prompt_slot: Option<u32>,
    rows: Range<u32>,
    slot: Option<u32>,
}
