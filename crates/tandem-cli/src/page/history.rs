//! History of a run, as its folder tells it so far.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::Value;
use tandem_train::Config;
use tandem_train::metrics::{Advice, Advisor, Record, Split};
use tandem_train::run::run_dir::{self, LOG};

use super::curve::Point;
use super::follow::LineFollower;
use super::samples::Samples;
use crate::run_folder::{Keys, read_keys};

/// Bytes at the end of the log that are looked at, and lines shown of them.
const LOG_BYTES: u64 = 16 << 10;
const LOG_LINES: usize = 20;
/// Steps whose mean duration gives the time left.
const RECENT: usize = 50;

/// A metric over the steps.
#[derive(Default)]
pub(super) struct Curve {
    pub train: Vec<Point>,
    pub eval: Vec<Point>,
}

/// A run that is followed.
pub(crate) struct RunHistory {
    pub(super) folder: PathBuf,
    pub(super) keys: Keys,
    pub(super) curves: BTreeMap<String, Curve>,
    pub(super) samples: Samples,
    /// `plan.json`.
    pub(super) plan: Option<Value>,
    pub(super) log: Vec<String>,
    /// Last step trained.
    pub(super) step: u64,
    /// When the metrics were last written.
    pub(super) written: Option<SystemTime>,
    pub(super) is_finished: bool,
    /// Whole lines that are no records.
    pub(super) unreadable: usize,
    /// Why the files could not be read the last time.
    pub(super) problem: Option<String>,
    advisor: Option<Advisor>,
    metrics_file: LineFollower,
    samples_file: LineFollower,
    stamps: BTreeMap<&'static str, Stamp>,
}

/// Size and time of a file.
type Stamp = Option<(u64, Option<SystemTime>)>;

impl RunHistory {
    /// Creates the history of a folder, of which nothing is read yet.
    pub(crate) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            keys: Keys::new(),
            curves: BTreeMap::new(),
            samples: Samples::default(),
            plan: None,
            log: Vec::new(),
            step: 0,
            written: None,
            is_finished: false,
            unreadable: 0,
            problem: None,
            advisor: None,
            metrics_file: LineFollower::new(&folder.join("metrics.jsonl")),
            samples_file: LineFollower::new(&folder.join("samples.jsonl")),
            stamps: BTreeMap::new(),
        }
    }

    /// The run's folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Reads what has come since the last time; returns whether anything has.
    ///
    /// # Errors
    /// A file that is there cannot be read.
    pub(crate) fn update(&mut self) -> io::Result<bool> {
        let mut has_changed = false;
        if self.has_changed("config.toml") {
            // Another configuration, another run: also where metrics end at the same place.
            self.keys = read_keys(&self.folder).unwrap_or_default();
            self.metrics_file.restart();
            self.forget_metrics();
            has_changed = true;
        }
        if self.has_changed("plan.json") {
            let text = tandem_files::read(&self.folder.join("plan.json"), tandem_files::MAX_CONFIG)
                .unwrap_or_default();
            self.plan = serde_json::from_slice(&text).ok();
            has_changed = true;
        }
        if self.has_changed(LOG) {
            self.log = last_lines(&self.folder.join(LOG)).unwrap_or_default();
            has_changed = true;
        }
        has_changed |= self.read_metrics()? | self.read_samples()?;
        let is_finished = run_dir::has_model_of(&self.folder, self.step);
        has_changed |= std::mem::replace(&mut self.is_finished, is_finished) != is_finished;
        Ok(has_changed)
    }

    /// Does as [`RunHistory::update`], and keeps an error for the page: what cannot be read now may be later.
    pub(crate) fn update_or_tell(&mut self) -> bool {
        let (has_changed, problem) = match self.update() {
            Ok(has_changed) => (has_changed, None),
            Err(error) => (false, Some(error.to_string())),
        };
        has_changed | (std::mem::replace(&mut self.problem, problem.clone()) != problem)
    }

    fn read_metrics(&mut self) -> io::Result<bool> {
        let new = self.metrics_file.poll()?;
        if new.is_restarted {
            self.forget_metrics();
        }
        let has_changed = new.is_restarted || !new.lines.is_empty();
        for line in new.lines {
            match Record::from_json(&line) {
                Some(record) => self.take(&record),
                None => self.unreadable += 1,
            }
        }
        let facts = fs::metadata(self.folder.join("metrics.jsonl"));
        self.written = facts.ok().and_then(|facts| facts.modified().ok());
        Ok(has_changed)
    }

    fn read_samples(&mut self) -> io::Result<bool> {
        let new = self.samples_file.poll()?;
        if new.is_restarted {
            self.samples = Samples::default();
        }
        let has_changed = new.is_restarted || !new.lines.is_empty();
        for line in new.lines {
            self.unreadable += usize::from(!self.samples.take(&line));
        }
        Ok(has_changed)
    }

    fn take(&mut self, record: &Record) {
        if let Some(advisor) = &mut self.advisor {
            advisor.see(record);
        }
        let is_train = record.split() == Split::Train;
        if is_train {
            self.step = record.step();
        }
        for (name, value) in record.metrics() {
            if !self.curves.contains_key(name) {
                self.curves.insert(name.to_owned(), Curve::default());
            }
            let curve = self.curves.get_mut(name).expect("it was inserted");
            let points = if is_train { &mut curve.train } else { &mut curve.eval };
            points.push((record.step() as f64, value.unwrap_or(f64::NAN)));
        }
    }

    /// Starts at the run's first record. An older version's config may no longer be read; its metrics may.
    fn forget_metrics(&mut self) {
        let config = Config::load::<&str>(&self.folder.join("config.toml"), &[]);
        self.advisor = config.ok().map(|config| Advisor::new(&config));
        self.curves.clear();
        (self.step, self.unreadable) = (0, 0);
    }

    /// Returns the advice that the metrics give.
    pub(super) fn advice(&self) -> &[Advice] {
        self.advisor.as_ref().map_or(&[], Advisor::found)
    }

    /// Steps of the whole run, as planned.
    pub(super) fn planned_steps(&self) -> Option<u64> {
        self.plan.as_ref()?["steps"].as_u64()
    }

    /// The last value of a metric.
    pub(super) fn last(&self, split: Split, name: &str) -> Option<f64> {
        let curve = self.curves.get(name)?;
        let points = if split == Split::Train { &curve.train } else { &curve.eval };
        points.last().map(|point| point.1).filter(|value| value.is_finite())
    }

    /// Seconds until the last step at the pace of the last ones.
    pub(super) fn seconds_left(&self) -> Option<f64> {
        let times = &self.curves.get("time")?.train;
        let recent = &times[times.len().saturating_sub(RECENT)..];
        let (first, last) = (recent.first()?, recent.last()?);
        let left = self.planned_steps()?.checked_sub(self.step)? as f64;
        let pace = (last.1 - first.1) / (last.0 - first.0);
        (left > 0.0 && pace > 0.0).then_some(left * pace)
    }

    fn has_changed(&mut self, name: &'static str) -> bool {
        let facts = fs::metadata(self.folder.join(name));
        let stamp: Stamp = facts.ok().map(|facts| (facts.len(), facts.modified().ok()));
        self.stamps.insert(name, stamp) != Some(stamp)
    }
}

