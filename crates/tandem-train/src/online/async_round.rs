//! A round of generation on a background thread: by a server, or by this process while it trains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use tandem_comm::{Phase, ProcessGroup, Progress};

use super::answers::{Batch, asked_of, fill};
use super::background_generator::BackgroundGenerator;
use super::background_task::BackgroundTask;
use super::judging::JudgeRequest;
use super::render::SampleRenderer;
use super::server::Server;
use crate::Result;
use crate::inputs::RunInputs;
use crate::parallel::DeviceMesh;
use crate::step::TrainStep;

/// Who answers there.
pub enum GenerationBackend {
    /// This process.
    Borrower(Box<BackgroundGenerator>),
    /// A server; all ranks learn of its answers in a group that is used for nothing else.
    Server(Box<Server>, ProcessGroup),
}

/// An answerer, and what it works on.
pub struct AsyncRound {
    /// `None` after a failure.
    at: Option<At>,
    /// Strings that end an answer.
    ends: Arc<[String]>,
    /// How far it has come.
    progress: Progress,
    /// Has it give up.
    stop: Arc<AtomicBool>,
}

enum At {
    Rest(GenerationBackend),
    Work(BackgroundTask<(GenerationBackend, CompletedPrompt)>),
}

/// A round with its answers, unless it was stopped.
type CompletedPrompt = Result<Option<Vec<Batch>>>;

impl AsyncRound {
    /// Creates an idle round; `ends` lists the stop strings.
    pub fn new(answerer: GenerationBackend, ends: &[String]) -> Self {
        let at = Some(At::Rest(answerer));
        Self { at, ends: ends.into(), progress: Progress::default(), stop: Arc::default() }
    }

    /// Has a round answered by the weights as they are, and what is answered sent to the judges. All ranks call this.
    ///
    /// # Errors
    /// If weights cannot be lent or written, or a rank is lost.
    ///
    /// # Panics
    /// If another round is under way.
    pub fn begin(
        &mut self,
        mut round: Vec<Batch>,
        judges: Option<Sender<JudgeRequest>>,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        prepared: &Arc<RunInputs>,
    ) -> Result<()> {
        let Some(At::Rest(mut answerer)) = self.at.take() else { panic!("another round is under way") };
        match &mut answerer {
            GenerationBackend::Borrower(borrower) => borrower.borrow(scorer)?,
            GenerationBackend::Server(server, _) => {
                server.publish(round[0].answered_after, scorer, mesh, prepared)?
            }
        }
        self.stop.store(false, Ordering::Relaxed);
        let (prepared, ends) = (prepared.clone(), self.ends.clone());
        let (progress, stop) = (self.progress.clone(), self.stop.clone());
        let work = move || {
            let asked = asked_of(&round);
            let answers = match &mut answerer {
                GenerationBackend::Borrower(borrower) => borrower.answer(&asked, &prepared, &progress, &stop),
                GenerationBackend::Server(server, group) => {
                    server.answer(&asked, &prepared, group, &progress, &stop)
                }
            };
            let answered = answers.and_then(|answers| {
                let Some(answers) = answers else { return Ok(None) };
                fill(&mut round, answers);
                if let Some(judges) = judges {
                    let prompts = round.iter().flat_map(|batch| &batch.prompts);
                    // Who does not listen has failed, and says so.
                    let _ = judges.send(JudgeRequest::of(prompts, &SampleRenderer::of(&prepared, &ends))?);
                }
                Ok(Some(round))
            });
            (answerer, answered)
        };
        self.at = Some(At::Work(BackgroundTask::begin("answers", work)));
        Ok(())
    }

    /// Waits for the answers: from then on nobody reads the weights that they are by. `None` if they were stopped, on all ranks.
    ///
    /// # Panics
    /// If no round is under way.
    pub fn end(&mut self, progress: &Progress, stop: &AtomicBool) -> Result<Option<Vec<Batch>>> {
        let Some(At::Work(work)) = self.at.take() else { panic!("no round is under way") };
        let mut seen = self.progress.reports();
        let (answerer, answered) = work.end(|| {
            self.stop.store(stop.load(Ordering::Relaxed), Ordering::Relaxed);
            // Those who wait for this rank see that it goes on.
            let reports = self.progress.reports();
            if std::mem::replace(&mut seen, reports) != reports {
                progress.enter(Phase::Generate);
            }
            Ok(())
        })?;
        self.at = Some(At::Rest(answerer));
        answered
    }
}

impl Drop for AsyncRound {
    /// Does not wait: others may have failed that its thread waits for. It ends soon after they have.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
