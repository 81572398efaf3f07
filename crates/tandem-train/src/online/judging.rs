//! Scores completions. Only rank 0 asks the judges; other ranks receive the scores.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};

use serde_json::{Map, Value};
use tandem_comm::ProcessGroup;
use tandem_judge::{Assessment, Candidate, JudgeError, Panel, Prompt, PromptWithCompletions};

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
    pub fn new(panel: Option<Panel>, lines: mpsc::Receiver<String>) -> Self {
        let names = panel.iter().flat_map(Panel::names).map(str::to_owned).collect();
        Self { panel: panel.map(|panel| At::Rest(Box::new(panel))), names, lines, stop: Arc::default() }
    }

    /// Judges completions as they arrive, on a background thread of rank 0.
    ///
    /// # Panics
    /// Another batch is being judged.
    pub fn begin(&mut self) -> Option<Sender<JudgeRequest>> {
        let At::Rest(mut panel) = self.panel.take()? else { panic!("other answers are being judged") };
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
        self.panel = Some(At::Work(BackgroundTask::begin("judges", judge)));
        Some(send)
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
            self.panel = Some(At::Rest(panel));
            match verdicts {
                Err(JudgeError::Stopped) => {}
                verdicts => note(&mut answers, verdicts?),
            }
        }
        if !company.end()? {
            return Ok(false);
        }
        if group.size() > 1 {
            let scores = answers.iter().map(|answer| answer.score.unwrap_or(f64::NAN));
            let mut scores: Vec<f64> = scores.collect();
            group.broadcast(&mut scores, 0)?;
            for (answer, score) in answers.into_iter().zip(scores) {
                answer.score = Some(score).filter(|score| !score.is_nan());
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

fn note(answers: &mut [&mut Answer], verdicts: Vec<Vec<Assessment>>) {
    for (answer, assessment) in answers.iter_mut().zip(verdicts.into_iter().flatten()) {
        answer.score = assessment.total;
        let opinion =
            |verdict: tandem_judge::Verdict| JudgeScore { score: verdict.score, said: verdict.said };
        answer.opinions = assessment.verdicts.into_iter().map(opinion).collect();
    }
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