/// Reads the last lines of a text file.
fn last_lines(path: &Path) -> io::Result<Vec<String>> {
    let mut file = tandem_files::open(path)?;
    let start = file.metadata()?.len().saturating_sub(LOG_BYTES);
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let mut lines: Vec<&str> = text.lines().collect();
    // The first one may be torn.
    let first = lines.len().saturating_sub(LOG_LINES).max(usize::from(start > 0));
    Ok(lines.split_off(first.min(lines.len())).into_iter().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, loss: f64) -> String {
        format!("{{\"step\":{step},\"split\":\"train\",\"loss\":{loss},\"time\":{}}}\n", 2 * step)
    }

    #[test]
    fn a_run_is_followed_from_before_its_first_step_and_anew_when_it_resumes() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut run = RunHistory::new(folder.path());
        run.update().expect("an empty folder");
        let path = folder.path().join("metrics.jsonl");
        fs::write(folder.path().join("plan.json"), r#"{"steps":10}"#).expect("written");
        fs::write(&path, record(1, 0.7) + &record(2, 0.6) + &record(3, 0.5)).expect("written");
        assert!(run.update().expect("read"));
        assert_eq!(
            (run.step, run.last(Split::Train, "loss"), run.seconds_left()),
            (3, Some(0.5), Some(14.0))
        );
        assert!(!run.update().expect("read"), "nothing has come");
        fs::write(&path, record(1, 0.7) + &record(2, 0.4)).expect("written");
        assert!(run.update().expect("read"));
        assert_eq!(run.curves["loss"].train, [(1.0, 0.7), (2.0, 0.4)]);
    }

    #[test]
    fn lines_that_are_no_records_are_counted() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(folder.path().join("metrics.jsonl"), "{}\n".to_owned() + &record(1, 1.0)).expect("written");
        fs::write(folder.path().join("samples.jsonl"), "what\n").expect("written");
        let mut run = RunHistory::new(folder.path());
        run.update().expect("read");
        assert_eq!((run.unreadable, run.step), (2, 1));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_told_until_it_can() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        fs::create_dir(&path).expect("created");
        let mut run = RunHistory::new(folder.path());
        assert!(run.update_or_tell() && run.problem.is_some(), "a folder is no file");
        fs::remove_dir(&path).expect("removed");
        fs::write(&path, record(1, 0.7)).expect("written");
        assert!(run.update_or_tell() && run.problem.is_none());
        assert_eq!(run.step, 1);
    }
}
