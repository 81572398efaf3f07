//! Whether a regular expression matches an answer.

use regex::Regex;
use serde_json::{Value, json};

use super::Row;
use crate::{Candidate, JudgeError, Result, Verdict};

/// What the expression should do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Expect {
    /// Match somewhere in the answer.
    #[default]
    Match,
    /// Match nowhere.
    NoMatch,
    /// Match, and the first group of the first match equals this field of the row, both without blanks around them.
    Group {
        /// The field.
        field: String,
    },
}

/// 1 where the expression does what is expected, 0 where not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RegexConfig {
    /// The expression, in the syntax of the crate `regex`: no look-around, no back-references. `(?s)` lets `.` match line ends.
    pub pattern: String,
    /// What it should do.
    pub expect: Expect,
}

impl RegexConfig {
    /// Whether the expression can be compiled and has the group that is asked for.
    ///
    /// # Errors
    /// If not, with the place in it.
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

/// A compiled expression.
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
        Ok(Verdict::of(f64::from(is_equal), said))
    }

    fn matches(&self, answer: &Candidate<'_>, expected: bool) -> Verdict {
        let found = self.regex.find(answer.text).map_or(Value::Null, |found| found.as_str().into());
        Verdict::of(f64::from(found.is_null() != expected), json!({ "found": found }))
    }

    fn first_group<'t>(&self, text: &'t str) -> Option<&'t str> {
        Some(self.regex.captures(text)?.get(1)?.as_str())
    }
}
