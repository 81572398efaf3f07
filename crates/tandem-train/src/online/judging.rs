//! Scores completions. Only rank 0 asks the judges; other ranks receive the scores.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};

use serde_json::{Map, Value};
use tandem_comm::ProcessGroup;
use tandem_judge::{Assessment, Candidate, JudgeError, Panel, Prompt, PromptWithCompletions};

use super::advantages::{EPSILON, deviation, mean};
use super::answers::{Answer, CompletedPrompt, JudgeScore};
use super::background_task::BackgroundTask;
use super::keepalive::KeepAlive;
use super::render::SampleRenderer;
use crate::Result;

/// The judges.
pub struct Judging {
    /// The panel on rank 0; `None` on other ranks.
    panel: Option<At>,
    /// The judges' names, on the first rank.
    names: Vec<String>,
    /// Stderr lines of judges' commands.
    lines: mpsc::Receiver<String>,
    /// Whether scores are also compared judge by judge.
    normalizes: bool,
    stop: Arc<AtomicBool>,
}

enum At {
    /// They wait.
    Rest(Box<Panel>),
    /// Judges run in the background, or wait for completions.
    Work(BackgroundTask<(Box<Panel>, Verdicts)>),
}

/// One entry per completion of each prompt.
type Verdicts = Result<Vec<Vec<Assessment>>, JudgeError>;

impl Judging {
    /// Creates the judging. Rank 0 has a panel, whose stderr arrives in `lines`; other ranks have
    /// none.
    /// With `normalizes`, each judge's scores are also compared with their group's.
    pub fn new(panel: Option<Panel>, lines: mpsc::Receiver<String>, normalizes: bool) -> Self {
        let names = panel.iter().flat_map(Panel::names).map(str::to_owned).collect();
        let panel = panel.map(|panel| At::Rest(Box::new(panel)));
        Self { panel, names, lines, normalizes, stop: Arc::default() }
    }

    /// Sets the names of scores that others than judges gave.
    #[must_use]
    pub fn with_names(mut self, names: Vec<String>) -> Self {
        self.names = names;
        self
    }

    /// Judges completions as they arrive, on a background thread of rank 0.
    ///
    /// # Errors
    /// The system refuses a thread.
    ///
    /// # Panics
    /// Another batch is being judged.
    pub fn begin(&mut self) -> Result<Option<Sender<JudgeRequest>>> {
        let Some(panel) = self.panel.take() else { return Ok(None) };
        let At::Rest(mut panel) = panel else { panic!("other answers are being judged") };
        let (send, receive) = mpsc::channel();
        self.stop.store(false, Ordering::Relaxed);
        let stop = self.stop.clone();
        let judge = move || {
            // A failed generation sends nothing.
            let Ok(JudgeRequest(cases)) = receive.recv() else { return (panel, Ok(Vec::new())) };
            let views: Vec<PromptWithCompletions> = cases.iter().map(Owned::view).collect();
            let verdicts = panel.judge(&views, &stop);
            (panel, verdicts)
        };
        self.panel = Some(At::Work(BackgroundTask::begin("judges", judge)?));
        Ok(Some(send))
    }

    /// Waits for the judges, and tells every rank the scores; `false` if any rank was to stop
    /// before.
    ///
    /// # Panics
    /// Nothing is being judged.
    pub fn end<'a>(
        &mut self,
        prompts: impl Iterator<Item = &'a mut CompletedPrompt>,
        group: &mut ProcessGroup,
        stop: &AtomicBool,
    ) -> Result<bool> {
        let mut answers: Vec<&mut Answer> = prompts.flat_map(|prompt| &mut prompt.answers).collect();
        let mut company = KeepAlive::new(group, stop);
        if let Some(at) = self.panel.take() {
            let At::Work(work) = at else { panic!("nothing is being judged") };
            let (panel, verdicts) = work.end(|| {
                let goes_on = company.heartbeat()?;
                self.stop.store(!goes_on, Ordering::Relaxed);
                Ok(())
            })?;
            match verdicts {
                Err(JudgeError::Stopped) => {}
                verdicts => note(&mut answers, verdicts?, self.normalizes.then_some(&*panel)),
            }
            self.panel = Some(At::Rest(panel));
        }
        if !company.end()? {
            return Ok(false);
        }
        if group.size() > 1 {
            let both = |answer: &&mut Answer| [answer.score, answer.normalized];
            let scores = answers.iter().flat_map(both).map(|score| score.unwrap_or(f64::NAN));
            let mut scores: Vec<f64> = scores.collect();
            group.broadcast(&mut scores, 0)?;
            for (answer, scores) in answers.into_iter().zip(scores.as_chunks::<2>().0) {
                [answer.score, answer.normalized] = scores.map(|score| Some(score).filter(|x| !x.is_nan()));
            }
        }
        Ok(true)
    }

    /// Drains stderr lines of judges' commands.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.lines.try_iter()
    }

    /// The judges' names, where they are.
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

