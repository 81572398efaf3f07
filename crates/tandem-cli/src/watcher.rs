//! Progress of a run on stderr: one live line on a terminal, else a line per step. A training run's lines
//! are kept in its folder.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tandem_train::config::Method;
use tandem_train::events::{Event, Observer};
use tandem_train::metrics::{Record, Split};
use tandem_train::run::run_dir::LOG;
use tandem_train::{Config, size};

use crate::closing::{self, Samples};
use crate::step_line::{StepLine, in_words};
use crate::{json_events, log};

/// Shortest time between lines on one subject (tokenising, the reference pass).
const PATIENCE: Duration = Duration::from_secs(2);

/// Observer that shows a run to a person.
pub(crate) struct Watcher {
    bar: Option<ProgressBar>,
    interval: u64,
    /// Subject of the bar; a new subject starts a new bar.
    subject: String,
    last_line: Option<Instant>,
    steps: u64,
    /// Start time and first step of this process; the time left is estimated from its own steps.
    began: Option<(Instant, u64)>,
    /// Findings of the run so far.
    troubles: Vec<String>,
    samples: Samples,
    log: Log,
    /// Method of the run, where it is known.
    method: Option<Method>,
    /// Whether stdout gets the events too.
    prints_json: bool,
    /// Set when somebody wants a checkpoint.
    save: Arc<AtomicBool>,
    /// Set while a signal ends the process at once.
    at_once: Arc<AtomicBool>,
}

/// Unit of a bar's position.
#[derive(Clone, Copy)]
enum Unit {
    Bytes,
    Rows,
    Steps,
}

impl Unit {
    /// Template of the bar.
    fn template(self) -> &'static str {
        match self {
            Self::Bytes => "{prefix} {binary_bytes}/{binary_total_bytes}  {msg}  {wide_bar}",
            Self::Rows | Self::Steps => "{prefix} {pos}/{len}  {msg}  {wide_bar}",
        }
    }
}

/// File of the lines that were shown.
enum Log {
    None,
    /// The file's path, and the lines so far: the run's folder is made when the run starts.
    Later(PathBuf, Vec<String>),
    Open(File),
}

impl Watcher {
    /// Draws a bar if stderr is a terminal; else writes a line every `interval` steps.
    pub(crate) fn every(interval: u64) -> Self {
        let bar = log::is_live().then(ProgressBar::hidden);
        Self {
            bar,
            interval,
            subject: String::new(),
            last_line: None,
            steps: 0,
            began: None,
            troubles: Vec::new(),
            samples: Samples::default(),
            log: Log::None,
            method: None,
            prints_json: false,
            save: Arc::default(),
            at_once: Arc::default(),
        }
    }

    /// Keeps all lines in the folder of a run.
    pub(crate) fn kept_for(mut self, config: &Config) -> Self {
        self.log = Log::Later(config.output.join(LOG), Vec::new());
        self.method = Some(config.method);
        self
    }

    /// Prints the events on stdout too, as JSON.
    pub(crate) fn printing_json(mut self, prints_json: bool) -> Self {
        self.prints_json = prints_json;
        self
    }

    /// Asks the run for a checkpoint when `save` is set.
    pub(crate) fn saving_on(mut self, save: Arc<AtomicBool>) -> Self {
        self.save = save;
        self
    }

    /// Clears `at_once` when the run has started, from when on it can save.
    pub(crate) fn saving_after(mut self, at_once: Arc<AtomicBool>) -> Self {
        self.at_once = at_once;
        self
    }

