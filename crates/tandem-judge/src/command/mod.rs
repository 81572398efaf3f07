//! Judge over a user's program: lines of JSON in, lines of JSON out.
//!
//! The program is kept running and receives several items at a time. A failure costs the scores of
//! the items that it concerns and no others; [`CommandBatch`] keeps account of that.

mod answer;
mod config;
mod process;
mod round;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use serde_json::json;

pub use config::CommandConfig;

use self::answer::Parser;
use self::process::{Process, Tail};
use self::round::CommandBatch;
use crate::backoff::{LOOK, sleep};
use crate::{Counts, Judge, JudgeError, Prompt, PromptWithCompletions, Result, Verdict};

/// Receiver of each line that the command writes to stderr.
pub type StderrLine = Arc<dyn Fn(&str) + Send + Sync>;

/// Judge that asks a program.
pub struct CommandJudge {
    name: String,
    config: CommandConfig,
    /// `None` after an error; the next call starts another.
    process: Option<Process>,
    stderr: Tail,
    parser: Parser,
    /// Number of ends in a row without an answer, forced ones included.
    num_exits: usize,
    /// Id of the next call's first item.
    next_id: u64,
    counts: Counts,
}

impl CommandJudge {
    /// Starts the program, so that it is ready early. `on_stderr` is called on a thread of the
    /// judge.
    pub fn new(name: impl Into<String>, config: CommandConfig, on_stderr: StderrLine) -> Result<Self> {
        let name = name.into();
        config.check(&name)?;
        let mut judge = Self {
            name,
            config,
            process: None,
            stderr: Tail::new(on_stderr),
            parser: Parser::new(),
            num_exits: 0,
            next_id: 0,
            counts: Counts::default(),
        };
        judge.process = Some(judge.start()?);
        Ok(judge)
    }

    fn start(&self) -> Result<Process> {
        let grace = Duration::from_secs_f64(self.config.grace_s);
        Process::start(&self.config.command, grace, &self.stderr).map_err(|source| JudgeError::Start {
            judge: self.name.clone(),
            command: self.config.command.join(" "),
            source,
        })
    }

    /// Asks until each item has a verdict.
    fn run(&mut self, items: &Items<'_>, round: &mut CommandBatch, stop: &AtomicBool) -> Result<()> {
        while !round.is_done() {
            if stop.load(Ordering::Relaxed) {
                return Err(JudgeError::Stopped);
            }
            let Some(process) = &mut self.process else {
                self.process = Some(self.start()?);
                continue;
            };
            if process.is_closed() {
                self.restart_later(round, stop)?;
                continue;
            }
            while let Some(index) = round.next(self.config.concurrency) {
                process.send(items.line(index));
            }
            match process.receive(LOOK) {
                Ok(line) => {
                    if self.parser.take(&line, round) {
                        self.num_exits = 0;
                        process.has_answered = true;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => continue,
            }
            let seconds = match process.has_answered {
                true => self.config.timeout_s,
                false => self.config.timeout_s.max(self.config.start_timeout_s),
            };
            if round.waited() > Duration::from_secs_f64(seconds) {
                round.record_timeout(format!("no answer within {seconds} s"));
                process.skip_grace();
                self.restart_later(round, stop)?;
            }
        }
        Ok(())
    }

    /// Ends a process that has ended or must end, and pauses before the next one.
    fn restart_later(&mut self, round: &mut CommandBatch, stop: &AtomicBool) -> Result<()> {
        let Some(process) = self.process.take() else { return Ok(()) };
        let how = process.end();
        round.record_exit(&how);
        self.num_exits += 1;
        if self.num_exits > self.config.restarts {
            return Err(JudgeError::Died {
                judge: self.name.clone(),
                command: self.config.command.join(" "),
                times: self.num_exits,
                how,
                stderr: self.stderr.lines(),
            });
        }
        sleep(self.config.backoff().pause(self.num_exits), stop)?;
        self.counts.restarts += 1;
        Ok(())
    }
}

impl Judge for CommandJudge {
    fn name(&self) -> &str {
        &self.name
    }

    fn judge(
        &mut self,
        groups: &[PromptWithCompletions<'_>],
        stop: &AtomicBool,
    ) -> Result<Vec<Vec<Verdict>>> {
        let items = Items::new(groups, self.next_id);
        self.next_id += items.places.len() as u64;
        let mut round = CommandBatch::new(items.first_id, items.places.len());
        let result = self.run(&items, &mut round, stop);
        self.counts.retries += round.asked_again();
        if let Err(error) = result {
            // The program may work on items of this call, which are no longer needed.
            if let Some(mut process) = self.process.take() {
                process.skip_grace();
            }
            self.num_exits = 0;
            return Err(error);
        }
        let mut verdicts = round.into_verdicts().into_iter();
        let verdicts: Vec<Vec<_>> =
            groups.iter().map(|group| verdicts.by_ref().take(group.answers.len()).collect()).collect();
        self.counts.add_verdicts(&verdicts);
        Ok(verdicts)
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

/// The responses of all groups as one list of items.
struct Items<'a> {
    groups: &'a [PromptWithCompletions<'a>],
    places: Vec<(usize, usize)>,
    first_id: u64,
}

impl<'a> Items<'a> {
    fn new(groups: &'a [PromptWithCompletions<'a>], first_id: u64) -> Self {
        let of = |(group, answers): (usize, usize)| (0..answers).map(move |answer| (group, answer));
        let places = groups.iter().map(|group| group.answers.len()).enumerate().flat_map(of).collect();
        Self { groups, places, first_id }
    }

    /// Returns the input line of an item.
    fn line(&self, index: usize) -> Vec<u8> {
        let (group, answer) = self.places[index];
        let group = &self.groups[group];
        let (prompt, messages) = match group.prompt {
            Prompt::Text(text) => (Some(text), None),
            Prompt::Messages(messages) => (None, Some(messages)),
        };
        let item = json!({
            "id": self.first_id + index as u64,
            "prompt": prompt,
            "messages": messages,
            "answer": group.answers[answer].text,
            "row": group.row,
        });
        let mut line = item.to_string().into_bytes();
        line.push(b'\n');
        line
    }
}
