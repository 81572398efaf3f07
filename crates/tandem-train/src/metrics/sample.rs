//! An answer of the model to a row's prompt, for people to read.

use serde_json::{Map, Value};

use super::Split;

/// One line of `samples.jsonl` of a run that trains on given answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Data that the row is of.
    pub split: Split,
    /// File and line of the row.
    pub place: String,
    /// Row, counted from 0 over the rows that are kept.
    pub row: u32,
    /// Text of the prompt as the model sees it, special tokens included.
    pub prompt: String,
    /// The model's answer.
    pub answer: String,
    /// Tokens of the answer but the one that ends it.
    pub num_tokens: usize,
    /// Whether the answer ended by itself.
    pub is_ended: bool,
    /// The row's own answer: the chosen one of a pair.
    pub chosen: String,
    /// The rejected answer of a pair.
    pub rejected: Option<String>,
}

impl Sample {
    /// The line's object: `answers` has the form of an online run's.
    pub fn to_json(&self, step: u64) -> Value {
        let answer = [
            ("text", Value::from(self.answer.as_str())),
            ("tokens", self.num_tokens.into()),
            ("ended", self.is_ended.into()),
        ];
        let answer: Map<String, Value> =
            answer.map(|(key, value)| (key.to_owned(), value)).into_iter().collect();
        let line = [
            ("step", Value::from(step)),
            ("split", self.split.name().into()),
            ("place", self.place.as_str().into()),
            ("row", self.row.into()),
            ("prompt", self.prompt.as_str().into()),
            ("answers", vec![Value::Object(answer)].into()),
            ("chosen", self.chosen.as_str().into()),
        ];
        let rejected = self.rejected.as_deref().map(|text| ("rejected", Value::from(text)));
        Value::Object(line.into_iter().chain(rejected).map(|(key, value)| (key.to_owned(), value)).collect())
    }
}
