//! Prompts and answers as people and judges see them.

use serde_json::{Map, Value};
use tandem_data::token_cache::TokenCache;
use tandem_data::tokenizer::Tokenizer;

use super::answers::{Answer, CompletedPrompt};
use crate::Result;
use crate::inputs::RunInputs;
use crate::metrics::Split;

/// Renders completions as text.
#[derive(Clone, Copy)]
pub struct SampleRenderer<'a> {
    /// The prompts' rows.
    pub prompts: &'a TokenCache,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Strings that end an answer, and are no part of its text.
    pub stop: &'a [String],
}

impl<'a> SampleRenderer<'a> {
    /// The prompts of a split of a run.
    ///
    /// # Panics
    /// The run has no such split.
    pub fn new(prepared: &'a RunInputs, split: Split, stop: &'a [String]) -> Self {
        let prompts = prepared.tokens(split).expect("its rows are shown");
        Self { prompts, tokenizer: &prepared.tokenizer, stop }
    }

    /// The row of the data that a prompt came in.
    pub fn row(&self, answered: &CompletedPrompt) -> Map<String, Value> {
        serde_json::from_slice(self.prompts.prompt(answered.row as usize).1).expect("it was written as JSON")
    }

    /// Tokens of an answer but the one that ends it.
    pub fn length(&self, answer: &Answer) -> usize {
        self.tokenizer.without_end(&answer.tokens).len()
    }

    /// Text of a completion up to its stop string.
    pub fn text(&self, answer: &Answer) -> Result<String> {
        let mut text = self.tokenizer.decode(self.tokenizer.without_end(&answer.tokens), true)?;
        if let Some(end) = self.stop.iter().filter_map(|stop| text.find(stop.as_str())).min() {
            text.truncate(end);
        }
        Ok(text)
    }
}
