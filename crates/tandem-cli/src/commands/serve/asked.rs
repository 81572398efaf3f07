//! Options shared by chat and text completions.

use serde_json::Value;
use tandem_model::{Request, Sampling};

use super::error::{ApiError, clip};
use super::fields::Fields;
use super::limits::LimitArguments;
use crate::generation::{Loaded, new_seed};

/// Sampling and stream options of a request.
pub(crate) struct CompletionRequest {
    /// Completions per prompt.
    pub num_answers: usize,
    /// Whether the response is streamed.
    pub stream: bool,
    /// Whether the last chunk reports token usage.
    pub include_usage: bool,
    /// Stop strings.
    pub stop: Vec<String>,
    sampling: Sampling,
    max_new_tokens: Option<usize>,
    /// Most tokens of all its completions.
    max_total: usize,
}

impl CompletionRequest {
    pub(crate) fn take(
        fields: &mut Fields,
        limits: &LimitArguments,
        positions: usize,
    ) -> Result<Self, ApiError> {
        let most = fields.count("max_completion_tokens", 1, 1 << 32)?;
        let most = match (most, fields.count("max_tokens", 1, 1 << 32)?) {
            (Some(most), Some(other)) if most != other => {
                return Err(ApiError::invalid(
                    Some("max_tokens"),
                    format!(
                        "`max_tokens` is {other}, but `max_completion_tokens` is {most}: give one of them"
                    ),
                ));
            }
            (most, other) => most.or(other),
        };
        let sampling = Sampling {
            temperature: fields.number("temperature", 0.0, 100.0)?.unwrap_or(1.0) as f32,
            // 0 is the most likely token, as the least number above is.
            top_p: (fields.number("top_p", 0.0, 1.0)?.unwrap_or(1.0) as f32).max(f32::MIN_POSITIVE),
            top_k: fields.count("top_k", 1, 1 << 32)?.map(|k| k as usize),
            min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0) as f32,
            repetition_penalty: fields.number("repetition_penalty", 1e-3, 1e3)?.unwrap_or(1.0) as f32,
            seed: fields.seed("seed")?.unwrap_or_else(new_seed),
        };
        let stream = fields.switch("stream")?;
        let include_usage = include_usage(fields.take("stream_options"))?;
        Ok(Self {
            num_answers: fields.count("n", 1, limits.max_n.get() as u64)?.unwrap_or(1) as usize,
            stream,
            include_usage,
            stop: stop_strings(fields, limits)?,
            sampling,
            max_new_tokens: most.map(|most| most as usize),
            max_total: limits.request_tokens(positions),
        })
    }

    /// Checks the tokens of all completions of `num_prompts` prompts. Without a limit of its own each has
    /// `left` tokens.
    pub(crate) fn check_total(&self, num_prompts: usize, left: usize) -> Result<(), ApiError> {
        let (num_answers, most) = (self.num_answers, self.max_new_tokens.unwrap_or(left));
        let total = num_prompts.saturating_mul(num_answers).saturating_mul(most);
        if total <= self.max_total {
            return Ok(());
        }
        Err(ApiError::invalid(
            None,
            format!(
                "{num_prompts} prompts × {num_answers} completions × {most} tokens are {total} tokens, more than {} \
                 (--max-request-tokens); lower `n` or `max_tokens`",
                self.max_total
            ),
        ))
    }

    /// Creates the engine's requests for all prompts.
    pub(crate) fn requests(&self, model: &Loaded, prompts: Vec<Vec<u32>>) -> Result<Vec<Request>, ApiError> {
        let shortest = prompts.iter().map(Vec::len).min().unwrap_or(0);
        self.check_total(prompts.len(), model.room().positions.saturating_sub(shortest))?;
        (0..).zip(prompts).map(|(number, prompt)| self.request(model, number, prompt)).collect()
    }

    /// Creates the engine's request for a prompt. Without a limit a completion may use all
    /// remaining positions.
    fn request(&self, model: &Loaded, number: u64, prompt: Vec<u32>) -> Result<Request, ApiError> {
        let (tokens, positions) = (prompt.len(), model.room().positions);
        if tokens == 0 {
            return Err(ApiError::invalid(
                Some("prompt"),
                "a prompt has no tokens: write something to continue",
            ));
        }
        let left = positions.saturating_sub(tokens);
        let wanted = self.max_new_tokens.unwrap_or(left.max(1));
        if wanted > left {
            return Err(ApiError::invalid(
                None,
                format!(
                    "the prompt has {tokens} tokens and the answer up to {wanted}: this server has room for {positions} together \
                     (--context)"
                ),
            ));
        }
        Ok(Request {
            prompt,
            number,
            num_answers: self.num_answers,
            sampling: self.sampling,
            max_new_tokens: wanted,
            stop: model.tokenizer().eos_ids().to_vec(),
        })
    }
}

/// Takes stop strings within the limits.
fn stop_strings(fields: &mut Fields, limits: &LimitArguments) -> Result<Vec<String>, ApiError> {
    let stop = fields.texts("stop")?;
    let invalid = |what: String| Err(ApiError::invalid(Some("stop"), what));
    let (most, most_bytes) = (limits.max_stop_strings.get(), limits.max_stop_bytes.get());
    if stop.len() > most {
        return invalid(format!("`stop` has {} strings, more than {most} (--max-stop-strings)", stop.len()));
    }
    match stop.iter().position(|text| text.is_empty() || text.len() > most_bytes) {
        None => Ok(stop),
        Some(index) => invalid(format!(
            "string {index} of `stop` has {} bytes, expected 1 to {most_bytes} (--max-stop-bytes)",
            stop[index].len()
        )),
    }
}

/// Parses `stream_options`; its only supported key is `include_usage`.
fn include_usage(options: Option<Value>) -> Result<bool, ApiError> {
    let invalid = |what: String| Err(ApiError::invalid(Some("stream_options"), what));
    let Some(options) = options else { return Ok(false) };
    let Value::Object(options) = options else {
        return invalid(format!("`stream_options` is {}, expected an object", clip(&options.to_string())));
    };
    let mut include = false;
    for (name, value) in &options {
        match (name.as_str(), value) {
            ("include_usage", Value::Bool(wanted)) => include = *wanted,
            ("include_usage" | "include_obfuscation", Value::Null | Value::Bool(false)) => {}
            _ => {
                let (name, value) = (clip(name), clip(&value.to_string()));
                return invalid(format!("`stream_options.{name}` = {value} is not supported; leave it out"));
            }
        }
    }
    Ok(include)
}
