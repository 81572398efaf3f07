//! Rule: a response is valid JSON.

use serde_json::Value;

use crate::{Candidate, Verdict};

/// Score 1 for a response that is one JSON value, with all `keys` if there are some, else 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JsonConfig {
    /// Required keys.
    pub keys: Vec<String>,
}

impl JsonConfig {
    pub(super) fn verdict(&self, answer: &Candidate<'_>) -> Verdict {
        let value: Value = match serde_json::from_str(answer.text) {
            Ok(value) => value,
            Err(error) => return Verdict::new(0.0, format!("not JSON: {error}")),
        };
        match self.keys.iter().find(|key| value.get(key.as_str()).is_none()) {
            Some(key) => Verdict::new(0.0, format!("no key `{key}`")),
            None => Verdict::new(1.0, Value::Null),
        }
    }
}
