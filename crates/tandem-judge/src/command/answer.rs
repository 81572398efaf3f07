//! Parser of a command's output lines.

use regex::bytes::Regex;
use serde_json::Value;

use super::round::CommandBatch;
use crate::Verdict;
use crate::judge::beginning;

/// Maximum characters kept of an invalid line.
const KEPT: usize = 200;

pub(super) struct Parser {
    /// Finds the item's id in a line that is not JSON, as with Python's `NaN`.
    id: Regex,
}

impl Parser {
    pub(super) fn new() -> Self {
        Self { id: Regex::new(r#""id"\s*:\s*([0-9]+)"#).expect("a constant that the tests compile") }
    }

    /// Passes a line to the round; returns whether it answered an item.
    pub(super) fn take(&self, line: &[u8], round: &mut CommandBatch) -> bool {
        let line = line.trim_ascii();
        if line.is_empty() {
            return false;
        }
        let text = String::from_utf8_lossy(line);
        let (id, verdict) = match serde_json::from_slice::<Value>(line) {
            Ok(answer) => (answer["id"].as_u64(), verdict(&answer, &text)),
            Err(error) => {
                let found = self.id.captures(line).and_then(|found| found.get(1));
                let id = found.and_then(|id| std::str::from_utf8(id.as_bytes()).ok()?.parse().ok());
                (id, none(&format!("not JSON ({error})"), &text))
            }
        };
        let is_answer = id.is_some_and(|id| round.answered(id, verdict));
        if !is_answer {
            round.record_invalid_line(format!(
                "received a line that answers no item: {}",
                beginning(&text, KEPT)
            ));
        }
        is_answer
    }
}

fn verdict(answer: &Value, line: &str) -> Verdict {
    let reason = answer["reason"].clone();
    match answer.get("score") {
        Some(Value::Number(score)) => match score.as_f64().filter(|score| score.is_finite()) {
            Some(score) => Verdict::new(score, reason),
            None => none("the score is too large", line),
        },
        Some(Value::Null) if reason.is_null() => Verdict::none("the command gave no score and no reason"),
        Some(Value::Null) => Verdict::none(reason),
        Some(_) => none("the score is no number", line),
        None => none("there is no `score`", line),
    }
}

fn none(why: &str, line: &str) -> Verdict {
    Verdict::none(format!("{why}: {}", beginning(line, KEPT)))
}
