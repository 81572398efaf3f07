//! Rule: a penalty for responses without EOS, as `missing_eos_penalty` of TRL's `OnlineDPOConfig`.

use serde_json::Value;

use crate::{Candidate, JudgeError, Result, Verdict};

/// Score `-penalty` for a response that the length limit ended, else 0.
#[derive(Clone, Debug, PartialEq)]
pub struct MissingEosConfig {
    /// The penalty.
    pub penalty: f64,
}

impl Default for MissingEosConfig {
    fn default() -> Self {
        Self { penalty: 1.0 }
    }
}

impl MissingEosConfig {
    /// Checks that the penalty is finite and above 0.
    pub fn check(&self, judge: &str) -> Result<()> {
        match self.penalty.is_finite() && self.penalty > 0.0 {
            true => Ok(()),
            false => {
                let reason = format!("is {}; it is subtracted and should be above 0", self.penalty);
                Err(JudgeError::option(judge, "penalty", reason))
            }
        }
    }

    pub(super) fn verdict(&self, answer: &Candidate<'_>) -> Verdict {
        match answer.is_ended {
            true => Verdict::new(0.0, Value::Null),
            false => Verdict::new(-self.penalty, "did not end"),
        }
    }
}
