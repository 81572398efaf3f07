//! Rule: the length of a response.

use serde_json::json;

use crate::{Candidate, JudgeError, Result, Verdict};

/// Unit of a length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LengthUnit {
    /// Tokens, without the stop token.
    #[default]
    Tokens,
    /// Unicode characters.
    Characters,
}

/// Without `per_unit`: score 1 for a length from `min` to `max`, else 0. With it: `per_unit` times
/// the length, clamped to `min` and `max`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LengthConfig {
    /// The unit.
    pub unit: LengthUnit,
    /// Minimum.
    pub min: usize,
    /// Maximum; `None` is no limit.
    pub max: Option<usize>,
    /// Score per token or character. Negative values prefer short responses.
    pub per_unit: Option<f64>,
}

impl LengthConfig {
    /// Checks that the numbers make sense and that lengths can differ in score.
    pub fn check(&self, judge: &str) -> Result<()> {
        let Self { min, max, per_unit, .. } = *self;
        if max.is_some_and(|max| max < min) {
            let reason = format!("is {}, less than `min` = {min}", max.unwrap_or_default());
            return Err(JudgeError::option(judge, "max", reason));
        }
        if per_unit.is_some_and(|per_unit| !per_unit.is_finite() || per_unit == 0.0) {
            return Err(JudgeError::option(judge, "per_unit", "should be a finite number other than 0"));
        }
        if per_unit.is_none() && min == 0 && max.is_none() {
            let reason = "is missing: set it, `min` or `per_unit`, or every length has the same score";
            return Err(JudgeError::option(judge, "max", reason));
        }
        Ok(())
    }

    pub(super) fn verdict(&self, answer: &Candidate<'_>) -> Verdict {
        let length = match self.unit {
            LengthUnit::Tokens => answer.tokens,
            LengthUnit::Characters => answer.text.chars().count(),
        };
        let limited = length.clamp(self.min, self.max.unwrap_or(usize::MAX));
        let score = match self.per_unit {
            Some(per_unit) => per_unit * limited as f64,
            None => f64::from(limited == length),
        };
        Verdict::new(score, json!({ "length": length }))
    }
}
