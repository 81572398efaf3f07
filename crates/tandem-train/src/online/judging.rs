//! Answers to scores. The first rank alone asks the judges; what an answer is worth the others learn from it.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::thread::JoinHandle;

use serde_json::{Map, Value};
use tandem_comm::Group;
use tandem_judge::{Assessment, Candidate, Group as Case, JudgeError, Panel, Prompt};

use super::answers::{Answer, Answered, Opinion};
use super::shown::Shown;
use crate::Result;

/// The judges.
pub struct Judging {
    /// Where they are, on the first rank; `None` on the others.
    panel: Option<At>,
    /// The judges' names, on the first rank.
    names: Vec<String>,
    /// What their commands write to stderr.
    lines: mpsc::Receiver<String>,
}

enum At {
    /// They wait.
    Rest(Box<Panel>),
    /// They judge while this thread goes on.
    Work(JoinHandle<(Box<Panel>, Verdicts)>),
}

/// For each answer of each prompt.
type Verdicts = Result<Vec<Vec<Assessment>>, JudgeError>;

impl Judging {
    /// With a panel on the first rank, which `lines` come from, and without on the others.
    pub fn new(panel: Option<Panel>, lines: mpsc::Receiver<String>) -> Self {
        let names = panel.iter().flat_map(Panel::names).map(str::to_owned).collect();
        Self { panel: panel.map(|panel| At::Rest(Box::new(panel))), names, lines }
    }

    /// Has answers judged, on a thread of its own.
    ///
    /// # Errors
    /// If a token is unknown.
    ///
    /// # Panics
    /// If others are being judged.
    pub fn begin<'a>(
        &mut self,
        prompts: impl Iterator<Item = &'a Answered>,
        shown: &Shown<'_>,
    ) -> Result<()> {
        let Some(at) = self.panel.take() else { return Ok(()) };
        let At::Rest(mut panel) = at else { panic!("other answers are being judged") };
        let cases = prompts.map(|answered| Owned::of(answered, shown));
        let cases: Vec<Owned> = cases.collect::<Result<_>>()?;
        let judge = move || {
            let views: Vec<Case> = cases.iter().map(Owned::view).collect();
            let verdicts = panel.judge(&views, &AtomicBool::new(false));
            (panel, verdicts)
        };
        let thread = std::thread::Builder::new().name("judges".to_owned());
        self.panel = Some(At::Work(thread.spawn(judge).expect("a thread for the judges")));
        Ok(())
    }

    /// Waits for the judges, and tells every rank the scores.
    ///
    /// # Errors
    /// If a judge cannot go on, or a rank is lost.
    pub fn end(&mut self, prompts: &mut [Answered], group: &mut Group) -> Result<()> {
        if let Some(at) = self.panel.take() {
            let At::Work(thread) = at else { panic!("nothing is being judged") };
            let (panel, verdicts) = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            self.panel = Some(At::Rest(panel));
            note(prompts, verdicts?);
        }
        if group.size() == 1 {
            return Ok(());
        }
        let answers = || prompts.iter().flat_map(|answered| &answered.answers);
        let mut scores: Vec<f64> = answers().map(|answer| answer.score.unwrap_or(f64::NAN)).collect();
        group.broadcast(&mut scores, 0)?;
        let answers = prompts.iter_mut().flat_map(|answered| &mut answered.answers);
        answers
            .zip(scores)
            .for_each(|(answer, score)| answer.score = Some(score).filter(|score| !score.is_nan()));
        Ok(())
    }

    /// What their commands have written to stderr since this was called.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        self.lines.try_iter()
    }

    /// The judges' names, where they are.
    pub fn names(&self) -> &[String] {
        &self.names
    }
}

fn note(prompts: &mut [Answered], verdicts: Vec<Vec<Assessment>>) {
    let answers = prompts.iter_mut().flat_map(|answered| &mut answered.answers);
    for (answer, assessment) in answers.zip(verdicts.into_iter().flatten()) {
        answer.score = assessment.total;
        let opinion = |verdict: tandem_judge::Verdict| Opinion { score: verdict.score, said: verdict.said };
        answer.opinions = assessment.verdicts.into_iter().map(opinion).collect();
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
    fn of(answered: &Answered, shown: &Shown<'_>) -> Result<Self> {
        let mut row = shown.row(answered);
        let prompt = row.remove("prompt").unwrap_or_default();
        let answer = |answer: &Answer| Ok((shown.text(answer)?, shown.length(answer), answer.is_ended));
        let answers = answered.answers.iter().map(answer).collect::<Result<_>>()?;
        Ok(Self { place: shown.prompts.origin(answered.row as usize).to_string(), prompt, row, answers })
    }

    fn view(&self) -> Case<'_> {
        let prompt = match &self.prompt {
            Value::String(text) => Prompt::Text(text),
            Value::Array(messages) => Prompt::Messages(messages),
            other => unreachable!("a prompt is a text or messages, not {other}"),
        };
        let candidates =
            self.answers.iter().map(|&(ref text, tokens, is_ended)| Candidate { text, tokens, is_ended });
        let answers = candidates.collect();
        Case { place: &self.place, prompt, row: &self.row, answers }
    }
}
