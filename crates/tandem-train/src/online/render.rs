//! Prompts and answers as people and judges see them.

use serde_json::{Map, Value};
use tandem_data::record::RowKind;
use tandem_data::token_cache::TokenCache;
use tandem_data::tokenizer::Tokenizer;

use super::answers::{Answer, CompletedPrompt, Message};
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

    /// The prompt as the data has it; as text, where a row has no prompt of its own.
    pub fn prompt(&self, answered: &CompletedPrompt) -> Result<Value> {
        if self.prompts.kind() == RowKind::Prompt {
            return Ok(self.row(answered).remove("prompt").unwrap_or_default());
        }
        let tokens = self.prompts.prompt_tokens(answered.row as usize);
        Ok(self.tokenizer.decode(tokens, false)?.into())
    }

    /// The row of the data that a prompt came in.
    pub fn row(&self, answered: &CompletedPrompt) -> Map<String, Value> {
        serde_json::from_slice(self.prompts.prompt(answered.row as usize).1).expect("it was written as JSON")
    }

    /// Tokens of an answer but the one that ends it.
    /// In a conversation with an environment, of each of the policy's turns.
    pub fn length(&self, answer: &Answer) -> usize {
        let length = |tokens: &[u32]| self.tokenizer.without_end(tokens).len();
        match answer.turns.as_slice() {
            [] => length(&answer.tokens),
            turns => turns.iter().map(|turn| length(answer.turn(turn))).sum(),
        }
    }

    /// Text of a completion up to its stop string, or of a whole conversation.
    pub fn text(&self, answer: &Answer) -> Result<String> {
        match answer.turns.as_slice() {
            [] => self.text_of(&answer.tokens),
            _ => Ok(self.tokenizer.decode(self.tokenizer.without_end(&answer.tokens), true)?),
        }
    }

    /// The turns of a conversation, and the messages of the environment between them.
    pub fn conversation(&self, answer: &Answer) -> Result<Vec<Message>> {
        let mut messages = Vec::new();
        for turn in &answer.turns {
            messages.push(self.message(answer.turn(turn))?);
            messages.extend_from_slice(&turn.messages);
        }
        Ok(messages)
    }

    /// A turn of the policy as a message.
    pub fn message(&self, tokens: &[u32]) -> Result<Message> {
        let text = self.text_of(tokens)?;
        let fields = [("role", "assistant".into()), ("content", text.into())];
        Ok(fields.map(|(key, value): (&str, Value)| (key.to_owned(), value)).into_iter().collect())
    }

    /// Text of sampled tokens up to their stop string.
    fn text_of(&self, tokens: &[u32]) -> Result<String> {
        let mut text = self.tokenizer.decode(self.tokenizer.without_end(tokens), true)?;
        if let Some(end) = self.stop.iter().filter_map(|stop| text.find(stop.as_str())).min() {
            text.truncate(end);
        }
        Ok(text)
    }
}
