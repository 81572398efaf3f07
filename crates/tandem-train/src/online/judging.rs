//! Answers to scores. The first rank alone asks the judges; what an answer is worth the others learn from it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;

use serde_json::{Map, Value};
use tandem_comm::{Group, Phase};
use tandem_data::token_cache::TokenCache;
use tandem_data::tokenizer::Tokenizer;
use tandem_judge::{Assessment, Candidate, Group as Answers, JudgeError, Panel, Prompt};

use super::answers::{Answered, Opinion};
use crate::{Result, TrainError};

/// The judges, or where they are.
pub enum Judging {
    /// They wait.
    Idle(Panel),
    /// They judge while this thread goes on.
    Busy(JoinHandle<(Panel, Verdicts)>),
    /// They are on the first rank.
    Elsewhere,
}

type Verdicts = Result<Vec<Vec<Assessment>>, JudgeError>;

/// A prompt and its answers as judges see them.
struct Case {
    place: String,
    prompt: Value,
    row: Map<String, Value>,
    answers: Vec<(String, usize, bool)>,
}

impl Case {
    fn of(answered: &Answered, cache: &TokenCache, tokenizer: &Tokenizer) -> Result<Self> {
        let row = answered.row as usize;
        let (_, json) = cache.prompt(row);
        let mut row_map: Map<String, Value> = serde_json::from_slice(json).expect("written as JSON");
        let prompt = row_map.remove("prompt").unwrap_or_default();
        let text = |answer: &super::Answer| -> Result<_> {
            let ends = answer.tokens.last().is_some_and(|token| tokenizer.eos_ids().contains(token));
            let length = answer.tokens.len() - usize::from(ends);
            Ok((tokenizer.decode(&answer.tokens[..length], true)?, length, answer.is_ended))
        };
        let answers = answered.answers.iter().map(text).collect::<Result<_>>()?;
        Ok(Self { place: cache.origin(row).to_string(), prompt, row: row_map, answers })
    }

    fn view(&self) -> Answers<'_> {
        let prompt = match &self.prompt {
            Value::String(text) => Prompt::Text(text),
            Value::Array(messages) => Prompt::Messages(messages),
            other => unreachable!("a prompt is a text or messages, not {other}"),
        };
        let candidate = |(text, tokens, is_ended): &(String, usize, bool)| Candidate {
            text,
            tokens: *tokens,
            is_ended: *is_ended,
        };
        let answers = self.answers.iter().map(candidate).collect();
        Answers { place: &self.place, prompt, row: &self.row, answers }
    }
}

impl Judging {
    /// Has answers judged; with `meanwhile` on a thread of its own.
    ///
    /// # Errors
    /// If a token is unknown, or a judge cannot go on.
    pub fn begin(
        &mut self,
        prompts: &mut [Answered],
        cache: &TokenCache,
        tokenizer: &Tokenizer,
        meanwhile: bool,
    ) -> Result<()> {
        let Self::Idle(_) = self else { return Ok(()) };
        let cases = prompts.iter().map(|answered| Case::of(answered, cache, tokenizer));
        let cases: Vec<Case> = cases.collect::<Result<_>>()?;
        let Self::Idle(mut panel) = std::mem::replace(self, Self::Elsewhere) else { unreachable!("just seen") };
        let mut judge = move || {
            let views: Vec<Answers> = cases.iter().map(Case::view).collect();
            let verdicts = panel.judge(&views, &AtomicBool::new(false));
            (panel, verdicts)
        };
        if meanwhile {
            let thread = std::thread::Builder::new().name("judges".to_owned());
            *self = Self::Busy(thread.spawn(judge).expect("a thread for the judges"));
            return Ok(());
        }
        let (panel, verdicts) = judge();
        *self = Self::Idle(panel);
        note(prompts, verdicts?);
        Ok(())
    }
}
