//! Trackers: programs and services that receive the records of a run while it goes on.
//!
//! Each has a queue and a thread of its own, and training only appends to the queues. So a tracker that
//! hangs, fails or is missing costs its own records, and neither time nor bits of the run. What goes
//! wrong becomes one sentence for the observer.

mod background;
mod command;
mod message;
mod mlflow;
mod queue;
mod state;
mod tensorboard;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use self::background::Background;
use self::command::CommandTracker;
pub(crate) use self::message::Ending;
use self::message::{Content, End, Message, Start};
use self::mlflow::MlflowTracker;
use self::state::StateFile;
use self::tensorboard::TensorBoard;
use crate::config::Config;
use crate::error::{Result, TrainError};
use crate::metrics::{Advice, Record};

/// File of a run's folder with the name of the run at its trackers.
pub(crate) const STATE: &str = "trackers.json";

/// File of a run's folder with the output of `logging.command`.
pub(crate) const OUTPUT: &str = "tracker.log";

/// Folder of event files in a run's folder.
pub(crate) const EVENTS: &str = "tensorboard";

/// Receiver of records, called on a thread of its own.
trait Tracker: Send {
    /// Its key in the config, for sentences.
    fn key(&self) -> &'static str;

    /// Least time between two deliveries, so that many messages travel at once.
    fn interval(&self) -> Duration {
        Duration::ZERO
    }

    /// Delivers messages, and removes those that it has delivered. It may return with some left; it is
    /// then called again. Calls without messages look whether all is well.
    fn deliver(&mut self, messages: &mut VecDeque<Arc<Message>>) -> Result<(), Trouble>;

    /// Delivers the end of the run, after all messages.
    fn end(&mut self, end: &End, deadline: Instant) -> Result<(), Trouble>;
}

/// A failed delivery.
#[derive(Debug)]
struct Trouble {
    /// Sentence for the user; only a tracker's first one is shown.
    warning: String,
    /// Whether the sentence waits for the end of the run: the next attempt may well succeed.
    is_passing: bool,
    /// Pause before the next attempt; `None` gives the tracker up.
    pause: Option<Duration>,
}

/// Returns whether an event file has this name.
pub(crate) fn is_event_file(name: &str) -> bool {
    name.starts_with(tensorboard::PREFIX)
}

/// Refuses trackers that cannot be started, before anything of the run is.
///
/// # Errors
/// The program of `logging.command` does not exist, or the environment has no usable MLflow credentials.
pub(crate) fn check(config: &Config) -> Result<()> {
    let refuse = |reason| TrainError::Tracker { reason };
    command::check(&config.logging.command).map_err(refuse)?;
    if config.logging.mlflow.is_some() {
        mlflow::credentials().map_err(refuse)?;
    }
    Ok(())
}

/// Records of earlier processes of a run, read when a tracker asks for them.
pub(crate) type Earlier = Box<dyn Iterator<Item = Record> + Send>;

/// The trackers of a run.
pub(crate) struct Trackers {
    trackers: Vec<Background>,
    warnings: Receiver<String>,
    /// Time that trackers have after the end.
    grace: Duration,
    /// Step of the last record.
    step: u64,
}

impl Trackers {
    /// Starts the trackers of a config in the run's folder `output`. A run that resumes names the `step`
    /// of its checkpoint, 0 if there is none, and has the records up to there, which MLflow reads.
    pub(crate) fn start(config: &Config, output: &Path, step: Option<u64>, earlier: Earlier) -> Self {
        let (warn, warnings) = channel();
        let mut trackers: Vec<Box<dyn Tracker>> = Vec::new();
        let logging = &config.logging;
        if logging.tensorboard.is_some() || logging.mlflow.is_some() || !logging.command.is_empty() {
            let state = StateFile::open(output, step.is_some());
            let start = Arc::new(Start::new(config, output, state.id(), step));
            if let Some(folder) = &logging.tensorboard {
                trackers.push(Box::new(TensorBoard::new(folder, &start)));
            }
            if let Some(mlflow) = &logging.mlflow {
                trackers.push(Box::new(MlflowTracker::new(mlflow, &start, state, earlier)));
            }
            if !logging.command.is_empty() {
                trackers.push(Box::new(CommandTracker::new(&logging.command, &start)));
            }
        }
        let grace = Duration::from_secs_f64(logging.grace_s);
        let start = |tracker| Background::start(tracker, grace, warn.clone());
        Self { trackers: trackers.into_iter().map(start).collect(), warnings, grace, step: step.unwrap_or(0) }
    }

    /// Passes a record on.
    pub(crate) fn record(&mut self, record: &Record) {
        self.step = record.step();
        if !self.trackers.is_empty() {
            self.send(Content::Record(record.clone()));
        }
    }

    /// Passes advice on.
    pub(crate) fn advice(&self, advice: &Advice) {
        self.send(Content::Advice(advice.clone()));
    }

    fn send(&self, content: Content) {
        let message = Arc::new(Message::now(content));
        for tracker in &self.trackers {
            tracker.send(message.clone());
        }
    }

    /// Returns the sentences about trackers since the last call.
    pub(crate) fn warnings(&self) -> Vec<String> {
        self.warnings.try_iter().collect()
    }

    /// Ends all trackers at once, within the time of grace. Later calls do nothing.
    pub(crate) fn end(&mut self, ending: &Ending) {
        let end = Arc::new(End::now(ending.clone(), self.step));
        let deadline = Instant::now() + self.grace;
        for tracker in &self.trackers {
            tracker.queue().end(end.clone(), deadline);
        }
        for tracker in self.trackers.drain(..) {
            tracker.join(deadline);
        }
    }
}

impl Drop for Trackers {
    fn drop(&mut self) {
        self.end(&Ending::Failed("the run was given up".to_owned()));
    }
}
