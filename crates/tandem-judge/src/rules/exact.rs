//! Rule: a response equals a reference answer.

use regex::Regex;
use serde_json::json;

use super::Row;
use crate::{Candidate, JudgeError, Result, Verdict};

/// A number in common notation: digits, perhaps with thousands commas, fraction and exponent.
const NUMBER: &str =
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?";

/// Compared parts of the texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compare {
    /// The whole texts, trimmed.
    #[default]
    Text,
    /// The last number of each, as 64-bit floats: `1,200.0` is `1200`.
    LastNumber,
}

/// Score 1 if the response equals a field of the row, else 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExactConfig {
    /// Field with the reference answer.
    pub field: String,
    /// The compared parts.
    pub compare: Compare,
    /// Whether upper and lower case are equal.
    pub fold_case: bool,
}

impl ExactConfig {
    /// Checks that a field is named.
    pub fn check(&self, judge: &str) -> Result<()> {
        match self.field.is_empty() {
            true => Err(JudgeError::option(judge, "field", "is empty; name the field with the right answer")),
            false => Ok(()),
        }
    }

    pub(super) fn compile(self, judge: &str) -> Result<Exact> {
        self.check(judge)?;
        let number = Regex::new(NUMBER).expect("a constant that the tests compile");
        Ok(Exact { config: self, number })
    }
}

pub(super) struct Exact {
    config: ExactConfig,
    number: Regex,
}

impl Exact {
    pub(super) fn verdict(&self, row: &Row<'_>, answer: &Candidate<'_>) -> Result<Verdict> {
        let expected = row.text(&self.config.field)?;
        if self.config.compare == Compare::Text {
            let is_equal = self.folded(&expected) == self.folded(answer.text);
            return Ok(Verdict::new(f64::from(is_equal), json!({ "expected": expected })));
        }
        let number = self.last_number(&expected).ok_or_else(|| JudgeError::Field {
            judge: row.judge.to_owned(),
            place: row.group.place.to_owned(),
            field: self.config.field.clone(),
            found: "has no number in it".to_owned(),
        })?;
        let found = self.last_number(answer.text);
        Ok(Verdict::new(f64::from(found == Some(number)), json!({ "found": found, "expected": number })))
    }

    fn folded(&self, text: &str) -> String {
        match self.config.fold_case {
            true => text.trim().to_lowercase(),
            false => text.trim().to_owned(),
        }
    }

    /// Returns the last number of a text. A hyphen before it is a sign except between words: `5-3`
    /// ends with 3.
    fn last_number(&self, text: &str) -> Option<f64> {
        let last = self.number.find_iter(text).last()?;
        let size: f64 = last.as_str().replace(',', "").parse().ok()?;
        let mut before = text[..last.start()].chars().rev();
        let is_sign = matches!(before.next(), Some('-' | '−'));
        let is_between = before.next().is_some_and(|c| c.is_alphanumeric() || c == ')');
        Some(if is_sign && !is_between { -size } else { size })
    }
}
