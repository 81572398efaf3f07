//! Rule: a regular expression matches a response.

use regex::Regex;
use serde_json::{Value, json};

use super::Row;
use crate::{Candidate, JudgeError, Result, Verdict};

/// Expected behaviour of the expression.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Expect {
    /// A match somewhere in the response.
    #[default]
    Match,
    /// No match.
    NoMatch,
    /// A match whose first group equals this field of the row, both trimmed.
    Group {
        /// The field.
        field: String,
    },
}

/// Score 1 if the expression behaves as expected, else 0.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RegexConfig {
    /// Expression in the syntax of the crate `regex`: no look-around, no back-references. `(?s)`
    /// lets `.` match line ends.
    pub pattern: String,
    /// The expected behaviour.
    pub expect: Expect,
}

impl RegexConfig {
    /// Checks that the expression compiles and has the required group.
    pub fn check(&self, judge: &str) -> Result<()> {
        self.compile(judge).map(drop)
    }

    pub(super) fn compile(&self, judge: &str) -> Result<Pattern> {
        let bad = |reason| JudgeError::option(judge, "pattern", reason);
        if self.pattern.is_empty() {
            return Err(bad("is empty, and would match everything".to_owned()));
        }
        let regex = Regex::new(&self.pattern)
            .map_err(|error| bad(format!("is no regular expression that is understood: {error}")))?;
        if matches!(self.expect, Expect::Group { .. }) && regex.captures_len() < 2 {
            return Err(bad(format!("`{}` has no group to compare; put (…) around it", self.pattern)));
        }
        Ok(Pattern { regex, expect: self.expect.clone() })
    }
}

pub(super) struct Pattern {
    regex: Regex,
    expect: Expect,
}

impl Pattern {
    pub(super) fn verdict(&self, row: &Row<'_>, answer: &Candidate<'_>) -> Result<Verdict> {
        let found = match &self.expect {
            Expect::Match => return Ok(self.matches(answer, true)),
            Expect::NoMatch => return Ok(self.matches(answer, false)),
            Expect::Group { field } => (row.text(field)?, self.first_group(answer.text)),
        };
        let (expected, found) = found;
        let is_equal = found.is_some_and(|found| found.trim() == expected.trim());
        let said = json!({ "found": found, "expected": expected });
        Ok(Verdict::new(f64::from(is_equal), said))
    }

    fn matches(&self, answer: &Candidate<'_>, expected: bool) -> Verdict {
        let found = self.regex.find(answer.text).map_or(Value::Null, |found| found.as_str().into());
        Verdict::new(f64::from(found.is_null() != expected), json!({ "found": found }))
    }

    fn first_group<'t>(&self, text: &'t str) -> Option<&'t str> {
        Some(self.regex.captures(text)?.get(1)?.as_str())
    }
}
