//! Panel of several judges; the total is the weighted sum of their scores.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use crate::{Counts, Judge, JudgeError, PromptWithCompletions, Result, Verdict};

/// A judge and its weight.
pub struct Member {
    /// The judge.
    pub judge: Box<dyn Judge>,
    /// Factor of its scores. At 0 its verdicts are stored but do not count.
    pub weight: f64,
    /// Whether a response without a score of this judge is scored by the others.
    pub may_abstain: bool,
}

/// Judges with weights.
pub struct Panel {
    members: Vec<Member>,
}

/// Assessment of one response.
#[derive(Clone, Debug, PartialEq)]
pub struct Assessment {
    /// Weighted sum of the scores. `None` if a judge that counts and may not abstain has no score, no judge
    /// has one, or the sum is not finite.
    pub total: Option<f64>,
    /// The verdicts, in the panel's order.
    pub verdicts: Vec<Verdict>,
}

impl Panel {
    /// Creates a panel.
    ///
    /// # Errors
    /// If no score counts, a weight is not finite, or two judges have one name.
    pub fn new(members: Vec<Member>) -> Result<Self> {
        let mut names = HashSet::new();
        for Member { judge, weight, .. } in &members {
            let name = judge.name();
            if !weight.is_finite() {
                let reason = format!("is {weight}; it should be a finite number");
                return Err(JudgeError::option(name, "weight", reason));
            }
            if !names.insert(name) {
                return Err(JudgeError::Panel(format!(
                    "has two judges `{name}`; give each a name of its own"
                )));
            }
        }
        if members.iter().all(|member| member.weight == 0.0) {
            let reason = "has no judge whose score counts; give one a weight other than 0";
            return Err(JudgeError::Panel(reason.to_owned()));
        }
        Ok(Self { members })
    }

    /// Returns the judges' names, in the order of [`Assessment::verdicts`].
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|member| member.judge.name())
    }

    /// Returns the work of each judge since it was built.
    pub fn counts(&self) -> impl Iterator<Item = (&str, Counts)> {
        self.members.iter().map(|member| (member.judge.name(), member.judge.counts()))
    }

    /// Assesses each response of each group, in order; the judges work one after another.
    ///
    /// # Errors
    /// A judge fails, or one that counts and may not abstain scores none of the responses.
    pub fn judge(
        &mut self,
        groups: &[PromptWithCompletions<'_>],
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<Assessment>>> {
        let empty = Assessment { total: None, verdicts: Vec::with_capacity(self.members.len()) };
        let mut assessments: Vec<_> =
            groups.iter().map(|group| vec![empty.clone(); group.answers.len()]).collect();
        for Member { judge, weight, may_abstain } in &mut self.members {
            let said = judge.judge(groups, stop)?;
            let is_whole = said.iter().map(Vec::len).eq(groups.iter().map(|group| group.answers.len()));
            assert!(is_whole, "judge `{}` did not give one verdict for each answer", judge.name());
            if let Some(last) = said.iter().flatten().last()
                && *weight != 0.0
                && !*may_abstain
                && said.iter().flatten().all(|verdict| verdict.score.is_none())
            {
                return Err(JudgeError::NoScore {
                    judge: judge.name().to_owned(),
                    answers: said.iter().map(Vec::len).sum(),
                    reason: last.said.as_str().map_or_else(|| last.said.to_string(), str::to_owned),
                });
            }
            for (assessment, verdict) in assessments.iter_mut().flatten().zip(said.into_iter().flatten()) {
                assessment.verdicts.push(verdict);
            }
        }
        for assessment in assessments.iter_mut().flatten() {
            let scores: Vec<_> = assessment.verdicts.iter().map(|verdict| verdict.score).collect();
            assessment.total = self.total(&scores);
        }
        Ok(assessments)
    }

    /// Returns the weighted sum of a response's scores, one of each judge; see [`Assessment::total`].
    pub fn total(&self, scores: &[Option<f64>]) -> Option<f64> {
        let mut total = None;
        for (Member { weight, may_abstain, .. }, score) in self.members.iter().zip(scores) {
            match score {
                _ if *weight == 0.0 => {}
                Some(score) => total = Some(total.unwrap_or(0.0) + weight * score),
                None if *may_abstain => {}
                None => return None,
            }
        }
        total.filter(|total| total.is_finite())
    }
}
