//! Fields of a request. Each is taken once; a field left at the end is unsupported.

use serde_json::{Map, Value};
use tandem_data::record::Message;

use super::error::ApiError;
use crate::generation::loaded::message;

pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    pub(crate) fn read(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::invalid(None, "the request body is not a JSON object")),
            Err(error) => Err(ApiError::invalid(None, format!("the request body is not JSON: {error}"))),
        }
    }

    /// Takes a field; `None` if it is missing or null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
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

    /// Takes a boolean, false if missing.
    pub(crate) fn switch(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(switch)) => Ok(switch),
            Some(value) => Err(wrong(name, &value, "true or false")),
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

    pub(crate) fn messages(&mut self) -> Result<Vec<Message>, ApiError> {
        let invalid = |what: String| ApiError::invalid(Some("messages"), what);
        let Some(Value::Array(messages)) = self.take("messages") else {
            return Err(invalid("`messages` must be a list of messages".to_owned()));
        };
        if messages.is_empty() {
            return Err(invalid("`messages` is empty".to_owned()));
        }
        let read = |(index, value): (usize, &Value)| {
            let text = value.get("content").and_then(content);
            match (value.get("role").and_then(Value::as_str), text) {
                (Some(role), Some(text)) => Ok(message(role, &text)),
                (None, _) => Err(invalid(format!("message {index} has no `role`"))),
                (_, None) => Err(invalid(format!(
                    "message {index} has no text as its `content`: text alone is supported"
                ))),
            }
        };
        messages.iter().enumerate().map(read).collect()
    }

    /// Ends parsing. Refuses a remaining field unless its value is the default behaviour.
    pub(crate) fn end(mut self) -> Result<(), ApiError> {
        for ignored in ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"]
        {
            self.0.remove(ignored);
        }
        let is_default = |name: &str, value: &Value| match name {
            "frequency_penalty" | "presence_penalty" => value.as_f64() == Some(0.0),
            "response_format" => value["type"] == "text",
            "tools" | "functions" => value.as_array().is_some_and(Vec::is_empty),
            "tool_choice" | "function_call" => value == "none",
            "modalities" => *value == serde_json::json!(["text"]),
            "parallel_tool_calls" => true,
            "best_of" => value.as_u64() == Some(1),
            "echo" => *value == Value::Bool(false),
            "top_logprobs" => value.as_u64() == Some(0),
            _ => value.is_null(),
        };
        match self.0.iter().find(|(name, value)| !is_default(name, value)) {
            None => Ok(()),
            Some((name, _)) => Err(ApiError::invalid(
                Some(name),
                format!("`{name}` is not supported, or not with this value: remove it"),
            )),
        }
    }
}

fn wrong(name: &str, value: &Value, expected: &str) -> ApiError {
    ApiError::invalid(Some(name), format!("`{name}` is {value}, expected {expected}"))
}

/// Text content, whole or in parts.
fn content(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(|part| part.get("text")?.as_str()).collect(),
        _ => None,
    }
}
