//! Messages to trackers, and the lines of JSON that a program gets.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::config::Config;
use crate::metrics::{Advice, Record};

/// Version of the lines; it changes when a field changes its meaning.
const FORMAT: u64 = 1;

/// Facts about a run that every tracker gets first.
#[derive(Clone, Debug)]
pub(super) struct Start {
    /// Run folder.
    pub output: PathBuf,
    /// Name of the run.
    pub name: String,
    /// Name of the run that no other run has; a resumed run keeps it.
    pub id: String,
    /// The resolved config: full keys with their values as TOML.
    pub entries: Vec<(String, String)>,
    /// The resolved config as nested tables.
    pub config: Value,
    /// Step of the checkpoint from which the run continues.
    pub resumed: Option<u64>,
    /// Time after the end of the run, in seconds.
    pub grace: f64,
}

impl Start {
    pub(super) fn new(config: &Config, output: &Path, id: &str, resumed: Option<u64>) -> Self {
        Self {
            output: output.to_owned(),
            name: config.logging.run.clone(),
            id: id.to_owned(),
            entries: config.entries(),
            config: toml::from_str(&config.to_toml()).expect("a resolved config is TOML"),
            resumed,
            grace: config.logging.grace_s,
        }
    }

    /// Returns the first line of a program that was started `starts` times before.
    pub(super) fn line(&self, starts: usize) -> Vec<u8> {
        line(&json!({
            "kind": "start",
            "format": FORMAT,
            "tandem": env!("CARGO_PKG_VERSION"),
            "run": self.name,
            "id": self.id,
            "folder": self.output.display().to_string(),
            "resumed_step": self.resumed,
            "restarts": starts,
            "config": self.config,
        }))
    }
}

/// A message with its time.
#[derive(Debug)]
pub(super) struct Message {
    pub time: SystemTime,
    pub content: Content,
}

/// Content of a message.
#[derive(Debug)]
pub(super) enum Content {
    /// Metrics of a step or an evaluation.
    Record(Record),
    /// A trouble that the metrics show.
    Advice(Advice),
}

impl Message {
    pub(super) fn now(content: Content) -> Self {
        Self { time: SystemTime::now(), content }
    }

    /// Returns the line of a program.
    pub(super) fn line(&self) -> Vec<u8> {
        match &self.content {
            Content::Record(record) => {
                let mut object = Map::from_iter([("kind".to_owned(), "record".into())]);
                object.extend(record.object());
                line(&Value::Object(object))
            }
            Content::Advice(Advice { step, finding, remedy, .. }) => line(&json!({
                "kind": "advice", "step": step, "finding": finding, "remedy": remedy,
            })),
        }
    }
}

/// Outcome of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// All steps are done.
    Finished,
    /// It was asked to stop, and can be resumed.
    Stopped,
    /// It cannot go on, and why.
    Failed(String),
}

/// End of a run with its time.
#[derive(Debug)]
pub(super) struct End {
    pub time: SystemTime,
    pub ending: Ending,
    /// Step of the last record.
    pub step: u64,
}

impl End {
    pub(super) fn now(ending: Ending, step: u64) -> Self {
        Self { time: SystemTime::now(), ending, step }
    }

    /// Returns the last line of a program.
    pub(super) fn line(&self) -> Vec<u8> {
        let (outcome, reason) = match &self.ending {
            Ending::Finished => ("finished", None),
            Ending::Stopped => ("stopped", None),
            Ending::Failed(reason) => ("failed", Some(reason)),
        };
        line(&json!({ "kind": "end", "step": self.step, "outcome": outcome, "reason": reason }))
    }
}

/// Milliseconds since 1970.
pub(super) fn millis(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn line(value: &Value) -> Vec<u8> {
    let mut line = value.to_string().into_bytes();
    line.push(b'\n');
    line
}
