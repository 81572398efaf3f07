//! Options shared by chat and text completions.

use serde_json::Value;
use tandem_model::{Request, Sampling};

use super::error::ApiError;
use super::fields::Fields;
use crate::generation::{Loaded, new_seed};

const MOST_ANSWERS: u64 = 128;

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
}

impl CompletionRequest {
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let most = fields.count("max_completion_tokens", 1, 1 << 32)?;
        let most = most.or(fields.count("max_tokens", 1, 1 << 32)?);
        let sampling = Sampling {
            temperature: fields.number("temperature", 0.0, 100.0)?.unwrap_or(1.0) as f32,
            top_p: fields.number("top_p", 1e-6, 1.0)?.unwrap_or(1.0) as f32,
            top_k: fields.count("top_k", 1, 1 << 32)?.map(|k| k as usize),
            min_p: fields.number("min_p", 0.0, 1.0)?.unwrap_or(0.0) as f32,
            repetition_penalty: fields.number("repetition_penalty", 1e-3, 1e3)?.unwrap_or(1.0) as f32,
            seed: fields.count("seed", 0, u64::MAX)?.unwrap_or_else(new_seed),
        };
        let stream = fields.switch("stream")?;
        let include_usage = include_usage(fields.take("stream_options"))?;
        Ok(Self {
            num_answers: fields.count("n", 1, MOST_ANSWERS)?.unwrap_or(1) as usize,
            stream,
            include_usage,
            stop: fields.texts("stop")?,
            sampling,
            max_new_tokens: most.map(|most| most as usize),
        })
    }

    /// Creates the engine's request for a prompt. Without a limit a completion may use all
    /// remaining positions.
    pub(crate) fn request(&self, model: &Loaded, number: u64, prompt: Vec<u32>) -> Result<Request, ApiError> {
        let (tokens, positions) = (prompt.len(), model.room().positions);
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

/// Parses `stream_options`; its only supported key is `include_usage`.
fn include_usage(options: Option<Value>) -> Result<bool, ApiError> {
    let invalid = |what: String| Err(ApiError::invalid(Some("stream_options"), what));
    let Some(options) = options else { return Ok(false) };
    let Value::Object(options) = options else {
        return invalid(format!("`stream_options` is {options}, expected an object"));
    };
    let mut include = false;
    for (name, value) in &options {
        match (name.as_str(), value) {
            ("include_usage", Value::Bool(wanted)) => include = *wanted,
            ("include_usage" | "include_obfuscation", Value::Null | Value::Bool(false)) => {}
            _ => return invalid(format!("`stream_options.{name}` = {value} is not supported; leave it out")),
        }
    }
    Ok(include)
}
