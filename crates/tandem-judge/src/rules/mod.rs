//! Rules: judges that compute a deterministic score from the text.

mod exact;
mod json;
mod length;
mod missing_eos;
mod regex;

use std::sync::atomic::AtomicBool;

use serde_json::Value;

pub use exact::{Compare, ExactConfig};
pub use json::JsonConfig;
pub use length::{LengthConfig, LengthUnit};
pub use missing_eos::MissingEosConfig;
pub use regex::{Expect, RegexConfig};

use self::exact::Exact;
use self::regex::Pattern;
use crate::judge::judge_each;
use crate::{Candidate, Counts, Judge, JudgeError, PromptWithCompletions, Result, Verdict};

/// Kind and options of a rule.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// Length of the response.
    Length(LengthConfig),
    /// Match of a regular expression.
    Regex(RegexConfig),
    /// Equality with a reference answer.
    Exact(ExactConfig),
    /// Validity as JSON.
    Json(JsonConfig),
    /// Missing EOS.
    MissingEos(MissingEosConfig),
}

/// Judge that applies one rule.
pub struct RuleJudge {
    name: String,
    rule: CompiledRule,
    counts: Counts,
}

enum CompiledRule {
    Length(LengthConfig),
    Regex(Pattern),
    Exact(Exact),
    Json(JsonConfig),
    MissingEos(MissingEosConfig),
}

impl RuleJudge {
    /// Creates a judge; invalid options are errors.
    pub fn new(name: impl Into<String>, rule: Rule) -> Result<Self> {
        let name = name.into();
        let rule = match rule {
            Rule::Length(config) => {
                config.check(&name)?;
                CompiledRule::Length(config)
            }
            Rule::Regex(config) => CompiledRule::Regex(config.compile(&name)?),
            Rule::Exact(config) => CompiledRule::Exact(config.compile(&name)?),
            Rule::Json(config) => CompiledRule::Json(config),
            Rule::MissingEos(config) => {
                config.check(&name)?;
                CompiledRule::MissingEos(config)
            }
        };
        Ok(Self { name, rule, counts: Counts::default() })
    }
}

impl CompiledRule {
    fn verdict(&self, row: &Row<'_>, answer: &Candidate<'_>) -> Result<Verdict> {
        Ok(match self {
            Self::Length(rule) => rule.verdict(answer),
            Self::Regex(rule) => rule.verdict(row, answer)?,
            Self::Exact(rule) => rule.verdict(row, answer)?,
            Self::Json(rule) => rule.verdict(answer),
            Self::MissingEos(rule) => rule.verdict(answer),
        })
    }
}

impl Judge for RuleJudge {
    fn name(&self) -> &str {
        &self.name
    }

    fn judge(
        &mut self,
        groups: &[PromptWithCompletions<'_>],
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<Verdict>>> {
        let Self { name, rule, counts } = self;
        judge_each(groups, stop, counts, |group, answer| rule.verdict(&Row { judge: name, group }, answer))
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// A row's fields, with the context of errors.
struct Row<'a> {
    judge: &'a str,
    group: &'a PromptWithCompletions<'a>,
}

impl Row<'_> {
    /// Returns a text field, or a number as JSON writes it.
    fn text(&self, field: &str) -> Result<String> {
        let found = match self.group.row.get(field) {
            Some(Value::String(text)) => return Ok(text.clone()),
            Some(Value::Number(number)) => return Ok(number.to_string()),
            Some(Value::Null) => "is null".to_owned(),
            Some(Value::Bool(value)) => format!("is {value}"),
            Some(Value::Array(_)) => "is a list".to_owned(),
            Some(Value::Object(_)) => "is an object".to_owned(),
            None => format!("is not there (fields: {})", self.fields()),
        };
        Err(JudgeError::Field {
            judge: self.judge.to_owned(),
            place: self.group.place.to_owned(),
            field: field.to_owned(),
            found,
        })
    }

    fn fields(&self) -> String {
        match self.group.row.is_empty() {
            true => "none".to_owned(),
            false => self.group.row.keys().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", "),
        }
    }
}
