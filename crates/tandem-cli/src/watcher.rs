//! Progress of a run on stderr: a bar on a terminal, else one line per step.

use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use tandem_train::events::{Event, Observer};
use tandem_train::metrics::{Record, Split};

use crate::step_line::{StepLine, in_words};

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
}

impl Watcher {
    /// Draws a bar if stderr is a terminal; else writes a line every `interval` steps.
    pub(crate) fn every(interval: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(ProgressBar::hidden);
        Self {
            bar,
            interval,
            subject: String::new(),
            last_line: None,
            steps: 0,
            began: None,
            troubles: Vec::new(),
        }
    }

    fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) if !bar.is_hidden() => bar.suspend(|| eprintln!("{line}")),
            _ => eprintln!("{line}"),
        }
    }

    /// Points the bar at `subject`, replacing the one it showed.
    fn turn_to(&mut self, subject: &str, total: u64, done: u64) {
        if self.subject == subject {
            return;
        }
        self.subject = subject.to_owned();
        self.last_line = None;
        if let Some(bar) = &mut self.bar {
            bar.finish_and_clear();
            let style = ProgressStyle::with_template("{prefix} {bar:24} {pos}/{len}  {msg}")
                .expect("the template is a constant");
            *bar =
                ProgressBar::new(total).with_style(style).with_prefix(subject.to_owned()).with_position(done);
        }
    }

    fn count(&mut self, subject: &str, done: u64, total: u64) {
        self.turn_to(subject, total, done);
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
        } else if done == total || self.last_line.is_none_or(|at| at.elapsed() >= PATIENCE) {
            self.last_line = Some(Instant::now());
            self.say(&format!("{subject} {done}/{total}"));
        }
    }

    fn record(&mut self, record: &Record) {
        let line = StepLine::from_metrics(|name| record.get(name));
        match record.split() {
            Split::Train => self.step(record.step(), &line),
            Split::Eval => self.say(&format!("eval after step {}: {line}", record.step())),
        }
    }

    fn step(&mut self, step: u64, line: &StepLine) {
        let steps = self.steps;
        self.turn_to("train", steps, step);
        let left = self.began.filter(|(_, first)| step > *first).map(|(at, first)| {
            in_words(at.elapsed().mul_f64(steps.saturating_sub(step) as f64 / (step - first) as f64))
        });
        let text = match left {
            Some(left) if step < steps => format!("{line}  left {left}"),
            _ => line.to_string(),
        };
        match &self.bar {
            Some(bar) => {
                bar.set_position(step);
                bar.set_message(text);
            }
            None if step.is_multiple_of(self.interval) || step == steps => {
                self.say(&format!("step {step}/{steps}  {text}"));
            }
            None => {}
        }
    }

    /// Names the files and the next command, and repeats what may have spoiled the model.
    fn finished(&mut self, model: &Path) {
        self.say(&format!("the model is in {}", model.display()));
        if self.troubles.is_empty() {
            return;
        }
        self.say("look at its answers before you use it:");
        for trouble in &self.troubles {
            self.say(&format!("* {trouble}"));
        }
    }

    /// Removes the bar, so that the next output starts on a clean line.
    pub(crate) fn finish(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.subject.clear();
    }
}

impl Observer for Watcher {
    fn event(&mut self, event: &Event<'_>) {
        match event {
            Event::Tokenizing { split, done, total } => {
                self.count(&format!("tokenise {} rows", split.name()), *done, *total);
            }
            Event::Data { split, cache } => {
                for line in cache.report_lines() {
                    self.say(&format!("{}: {line}", split.name()));
                }
            }
            Event::Plan(plan) => self.say(&plan.to_string()),
            Event::Reference { split, done, total } => {
                self.count(&format!("reference on {} rows", split.name()), *done, *total);
            }
            Event::Started { step, steps, resumed_from } => {
                self.steps = *steps;
                self.began = Some((Instant::now(), *step));
                if let Some(path) = resumed_from {
                    self.say(&format!("continuing after step {step}, from {}", path.display()));
                }
            }
            Event::StartingGap { per_token } => self.say(&format!(
                "policy and reference start from different weights: {per_token:.4} nats per answer token apart"
            )),
            Event::Record(record) => self.record(record),
            Event::Skipped { step, rows, in_a_row } => self.say(&format!(
                "step {step} left out, its loss or gradient is not finite ({in_a_row} in a row): {rows}"
            )),
            Event::Saved(path) => self.say(&format!("saved {}", path.display())),
            Event::Finished(path) => self.finished(path),
            Event::Profiled { report, folder } => {
                self.say(&format!("\n{report}\nprofiles of all ranks are in {}", folder.display()));
            }
            Event::Advice(advice) => {
                self.say(&format!("warning: after step {}: {advice}", advice.step));
                self.troubles.push(advice.finding.clone());
            }
            Event::Warning(text) => self.say(&format!("warning: {text}")),
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.finish();
    }
}
