//! A request for the answers to a prompt, and the answers in a reply.

use serde::Deserialize;
use serde_json::{Value, json};

use super::super::Answer;
use super::super::generate::Asked;
use crate::config::OnlineConfig;
use crate::draw::draw;
use crate::prepare::Prepared;

/// What requests are made with, and replies compared.
pub struct Form<'a> {
    /// The adapter's name.
    pub name: &'a str,
    /// How answers are drawn.
    pub options: &'a OnlineConfig,
    /// The run's seed.
    pub seed: u64,
    /// The prompts, and what ends an answer.
    pub prepared: &'a Prepared,
}

/// A reply, as vLLM writes it; what is not looked at is left out.
#[derive(Deserialize)]
struct Completion {
    model: String,
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    index: usize,
    prompt_token_ids: Option<Vec<u32>>,
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<String>,
    /// The string or the token that ended it; nothing where that is the model's own end token.
    #[serde(default)]
    stop_reason: Value,
    logprobs: Option<LogProbs>,
}

#[derive(Deserialize)]
struct LogProbs {
    token_logprobs: Vec<Option<f64>>,
}

impl Form<'_> {
    /// What is asked.
    pub fn body(&self, asked: &Asked) -> String {
        let OnlineConfig { num_answers, max_new_tokens, temperature, top_k, top_p, .. } = self.options;
        let OnlineConfig { min_p, repetition_penalty, stop, .. } = self.options;
        // Servers read 64 bits with a sign, and add the number of an answer.
        let seed = draw(&[self.seed, asked.step, 0, u64::from(asked.row)]) >> 2;
        json!({
            "model": self.name,
            "prompt": self.prompt(asked),
            "n": num_answers,
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k.map_or(-1, |k| k as i64),
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "stop": stop,
            "stop_token_ids": self.prepared.tokenizer.eos_ids(),
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": true,
        })
        .to_string()
    }

    /// The answers in a reply, or what is wrong with it.
    pub fn answers(&self, asked: &Asked, reply: &Value) -> Result<Vec<Answer>, String> {
        let Completion { model, mut choices } = Completion::deserialize(reply)
            .map_err(|error| format!("its reply is not what vLLM says to /completions: {error}"))?;
        if model != self.name {
            return Err(format!(
                "it answered with the model {model:?}, asked for {:?}: these are not the weights that train",
                self.name
            ));
        }
        choices.sort_by_key(|choice| choice.index);
        if !choices.iter().map(|choice| choice.index).eq(0..self.options.num_answers) {
            let (found, wanted) = (choices.len(), self.options.num_answers);
            return Err(format!("it gave {found} answers to a prompt, asked for {wanted} (`n`)"));
        }
        choices.into_iter().map(|choice| self.answer(asked, choice)).collect()
    }

    fn answer(&self, asked: &Asked, choice: Choice) -> Result<Answer, String> {
        let Choice { prompt_token_ids, token_ids, finish_reason, stop_reason, logprobs, .. } = choice;
        let Some(mut tokens) = token_ids else {
            return Err("its answers have no `token_ids`, and text is not made into tokens again, which may be others than those \
                        that were drawn: vLLM gives them (`return_token_ids`) from version 0.10.2 on"
                .to_owned());
        };
        if prompt_token_ids.is_some_and(|found| found != self.prompt(asked)) {
            return Err(
                "the tokens of the prompt that it answered are not those that it was sent; does it cut \
                        prompts? Its --max-model-len must be data.max_length or more"
                    .to_owned(),
            );
        }
        let is_ended = match finish_reason.as_deref() {
            Some("stop") => true,
            Some("length") => false,
            other => return Err(format!("an answer ended by {other:?}, not by \"stop\" or \"length\"")),
        };
        let log_prob = log_prob(logprobs, tokens.len())?;
        if is_ended {
            let last = tokens.last().copied();
            let ends = self.prepared.tokenizer.eos_ids();
            let left_out = match &stop_reason {
                Value::Null if last.is_none_or(|last| !ends.contains(&last)) => ends.first().copied(),
                Value::Number(id) => {
                    id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| last != Some(*id))
                }
                // A string, which leaves nothing out.
                _ => None,
            };
            tokens.extend(left_out);
        }
        let (most, vocabulary) = (self.options.max_new_tokens, self.prepared.decoder.spec().vocab_size);
        if tokens.is_empty() || tokens.len() > most {
            return Err(format!("an answer has {} tokens, not 1 to {most} (`max_tokens`)", tokens.len()));
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(format!(
                "an answer has the token {token}, and the model that trains has {vocabulary}: the server has another base"
            ));
        }
        Ok(Answer { tokens, is_ended, log_prob, ..Answer::default() })
    }

    fn prompt(&self, asked: &Asked) -> &[u32] {
        self.prepared.train.prompt(asked.row as usize).0
    }
}

/// Of all tokens that the server gave; 0 where it tells none.
fn log_prob(log_probs: Option<LogProbs>, num_tokens: usize) -> Result<f64, String> {
    let Some(LogProbs { token_logprobs }) = log_probs else { return Ok(0.0) };
    if token_logprobs.len() != num_tokens {
        let found = token_logprobs.len();
        return Err(format!("an answer has {num_tokens} tokens and log-probabilities of {found}"));
    }
    Ok(token_logprobs.into_iter().sum::<Option<f64>>().unwrap_or(0.0))
}
