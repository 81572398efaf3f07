//! Fields of a request. Each is taken once; a field left at the end is unsupported.

use serde_json::{Map, Value};
use tandem_data::record::Message;

use super::error::{ApiError, clip};
use super::json::{self, Prompt};
use crate::generation::loaded::message;

/// Roles of OpenAI's interface. Templates pass over others, or write them as they are.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

pub(crate) struct Fields {
    prompt: Option<Vec<Prompt>>,
    rest: Map<String, Value>,
}

impl Fields {
    pub(crate) fn read(body: &[u8], max_prompts: usize) -> Result<Self, ApiError> {
        let json::Body { prompt, fields } = json::read(body, max_prompts)?;
        Ok(Self { prompt, rest: fields })
    }

    /// Takes a field; `None` if it is missing or null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.rest.remove(name).filter(|value| !value.is_null())
    }

    /// Takes the prompts of a text completion.
    pub(crate) fn prompts(&mut self) -> Result<Vec<Prompt>, ApiError> {
        self.prompt.take().ok_or_else(|| ApiError::invalid(Some("prompt"), "`prompt` is missing"))
    }

    pub(crate) fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_f64().filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None => Err(wrong(name, &value, &format!("a number from {least} to {most}"))),
        }
    }

    /// Takes an integer in a range.
    pub(crate) fn count(&mut self, name: &str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().filter(|count| (least..=most).contains(count)) {
            Some(count) => Ok(Some(count)),
            None => Err(wrong(name, &value, &format!("a whole number from {least} to {most}"))),
        }
    }

    /// Takes a whole number of 64 bits, with a sign or without.
    pub(crate) fn seed(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned)) {
            Some(seed) => Ok(Some(seed)),
            None => Err(wrong(name, &value, "a whole number of 64 bits")),
        }
    }

    /// Takes a boolean, false if missing.
    pub(crate) fn switch(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(switch)) => Ok(switch),
            Some(value) => Err(wrong(name, &value, "true or false")),
        }
    }

    /// Takes a string.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => Err(wrong(name, &value, "a string")),
        }
    }

    /// Takes a string or a list of strings.
    pub(crate) fn texts(&mut self, name: &str) -> Result<Vec<String>, ApiError> {
        let texts = match self.take(name) {
            None => Some(Vec::new()),
            Some(Value::String(text)) => Some(vec![text]),
            Some(Value::Array(list)) => {
                list.into_iter().map(|text| Some(text.as_str()?.to_owned())).collect()
            }
            Some(_) => None,
        };
        texts.ok_or_else(|| {
            ApiError::invalid(Some(name), format!("`{name}` must be a string or a list of strings"))
        })
    }

    /// Takes the messages of a conversation.
    pub(crate) fn messages(&mut self) -> Result<Vec<Message>, ApiError> {
        let invalid = |what: String| ApiError::invalid(Some("messages"), what);
        let Some(Value::Array(messages)) = self.take("messages") else {
            return Err(invalid("`messages` must be a list of messages".to_owned()));
        };
        if messages.is_empty() {
            return Err(invalid("`messages` is empty".to_owned()));
        }
        let read =
            |(index, value)| read_message(value).map_err(|why| invalid(format!("message {index} {why}")));
        messages.iter().enumerate().map(read).collect()
    }

    /// Ends parsing. Refuses a remaining field unless its value is the default behaviour.
    pub(crate) fn end(mut self) -> Result<(), ApiError> {
        for ignored in ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"]
        {
            self.rest.remove(ignored);
        }
        let is_default = |name: &str, value: &Value| match name {
            "frequency_penalty" | "presence_penalty" => value.as_f64() == Some(0.0),
            "response_format" => value["type"] == "text",
            "tools" | "functions" => value.as_array().is_some_and(Vec::is_empty),
            "logit_bias" => value.as_object().is_some_and(Map::is_empty),
            "tool_choice" | "function_call" => value == "none",
            "modalities" => *value == serde_json::json!(["text"]),
            "parallel_tool_calls" => true,
            "best_of" => value.as_u64() == Some(1),
            "echo" => *value == Value::Bool(false),
            "top_logprobs" => value.as_u64() == Some(0),
            _ => false,
        };
        let unknown = self.rest.iter().find(|(name, value)| !value.is_null() && !is_default(name, value));
        let unknown = unknown.map(|(name, _)| name.as_str()).or(self.prompt.as_ref().map(|_| "prompt"));
        match unknown {
            None => Ok(()),
            Some(name) => Err(ApiError::invalid(
                Some(name),
                format!("`{}` is not supported, or not with this value: remove it", clip(name)),
            )),
        }
    }
}

fn wrong(name: &str, value: &Value, expected: &str) -> ApiError {
    let value = clip(&value.to_string());
    ApiError::invalid(Some(name), format!("`{name}` is {value}, expected {expected}"))
}

/// Reads a message; the error continues "message 3 …".
fn read_message(value: &Value) -> Result<Message, String> {
    let Value::Object(fields) = value else {
        return Err(format!("is {}, expected an object", clip(&value.to_string())));
    };
    let role = match fields.get("role") {
        None | Some(Value::Null) => return Err("has no `role`".to_owned()),
        Some(Value::String(role)) if ROLES.contains(&role.as_str()) => role,
        Some(other) => {
            return Err(format!(
                "has the role {}, expected one of {}",
                clip(&other.to_string()),
                ROLES.join(", ")
            ));
        }
    };
    let Some(text) = fields.get("content").and_then(content) else {
        return Err("has no text as its `content`: text alone is supported".to_owned());
    };
    let mut message = message(role, &text);
    for (name, value) in fields {
        match (name.as_str(), value) {
            ("role" | "content", _) | (_, Value::Null) => {}
            // Answers are sent back as they came.
            (_, Value::Array(list)) if list.is_empty() => {}
            ("name", Value::String(_)) => drop(message.insert(name.clone(), value.clone())),
            _ => return Err(format!("has a field {:?}, which is not supported: remove it", clip(name))),
        }
    }
    Ok(message)
}

/// Text content, whole or in parts.
fn content(value: &Value) -> Option<String> {
    let part = |part: &Value| {
        let text = part.get("text")?.as_str()?;
        part.get("type").is_none_or(|kind| kind == "text").then(|| text.to_owned())
    };
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) if !parts.is_empty() => parts.iter().map(part).collect(),
        _ => None,
    }
}
