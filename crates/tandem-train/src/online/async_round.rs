//! A round of generation on a background thread: by a server, or by this process while it trains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use tandem_comm::{Phase, ProcessGroup, Progress};

use super::answers::{Batch, fill};
use super::background_generator::BackgroundGenerator;
use super::background_task::BackgroundTask;
use super::generate::Asked;
use super::judging::JudgeRequest;
use super::render::SampleRenderer;
use super::server::Server;
use crate::Result;
use crate::inputs::RunInputs;
use crate::parallel::DeviceMesh;
use crate::step::TrainStep;

/// Backend of the background generation.
pub enum GenerationBackend {
    /// This process.
    Borrower(Box<BackgroundGenerator>),
    /// A server; a separate process group broadcasts its completions.
    Server(Box<Server>, ProcessGroup),
}

/// A generation round in the background.
pub struct AsyncRound {
    /// `None` after a failure.
    at: Option<At>,
    /// Strings that end an answer.
    ends: Arc<[String]>,
    progress: Progress,
    stop: Arc<AtomicBool>,
}

enum At {
    Rest(GenerationBackend),
    Work(BackgroundTask<(GenerationBackend, RoundResult)>),
}

/// A round with its answers, unless it was stopped.
type RoundResult = Result<Option<Vec<Batch>>>;

impl AsyncRound {
    /// Creates an idle round; `ends` lists the stop strings.
    pub fn new(answerer: GenerationBackend, ends: &[String]) -> Self {
        let at = Some(At::Rest(answerer));
        Self { at, ends: ends.into(), progress: Progress::default(), stop: Arc::default() }
    }

    /// Starts generating a round with the current weights and sends completions to the judges.
    /// Collective over all ranks.
    ///
    /// # Errors
    /// Weights cannot be shared or written.
    ///
    /// # Panics
    /// Another round is in progress.
    pub fn begin(
        &mut self,
        mut round: Vec<Batch>,
        asked: Asked,
        judges: Option<Sender<JudgeRequest>>,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        prepared: &Arc<RunInputs>,
    ) -> Result<()> {
        let Some(At::Rest(mut answerer)) = self.at.take() else { panic!("another round is under way") };
        match &mut answerer {
            GenerationBackend::Borrower(borrower) => borrower.acquire(scorer)?,
            GenerationBackend::Server(server, _) => {
                server.publish(round[0].answered_after, scorer, mesh, prepared)?;
            }
        }
        self.stop.store(false, Ordering::Relaxed);
        let (prepared, ends) = (prepared.clone(), self.ends.clone());
        let (progress, stop) = (self.progress.clone(), self.stop.clone());
        let work = move || {
            let answers = match &mut answerer {
                GenerationBackend::Borrower(borrower) => borrower.answer(&asked, &prepared, &progress, &stop),
                GenerationBackend::Server(server, group) => {
                    server.answer(&asked, &prepared, group, &progress, &stop)
                }
            };
            let answered = answers.and_then(|answers| {
                let Some(answers) = answers else { return Ok(None) };
                fill(&mut round, &asked, answers);
                if let Some(judges) = judges {
                    let prompts = round.iter().flat_map(|batch| &batch.prompts);
                    // A closed channel means the receiver failed and reports that itself.
                    let _ = judges.send(JudgeRequest::new(
                        prompts,
                        &SampleRenderer::new(&prepared, asked.split, &ends),
                    )?);
                }
                Ok(Some(round))
            });
            (answerer, answered)
        };
        self.at = Some(At::Work(BackgroundTask::begin("answers", work)?));
        Ok(())
    }

    /// Waits for the completions; afterwards no thread reads the weights. `None` if stopped, on all
    /// ranks.
    ///
    /// # Panics
    /// No round is in progress.
    pub fn end(&mut self, progress: &Progress, stop: &AtomicBool) -> Result<Option<Vec<Batch>>> {
        let Some(At::Work(work)) = self.at.take() else { panic!("no round is under way") };
        let mut seen = self.progress.reports();
        let (answerer, answered) = work.end(|| {
            self.stop.store(stop.load(Ordering::Relaxed), Ordering::Relaxed);
            // Waiting ranks see that this rank is alive.
            let reports = self.progress.reports();
            if std::mem::replace(&mut seen, reports) != reports {
                progress.begin_phase(Phase::Generate);
            }
            Ok(())
        })?;
        self.at = Some(At::Rest(answerer));
        answered
    }
}

impl Drop for AsyncRound {
    /// Does not wait: others may have failed that its thread waits for. It ends soon after they
    /// have.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