impl Drop for Judging {
    /// Running judges are not waited for.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn note(answers: &mut [&mut Answer], verdicts: Vec<Vec<Assessment>>, normalizing: Option<&Panel>) {
    let normalized = normalizing
        .map(|panel| verdicts.iter().flat_map(|group| normalized(panel, group)).collect::<Vec<_>>())
        .unwrap_or_default();
    for (index, (answer, assessment)) in answers.iter_mut().zip(verdicts.into_iter().flatten()).enumerate() {
        answer.score = assessment.total;
        answer.normalized = normalized.get(index).copied().flatten();
        let opinion =
            |verdict: tandem_judge::Verdict| JudgeScore { score: verdict.score, said: verdict.said };
        answer.opinions = assessment.verdicts.into_iter().map(opinion).collect();
    }
}

/// Compares each judge's scores of a group (GDPO, arXiv 2601.05242), and sums them by weight.
fn normalized(panel: &Panel, group: &[Assessment]) -> Vec<Option<f64>> {
    let of_judge = |judge: usize| -> Vec<Option<f64>> {
        let scores = || group.iter().filter_map(|assessment| assessment.verdicts[judge].score);
        let (mean, divisor) = (mean(scores()), deviation(scores()) + EPSILON);
        let of_answer =
            |assessment: &Assessment| assessment.verdicts[judge].score.map(|score| (score - mean) / divisor);
        group.iter().map(of_answer).collect()
    };
    let judges: Vec<_> = (0..panel.names().count()).map(of_judge).collect();
    let of_answer = |(index, assessment): (usize, &Assessment)| {
        let scores: Vec<_> = judges.iter().map(|judge| judge[index]).collect();
        assessment.total.and(panel.total(&scores))
    };
    group.iter().enumerate().map(of_answer).collect()
}

/// Prompts and their answers as judges see them.
pub struct JudgeRequest(Vec<Owned>);

impl JudgeRequest {
    /// Creates the request for some prompts.
    pub fn new<'a>(
        prompts: impl Iterator<Item = &'a CompletedPrompt>,
        shown: &SampleRenderer<'_>,
    ) -> Result<Self> {
        Ok(Self(prompts.map(|answered| Owned::new(answered, shown)).collect::<Result<_>>()?))
    }
}

/// A prompt and its answers as judges see them.
struct Owned {
    place: String,
    prompt: Value,
    row: Map<String, Value>,
    /// Text, tokens, and whether it ended.
    answers: Vec<(String, usize, bool)>,
}

impl Owned {
    fn new(answered: &CompletedPrompt, shown: &SampleRenderer<'_>) -> Result<Self> {
        let mut row = shown.row(answered);
        let prompt = row.remove("prompt").unwrap_or_default();
        let answer = |answer: &Answer| Ok((shown.text(answer)?, shown.length(answer), answer.is_ended));
        let answers = answered.answers.iter().map(answer).collect::<Result<_>>()?;
        Ok(Self { place: shown.prompts.origin(answered.row as usize).to_string(), prompt, row, answers })
    }

    fn view(&self) -> PromptWithCompletions<'_> {
        let prompt = match &self.prompt {
            Value::String(text) => Prompt::Text(text),
            Value::Array(messages) => Prompt::Messages(messages),
            other => unreachable!("a prompt is a text or messages, not {other}"),
        };
        let candidates =
            self.answers.iter().map(|&(ref text, tokens, is_ended)| Candidate { text, tokens, is_ended });
        let answers = candidates.collect();
        PromptWithCompletions { place: &self.place, prompt, row: &self.row, answers }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use tandem_judge::{Counts, Judge, Member, Verdict};

    use super::*;

    struct Unasked(String);

    impl Judge for Unasked {
        fn name(&self) -> &str {
            &self.0
        }

        fn judge(
            &mut self,
            _groups: &[PromptWithCompletions<'_>],
            _stop: &AtomicBool,
        ) -> tandem_judge::Result<Vec<Vec<Verdict>>> {
            unreachable!("its scores are given")
        }

        fn counts(&self) -> Counts {
            Counts::default()
        }
    }

    /// Judges of these weights, who may abstain.
    pub(crate) fn panel(weights: &[f64]) -> Panel {
        let member = |(index, &weight): (usize, &f64)| Member {
            judge: Box::new(Unasked(index.to_string())),
            weight,
            may_abstain: true,
        };
        Panel::new(weights.iter().enumerate().map(member).collect()).unwrap()
    }

    /// Compares the scores of a group, by answer and judge.
    pub(crate) fn normalized_scores(panel: &Panel, scores: &[[Option<f64>; 2]]) -> Vec<Option<f64>> {
        let verdict = |&score: &Option<f64>| Verdict { score, said: Value::Null };
        let assessment = |scores: &[Option<f64>; 2]| Assessment {
            total: panel.total(scores),
            verdicts: scores.iter().map(verdict).collect(),
        };
        normalized(panel, &scores.iter().map(assessment).collect::<Vec<_>>())
    }
}
