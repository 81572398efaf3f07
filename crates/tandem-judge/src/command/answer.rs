//! Parser of a command's output lines.

use regex::bytes::Regex;
use serde_json::Value;

use super::round::CommandBatch;
use crate::Verdict;
use crate::judge::beginning;

/// Maximum characters kept of an invalid line.
const KEPT: usize = 200;

/// A command's reply to an item.
pub(crate) trait Reply: Clone {
    /// Reads a reply, or says what is wrong with it.
    fn read(answer: &Value) -> Result<Self, &'static str>;

    /// Stands for a reply that is missing, with the reason.
    fn none(why: String) -> Self;
}

impl Reply for Verdict {
    fn read(answer: &Value) -> Result<Self, &'static str> {
        let reason = answer["reason"].clone();
        match answer.get("score") {
            Some(Value::Number(score)) => match score.as_f64().filter(|score| score.is_finite()) {
                Some(score) => Ok(Self::new(score, reason)),
                None => Err("the score is too large"),
            },
            Some(Value::Null) if reason.is_null() => {
                Ok(Self::none("the command gave no score and no reason"))
            }
            Some(Value::Null) => Ok(Self::none(reason)),
            Some(_) => Err("the score is no number"),
            None => Err("there is no `score`"),
        }
    }

    fn none(why: String) -> Self {
        Self::none(why)
    }
}

pub(super) struct Parser {
    /// Finds the item's id in a line that is not JSON, as with Python's `NaN`.
    id: Regex,
}

impl Parser {
    pub(super) fn new() -> Self {
        Self { id: Regex::new(r#""id"\s*:\s*([0-9]+)"#).expect("a constant that the tests compile") }
    }

    /// Passes a line to the round; returns whether it answered an item.
    pub(super) fn take<R: Reply>(&self, line: &[u8], round: &mut CommandBatch<R>) -> bool {
        let line = line.trim_ascii();
        if line.is_empty() {
            return false;
        }
        let text = String::from_utf8_lossy(line);
        let none = |why: &str| R::none(format!("{why}: {}", beginning(&text, KEPT)));
        let (id, reply) = match serde_json::from_slice::<Value>(line) {
            Ok(answer) => (answer["id"].as_u64(), R::read(&answer).unwrap_or_else(none)),
            Err(error) => {
                let found = self.id.captures(line).and_then(|found| found.get(1));
                let id = found.and_then(|id| std::str::from_utf8(id.as_bytes()).ok()?.parse().ok());
                (id, none(&format!("not JSON ({error})")))
            }
        };
        let is_answer = id.is_some_and(|id| round.answered(id, reply));
        if !is_answer {
            round.record_invalid_line(format!(
                "received a line that answers no item: {}",
                beginning(&text, KEPT)
            ));
        }
        is_answer
    }
}
