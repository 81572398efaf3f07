//! Judges of the program that uses this library: functions of a prompt and a response.
//!
//! A configuration names them, so a run that resumes finds them again: a program registers its judges
//! before it reads one.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, PoisonError, RwLock};

use crate::judge::judge_each;
use crate::{Candidate, Counts, Judge, JudgeError, PromptWithCompletions, Result, Verdict};

/// Score of a response to a prompt; `None` leaves it without a score.
pub type Score = Arc<dyn Fn(&PromptWithCompletions<'_>, &Candidate<'_>) -> Option<f64> + Send + Sync>;

static OWN: RwLock<BTreeMap<String, Score>> = RwLock::new(BTreeMap::new());

/// Options of [`OwnJudge`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnConfig {
    /// Name that [`register`] was given.
    pub function: String,
}

/// A judge that calls a registered function.
pub struct OwnJudge {
    name: String,
    score: Score,
    counts: Counts,
}

/// Makes a function known as `name`, in place of an earlier one of that name. It is called on the thread
/// that judges, for one response after the other.
pub fn register(
    name: &str,
    score: impl Fn(&PromptWithCompletions<'_>, &Candidate<'_>) -> Option<f64> + Send + Sync + 'static,
) {
    OWN.write().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), Arc::new(score));
}

impl OwnConfig {
    /// Checks that the function is registered.
    ///
    /// # Errors
    /// It is not; the message has the names of those that are.
    pub fn check(&self, judge: &str) -> Result<()> {
        self.find(judge).map(drop)
    }

    fn find(&self, judge: &str) -> Result<Score> {
        let own = OWN.read().unwrap_or_else(PoisonError::into_inner);
        own.get(&self.function).cloned().ok_or_else(|| {
            let known: Vec<_> = own.keys().map(|name| format!("{name:?}")).collect();
            let known = match known[..] {
                [] => "this program registers none, as only programs that use Tandem as a library can"
                    .to_owned(),
                _ => format!("this program registers {}", known.join(", ")),
            };
            JudgeError::option(judge, "function", format!("is {:?}, and {known}", self.function))
        })
    }
}

impl OwnJudge {
    /// Finds the function.
    ///
    /// # Errors
    /// As [`OwnConfig::check`].
    pub fn new(name: impl Into<String>, config: &OwnConfig) -> Result<Self> {
        let name = name.into();
        Ok(Self { score: config.find(&name)?, name, counts: Counts::default() })
    }
}

impl Judge for OwnJudge {
    fn name(&self) -> &str {
        &self.name
    }

    fn judge(
        &mut self,
        groups: &[PromptWithCompletions<'_>],
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<Verdict>>> {
        judge_each(groups, stop, &mut self.counts, |group, answer| {
            Ok(match (self.score)(group, answer) {
                Some(score) if score.is_finite() => Verdict::new(score, ""),
                Some(score) => Verdict::none(format!("the function returned {score}")),
                None => Verdict::none("the function returned no score"),
            })
        })
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;
    use crate::Prompt;

    #[test]
    fn a_function_scores_each_response() {
        register("words", |_, answer| match answer.text.split_whitespace().count() {
            0 => None,
            3 => Some(f64::NAN),
            words => Some(words as f64),
        });
        let config = OwnConfig { function: "words".to_owned() };
        let mut judge = OwnJudge::new("own", &config).unwrap();
        let answers = ["a b", "", "a b c"].map(|text| Candidate { text, tokens: 1, is_ended: true }).to_vec();
        let row = Map::new();
        let group = PromptWithCompletions { place: "x:1", prompt: Prompt::Text("p"), row: &row, answers };
        let verdicts = judge.judge(&[group], &AtomicBool::new(false)).unwrap();
        let scores: Vec<_> = verdicts[0].iter().map(|verdict| verdict.score).collect();
        assert_eq!(scores, [Some(2.0), None, None]);
        assert_eq!((judge.counts().judged, judge.counts().unscored), (3, 2));
    }

    #[test]
    fn an_unknown_function_is_refused_with_the_known_ones() {
        register("known", |_, _| Some(0.0));
        let error = OwnConfig { function: "knwon".to_owned() }.check("own").unwrap_err().to_string();
        assert!(
            error.starts_with("judge `own`: `function` is \"knwon\", and this program registers"),
            "{error}"
        );
        assert!(error.contains("\"known\""), "{error}");
    }
}
