//! TensorBoard event files: one for each process of a run, in one folder.
//!
//! A file begins with a session's start, whose step is that of the first record to come. Readers then
//! drop what earlier files have from there on, so a step that is run again after a kill counts once.

mod event;

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tandem_judge::http::Backoff;

use self::event::{Event, SessionLog, Summary, Value, What, append};
use super::message::{Content, End, Message, Start, millis};
use super::{Tracker, Trouble};

/// Beginning of the names of event files. The time in seconds follows, by which readers order them.
pub(super) const PREFIX: &str = "events.out.tfevents.";

const BACKOFF: Backoff = Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(60) };

/// Writer of event files.
pub(super) struct TensorBoard {
    folder: PathBuf,
    start: Arc<Start>,
    file: Option<EventFile>,
    failures: usize,
}

impl TensorBoard {
    pub(super) fn new(folder: &Path, start: &Arc<Start>) -> Self {
        Self { folder: folder.to_owned(), start: start.clone(), file: None, failures: 0 }
    }

    fn write(&mut self, messages: &VecDeque<Arc<Message>>) -> io::Result<()> {
        let file = match &mut self.file {
            Some(file) => file,
            None => self.file.insert(EventFile::create(&self.folder, &self.start)?),
        };
        let mut bytes = Vec::new();
        for message in messages {
            append(&event(message), &mut bytes);
        }
        file.write(&bytes)
    }
}

impl Tracker for TensorBoard {
    fn key(&self) -> &'static str {
        "logging.tensorboard"
    }

    fn deliver(&mut self, messages: &mut VecDeque<Arc<Message>>) -> Result<(), Trouble> {
        match self.write(messages) {
            Ok(()) => {
                messages.clear();
                self.failures = 0;
                Ok(())
            }
            Err(error) => {
                self.failures += 1;
                let warning = format!(
                    "logging.tensorboard: cannot write to {} ({error}); the run goes on and tries again: make room \
                     there, or resume with another folder. metrics.jsonl has all records",
                    self.folder.display()
                );
                Err(Trouble { warning, is_passing: false, pause: Some(BACKOFF.pause(self.failures)) })
            }
        }
    }

    fn end(&mut self, _: &End, _: Instant) -> Result<(), Trouble> {
        Ok(())
    }
}

/// Returns the event of a message. Tags are those of TRL: `train/loss`, `eval/rewards/margins`.
fn event(message: &Message) -> Event {
    let (step, value) = match &message.content {
        Content::Record(record) => {
            let split = record.split().name();
            let value = |(name, value)| Value::scalar(format!("{split}/{name}"), value);
            (record.step(), record.finite_metrics().map(value).collect())
        }
        Content::Advice(advice) => (advice.step, vec![Value::text("advice", advice.to_string())]),
    };
    Event {
        wall_time: seconds(message.time),
        step: step as i64,
        what: Some(What::Summary(Summary { value })),
    }
}

fn seconds(time: SystemTime) -> f64 {
    millis(time) as f64 / 1e3
}

/// An open event file. A record that was torn by a full disk is cut off before the next write.
struct EventFile {
    file: File,
    /// Bytes of whole records.
    length: u64,
    is_torn: bool,
}

impl EventFile {
    /// Creates a file that readers read after all others in the folder, and writes its beginning.
    fn create(folder: &Path, start: &Start) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let now = SystemTime::now();
        let mut second = millis(now) / 1000;
        for entry in fs::read_dir(folder)? {
            let name = entry?.file_name();
            let digits = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('.').next());
            if let Some(other) = digits.and_then(|digits| digits.parse::<u64>().ok()) {
                second = second.max(other + 1);
            }
        }
        let path = folder.join(format!("{PREFIX}{second:010}.tandem.{}", std::process::id()));
        let mut file = Self { file: File::create_new(&path)?, length: 0, is_torn: false };
        let written = file.write(&beginning(start, seconds(now)));
        if written.is_err() {
            // The next attempt creates another. An error leaves an empty file, which readers pass over.
            let _ = fs::remove_file(&path);
        }
        written.map(|()| file)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if self.is_torn {
            self.file.set_len(self.length)?;
            io::Seek::seek(&mut self.file, io::SeekFrom::Start(self.length))?;
        }
        self.is_torn = true;
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        self.is_torn = false;
        Ok(())
    }
}

/// Version, start of the session, and the config as a text.
fn beginning(start: &Start, wall_time: f64) -> Vec<u8> {
    let step = start.resumed.map_or(0, |step| step as i64 + 1);
    let rows: String = start.entries.iter().map(|(key, value)| format!("| {key} | `{value}` |\n")).collect();
    let config = Value::text("config", format!("| key | value |\n|---|---|\n{rows}"));
    let mut bytes = Vec::new();
    for (step, what) in [
        (0, What::FileVersion("brain.Event:2".to_owned())),
        (step, What::SessionLog(SessionLog::START)),
        (step, What::Summary(Summary { value: vec![config] })),
    ] {
        append(&Event { wall_time, step, what: Some(what) }, &mut bytes);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_record_is_cut_off_before_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events");
        let mut file = EventFile { file: File::create(&path).unwrap(), length: 0, is_torn: false };
        file.write(b"whole").unwrap();
        file.file.write_all(b"to").unwrap();
        file.is_torn = true;
        file.write(b" again").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole again");
    }

    #[test]
    fn a_full_disk_is_reported_and_tried_again() {
        let file = File::options().write(true).open("/dev/full").unwrap();
        let start = super::super::tests::start(None);
        let mut tracker = TensorBoard::new(Path::new("events"), &start);
        tracker.file = Some(EventFile { file, length: 0, is_torn: false });
        let mut messages = VecDeque::from([super::super::tests::record(1)]);
        let trouble = tracker.deliver(&mut messages).unwrap_err();
        let warning = trouble.warning;
        assert!(warning.contains("logging.tensorboard") && warning.contains("No space left"), "{warning}");
        assert!(trouble.pause.is_some());
        assert_eq!(messages.len(), 1, "kept for the next attempt");
    }

    #[test]
    fn files_are_ordered_within_a_second() {
        let folder = tempfile::tempdir().unwrap();
        let start = super::super::tests::start(None);
        for _ in 0..3 {
            EventFile::create(folder.path(), &start).unwrap();
        }
        let mut names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        let seconds: Vec<u64> = names
            .iter()
            .map(|name| name.to_str().unwrap()[PREFIX.len()..PREFIX.len() + 10].parse().unwrap())
            .collect();
        assert!(seconds.is_sorted_by(|a, b| a < b), "{names:?}");
    }
}
