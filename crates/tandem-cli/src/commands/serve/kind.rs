//! Chat and text completions as JSON.

use serde_json::{Value, json};
use tandem_data::tokenizer::Tokenizer;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

/// Header of every completion object.
#[derive(Clone, Debug)]
pub(crate) struct Heading {
    /// Kind.
    pub kind: Kind,
    /// Id of the completion.
    pub id: String,
    /// Creation time, seconds since 1970.
    pub created: u64,
    /// Model name.
    pub model: String,
}

impl Heading {
    /// Complete response object.
    pub(crate) fn whole(&self, choices: Vec<Value>, usage: Value) -> Value {
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Text => "text_completion",
        };
        let Self { id, created, model, .. } = self;
        json!({ "id": id, "object": object, "created": created, "model": model, "choices": choices, "usage": usage })
    }

    /// Stream chunk object.
    pub(crate) fn part(&self, choices: Vec<Value>, usage: Option<Value>) -> Value {
        let object = match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Text => "text_completion",
        };
        let Self { id, created, model, .. } = self;
        let mut part =
            json!({ "id": id, "object": object, "created": created, "model": model, "choices": choices });
        if let Some(usage) = usage {
            part["usage"] = usage;
        }
        part
    }
}

impl Kind {
    pub(crate) fn choice(self, index: usize, text: &str, log_probs: Value, finish: &str) -> Value {
        match self {
            Self::Chat => json!({
                "index": index, "message": { "role": "assistant", "content": text, "refusal": null }, "logprobs": log_probs,
                "finish_reason": finish
            }),
            Self::Text => {
                json!({ "index": index, "text": text, "logprobs": log_probs, "finish_reason": finish })
            }
        }
    }

    /// First chunk of a streamed choice, if its kind has one.
    pub(crate) fn beginning(self, index: usize) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "" });
        (self == Self::Chat)
            .then(|| json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": null }))
    }

    pub(crate) fn delta(self, index: usize, text: &str, log_probs: Value, finish: Option<&str>) -> Value {
        match self {
            Self::Chat => {
                let delta = if text.is_empty() { json!({}) } else { json!({ "content": text }) };
                json!({ "index": index, "delta": delta, "logprobs": log_probs, "finish_reason": finish })
            }
            Self::Text => {
                json!({ "index": index, "text": text, "logprobs": log_probs, "finish_reason": finish })
            }
        }
    }

    /// Log-probabilities of tokens that begin `offset` characters behind the start of a completion, which is moved
    /// behind them.
    pub(crate) fn log_probs(self, tokenizer: &Tokenizer, tokens: &[(u32, f32)], offset: &mut usize) -> Value {
        let text = |id: u32| tokenizer.text_inside(id, false).unwrap_or_default();
        match self {
            Self::Chat => {
                let content: Vec<Value> = tokens
                    .iter()
                    .map(|(id, log_prob)| {
                        let bytes = tokenizer.bytes(*id).unwrap_or_default();
                        json!({ "token": text(*id), "logprob": log_prob, "bytes": bytes, "top_logprobs": [] })
                    })
                    .collect();
                json!({ "content": content, "refusal": null })
            }
            Self::Text => {
                let (mut texts, mut offsets) = (Vec::new(), Vec::new());
                for (id, _) in tokens {
                    offsets.push(*offset);
                    // The text leaves special tokens out. Of the tokens of a character the first counts it.
                    let is_shown = tokenizer.text_inside(*id, true).is_ok_and(|text| !text.is_empty());
                    if is_shown {
                        let bytes = tokenizer.bytes(*id).unwrap_or_default();
                        *offset += bytes.iter().filter(|byte| *byte & 0xc0 != 0x80).count();
                    }
                    texts.push(text(*id));
                }
                let log_probs: Vec<f32> = tokens.iter().map(|(_, log_prob)| *log_prob).collect();
                json!({ "tokens": texts, "token_logprobs": log_probs, "top_logprobs": null, "text_offset": offsets })
            }
        }
    }
}
