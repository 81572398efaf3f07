//! A request for the answers to a prompt, and the answers in a reply.

use serde_json::{Value, json};

use super::super::Answer;
use super::super::generate::GenerationRequest;
use super::protocol::{self, End, Protocol, ServerReply};
use crate::config::OnlineConfig;
use crate::draw::draw;
use crate::inputs::RunInputs;
use crate::metrics::Split;
use crate::objective::UNKNOWN_LOG_PROB;

/// Fields of completion requests, also used to check replies.
pub(crate) struct CompletionRequest<'a> {
    /// The adapter's name.
    pub name: &'a str,
    /// How answers are drawn.
    pub options: &'a OnlineConfig,
    /// The run's seed.
    pub seed: u64,
    /// Prompts and stop conditions.
    pub prepared: &'a RunInputs,
    /// Split of the prompts.
    pub split: Split,
    /// Answers to each.
    pub num_answers: usize,
}

impl CompletionRequest<'_> {
    /// An object with the options of drawing, which all servers call alike.
    pub(crate) fn with_sampling(&self, mut object: Value) -> Value {
        let OnlineConfig { temperature, top_k, top_p, min_p, repetition_penalty, stop, .. } = self.options;
        object["temperature"] = json!(temperature);
        object["top_k"] = json!(top_k.map_or(-1, |k| k as i64));
        object["top_p"] = json!(top_p);
        object["min_p"] = json!(min_p);
        object["repetition_penalty"] = json!(repetition_penalty);
        object["stop"] = json!(stop);
        object["stop_token_ids"] = json!(self.prepared.tokenizer.eos_ids());
        object
    }

    pub(crate) fn body(&self, asked: &GenerationRequest) -> String {
        // Servers read 64 bits with a sign, and each answer has a seed of its own, one after the
        // other.
        let seed = draw(&[self.seed, asked.step, 0, u64::from(asked.row)]) >> 2;
        self.protocol().body(self, asked, seed).to_string()
    }

    /// Parses completions of a reply, or describes its defect.
    pub(crate) fn answers(&self, asked: &GenerationRequest, reply: &Value) -> Result<Vec<Answer>, String> {
        let told = self.protocol().told(self, reply)?;
        if told.len() != self.num_answers {
            let (found, wanted) = (told.len(), self.num_answers);
            return Err(format!("it returned {found} completions of a prompt, expected {wanted}"));
        }
        told.into_iter().map(|told| self.answer(asked, told)).collect()
    }

    pub(crate) fn prompt(&self, asked: &GenerationRequest) -> &[u32] {
        self.prepared.tokens(self.split).expect("its rows are asked for").prompt_tokens(asked.row as usize)
    }

    fn answer(&self, asked: &GenerationRequest, told: ServerReply) -> Result<Answer, String> {
        let ServerReply { mut tokens, end, log_probs, prompt, prompt_length } = told;
        let sent = self.prompt(asked);
        if prompt.is_some_and(|found| found != sent) || prompt_length.is_some_and(|found| found != sent.len())
        {
            return Err(format!(
                "the prompt in its reply differs from the prompt in the request; does it cut prompts? {}",
                self.protocol().words().whole
            ));
        }
        let (log_prob, mut log_probs) = self.log_probs(log_probs, tokens.len())?;
        let (last, ends) = (tokens.last().copied(), self.prepared.tokenizer.eos_ids());
        let left_out = match end {
            End::Own if last.is_none_or(|last| !ends.contains(&last)) => ends.first().copied(),
            End::Token(id) if last != Some(id) => Some(id),
            End::Length | End::Own | End::Token(_) | End::Text => None,
        };
        tokens.extend(left_out);
        if self.options.algorithm.grpo().is_some() {
            log_probs.resize(tokens.len(), UNKNOWN_LOG_PROB);
        }
        let (most, vocabulary) = (self.options.max_new_tokens, self.prepared.decoder.spec().vocab_size);
        if matches!(end, End::Length) && tokens.len() < most {
            let (found, whole) = (tokens.len(), self.protocol().words().whole);
            return Err(format!(
                "it cut a completion at {found} tokens, before online.max_new_tokens. {whole}"
            ));
        }
        if tokens.is_empty() || tokens.len() > most {
            return Err(format!(
                "a completion has {} tokens, expected 1 to {most} (online.max_new_tokens)",
                tokens.len()
            ));
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(format!(
                "a completion has the token {token}, but the vocabulary of the policy has {vocabulary}: the server has another base"
            ));
        }
        let is_ended = !matches!(end, End::Length);
        Ok(Answer { tokens, is_ended, log_prob, log_probs, ..Answer::default() })
    }

    /// Summed log-probability of the server's tokens, 0 if it reports none, and each token's where a loss
    /// takes it.
    fn log_probs(
        &self,
        log_probs: Option<Vec<Option<f64>>>,
        num_tokens: usize,
    ) -> Result<(f64, Vec<f32>), String> {
        let is_used = self.options.algorithm.grpo().is_some();
        let Some(log_probs) = log_probs else {
            return match is_used {
                true => {
                    Err("its completions have no log-probabilities, by which method = \"grpo\" weighs them"
                        .to_owned())
                }
                false => Ok((0.0, Vec::new())),
            };
        };
        if log_probs.len() != num_tokens {
            let found = log_probs.len();
            return Err(format!("a completion has {num_tokens} tokens but {found} log-probabilities"));
        }
        if let Some(positive) = log_probs.iter().flatten().find(|log_prob| **log_prob > 1e-3) {
            return Err(format!("a completion has the log-probability {positive}, which is above 0"));
        }
        let known = |log_prob: &Option<f64>| log_prob.map_or(UNKNOWN_LOG_PROB, |known| known.min(0.0) as f32);
        let by_token = if is_used { log_probs.iter().map(known).collect() } else { Vec::new() };
        Ok((log_probs.into_iter().sum::<Option<f64>>().unwrap_or(0.0), by_token))
    }

    fn protocol(&self) -> &'static dyn Protocol {
        protocol::for_kind(self.options.server.as_ref().expect("a server").kind)
    }
}
