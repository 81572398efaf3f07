//! A round of generation on a background thread: by a server, or by this process while it trains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use tandem_comm::{Group, Phase, Progress};

use super::answers::{Batch, asked_of, fill};
use super::background_generator::Borrower;
use super::background_task::Work;
use super::judging::Cases;
use super::render::Shown;
use super::server::Server;
use crate::Result;
use crate::inputs::Prepared;
use crate::parallel::Mesh;
use crate::step::Scorer;

/// Who answers there.
pub enum Answerer {
    /// This process.
    Borrower(Box<Borrower>),
    /// A server; all ranks learn of its answers in a group that is used for nothing else.
    Server(Box<Server>, Group),
}

/// An answerer, and what it works on.
pub struct Aside {
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
    Rest(Answerer),
    Work(Work<(Answerer, Answered)>),
}

/// A round with its answers, unless it was stopped.
type Answered = Result<Option<Vec<Batch>>>;

impl Aside {
    /// Creates an idle round; `ends` lists the stop strings.
    pub fn new(answerer: Answerer, ends: &[String]) -> Self {
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
        judges: Option<Sender<Cases>>,
        scorer: &mut Scorer,
        mesh: &mut Mesh,
        prepared: &Arc<Prepared>,
    ) -> Result<()> {
        let Some(At::Rest(mut answerer)) = self.at.take() else { panic!("another round is under way") };
        match &mut answerer {
            Answerer::Borrower(borrower) => borrower.borrow(scorer)?,
            Answerer::Server(server, _) => server.publish(round[0].answered_after, scorer, mesh, prepared)?,
        }
        self.stop.store(false, Ordering::Relaxed);
        let (prepared, ends) = (prepared.clone(), self.ends.clone());
        let (progress, stop) = (self.progress.clone(), self.stop.clone());
        let work = move || {
            let asked = asked_of(&round);
            let answers = match &mut answerer {
                Answerer::Borrower(borrower) => borrower.answer(&asked, &prepared, &progress, &stop),
                Answerer::Server(server, group) => server.answer(&asked, &prepared, group, &progress, &stop),
            };
            let answered = answers.and_then(|answers| {
                let Some(answers) = answers else { return Ok(None) };
                fill(&mut round, answers);
                if let Some(judges) = judges {
                    let prompts = round.iter().flat_map(|batch| &batch.prompts);
                    // Who does not listen has failed, and says so.
                    let _ = judges.send(Cases::of(prompts, &Shown::of(&prepared, &ends))?);
                }
                Ok(Some(round))
            });
            (answerer, answered)
        };
        self.at = Some(At::Work(Work::begin("answers", work)));
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

impl Drop for Aside {
    /// Does not wait: others may have failed that its thread waits for. It ends soon after they have.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