    /// The flag that says whether a signal ends the process at once.
    pub(crate) fn at_once_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.at_once)
    }

    /// The flag that asks for a checkpoint.
    pub(crate) fn save_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.save)
    }

    fn say(&mut self, line: &str) {
        tracing::info!("{line}");
        self.keep(line);
    }

    fn warn(&mut self, line: &str) {
        tracing::warn!("{line}");
        self.keep(&format!("warning: {line}"));
    }

    /// Appends a line to the log. A disk that is full is no reason to end a run.
    fn keep(&mut self, line: &str) {
        let written = match &mut self.log {
            Log::None => return,
            Log::Later(_, lines) => {
                lines.push(line.to_owned());
                return;
            }
            Log::Open(file) => file.write_all(format!("{line}\n").as_bytes()),
        };
        if let Err(error) = written {
            self.log = Log::None;
            self.warn(&format!("{LOG} in the run's folder ends here: {error}"));
        }
    }

    /// Opens the log, at its end if a run is continued.
    fn open_log(&mut self, is_continued: bool) {
        let Log::Later(path, lines) = std::mem::replace(&mut self.log, Log::None) else { return };
        let opened =
            File::options().create(true).write(true).append(is_continued).truncate(!is_continued).open(&path);
        match opened {
            Ok(file) => self.log = Log::Open(file),
            Err(error) => self.warn(&format!("cannot write {}: {error}", path.display())),
        }
        lines.iter().for_each(|line| self.keep(line));
    }

    /// Points the bar at `subject`, replacing the one it showed.
    fn turn_to(&mut self, subject: &str, total: u64, done: u64, unit: Unit) {
        if self.subject == subject {
            return;
        }
        self.subject = subject.to_owned();
        self.last_line = None;
        if let Some(bar) = &mut self.bar {
            bar.finish_and_clear();
            let style = ProgressStyle::with_template(unit.template()).expect("the template is a constant");
            *bar =
                ProgressBar::new(total).with_style(style).with_prefix(subject.to_owned()).with_position(done);
            log::set_bar(Some(bar.clone()));
        }
    }

    fn count(&mut self, subject: &str, done: u64, total: u64, unit: Unit) {
        self.turn_to(subject, total, done, unit);
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        } else if done == total || self.last_line.is_none_or(|at| at.elapsed() >= PATIENCE) {
            self.last_line = Some(Instant::now());
            self.say(&match unit {
                Unit::Bytes => format!("{subject} {}/{}", size::in_words(done), size::in_words(total)),
                Unit::Rows | Unit::Steps => format!("{subject} {done}/{total}"),
            });
        }
    }

    fn record(&mut self, record: &Record) {
        let line = StepLine::from_metrics(|name| record.get(name));
        match record.split() {
            Split::Train => self.step(record, &line),
            Split::Eval => {
                let when = match record.step() {
                    0 => "before the first step".to_owned(),
                    step => format!("after step {step}"),
                };
                let text = format!("eval {when}: {line}");
                tracing::info!(metrics = record.to_json(), "{text}");
                self.keep(&text);
            }
        }
    }

    fn step(&mut self, record: &Record, line: &StepLine) {
        let step = record.step();
        let steps = self.steps;
        self.turn_to("train", steps, step, Unit::Steps);
        let left = self.began.filter(|(_, first)| step > *first).map(|(at, first)| {
            in_words(at.elapsed().mul_f64(steps.saturating_sub(step) as f64 / (step - first) as f64))
        });
        let left = left.filter(|_| step < steps);
        if let Some(bar) = &self.bar {
            bar.set_position(step);
            let rest = width().saturating_sub(format!("train {step}/{steps}    ").len());
            bar.set_message(line.fitted(left.as_deref(), rest));
        }
        if step.is_multiple_of(self.interval) || step == steps {
            let left = left.map_or(String::new(), |left| format!("  left {left}"));
            let text = format!("step {step}/{steps}  {line}{left}");
            if self.bar.is_none() {
                tracing::info!(metrics = record.to_json(), "{text}");
            }
            self.keep(&text);
        }
    }

    /// Shows how answers have changed, repeats what may have spoiled the model, and names the files and the
    /// next command.
    fn finished(&mut self, model: &Path) {
        self.finish();
        let changes = self.samples.lines(width());
        changes.iter().for_each(|line| self.say(line));
        if !self.troubles.is_empty() {
            self.warn("look at its answers before you use the model:");
            for trouble in std::mem::take(&mut self.troubles) {
                self.warn(&format!("* {trouble}"));
            }
        }
        let places = closing::places(self.method, model);
        places.iter().for_each(|line| self.say(line));
    }

    /// Removes the bar, so that the next output starts on a clean line.
    pub(crate) fn finish(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
            log::set_bar(None);
        }
        self.subject.clear();
    }
}

/// Columns of the terminal.
fn width() -> usize {
    rustix::termios::tcgetwinsize(std::io::stderr()).map_or(80, |size| usize::from(size.ws_col)).max(40)
}

impl Observer for Watcher {
    fn event(&mut self, event: &Event<'_>) {
        if self.prints_json
            && let Err(error) = json_events::print(event)
        {
            self.prints_json = false;
            self.warn(&format!("--json ends here: {error:#}"));
        }
        match event {
            Event::Tokenizing { split, done, total } => {
                self.count(&format!("tokenise {} rows", split.name()), *done, *total, Unit::Bytes);
            }
            Event::Data { split, cache } => {
                for line in cache.report_lines() {
                    self.say(&format!("{}: {line}", split.name()));
                }
            }
            Event::Plan(plan) => self.say(&plan.to_string()),
            Event::Reference { split, done, total } => {
                self.count(&format!("reference on {} rows", split.name()), *done, *total, Unit::Rows);
            }
            Event::Started { step, steps, resumed_from, advice } => {
                self.at_once.store(false, Ordering::Relaxed);
                self.steps = *steps;
                self.troubles.extend(advice.iter().map(|advice| advice.finding.clone()));
                self.began = Some((Instant::now(), *step));
                self.open_log(resumed_from.is_some());
                if let Some(path) = resumed_from {
                    self.say(&format!("continuing after step {step}, from {}", path.display()));
                }
            }
            Event::StartingGap { per_token } => self.say(&format!(
                "policy and reference start from different weights: {per_token:.4} nats per answer token apart"
            )),
            Event::Record(record) => self.record(record),
            Event::Samples { step, samples } => {
                self.samples.take(*step, samples);
            }
            Event::Best { step, metric, value } => {
                self.samples.return_to(*step);
                self.say(&format!(
                    "the model that is written is that of step {step}, where {metric} was best: {value:.4}"
                ));
            }
            Event::StoppedEarly { step, evaluations } => self.say(&format!(
                "ended after step {step}: the last {evaluations} evaluations did not improve enough on the best before them"
            )),
            Event::Stopped { step: 0 } => self.say("stopped before the first step"),
            Event::Stopped { step } => {
                self.say(&format!("stopped after step {step}; the same command with --resume continues"));
            }
            Event::Skipped { step, reason, rows, in_a_row } => {
                self.warn(&format!("step {step} left out ({in_a_row} in a row): {reason}: {rows}"));
            }
            Event::Saved(path) => self.say(&format!("saved {}", path.display())),
            Event::Finished(path) => self.finished(path),
            Event::Profiled { report, folder } => {
                self.say(&format!("\n{report}\nprofiles of all ranks are in {}", folder.display()));
            }
            Event::Advice(advice) => {
                self.warn(&format!("after step {}: {advice}", advice.step));
                self.troubles.push(advice.finding.clone());
            }
            Event::Warning(text) => self.warn(text),
        }
    }

    fn is_to_save(&mut self) -> bool {
        self.save.swap(false, Ordering::Relaxed)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.finish();
    }
}
