//! Client of a program that is kept running: lines of JSON in, lines of JSON out.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use super::answer::{Parser, Reply};
use super::config::CommandConfig;
use super::process::{Process, StderrLine, Tail};
use super::round::CommandBatch;
use crate::backoff::{LOOK, sleep};
use crate::{JudgeError, Result};

/// A running program, restarted when it fails.
pub(crate) struct CommandClient {
    /// Beginning of errors.
    owner: String,
    config: CommandConfig,
    /// `None` after an error; the next call starts another.
    process: Option<Process>,
    stderr: Tail,
    parser: Parser,
    /// Number of ends in a row without an answer, forced ones included.
    num_exits: usize,
    /// Id of the next call's first item.
    next_id: u64,
    /// Repeated items since it was built.
    pub(crate) retries: u64,
    /// Restarts since it was built.
    pub(crate) restarts: u64,
}

impl CommandClient {
    /// Starts the program, so that it is ready early. `on_stderr` is called on a thread of the
    /// client. Errors begin with `owner`.
    pub(crate) fn new(owner: String, config: CommandConfig, on_stderr: StderrLine) -> Result<Self> {
        let mut client = Self {
            owner,
            config,
            process: None,
            stderr: Tail::new(on_stderr),
            parser: Parser::new(),
            num_exits: 0,
            next_id: 0,
            retries: 0,
            restarts: 0,
        };
        client.process = Some(client.start()?);
        Ok(client)
    }

    /// Asks until each of `num_items` has a reply; `item` makes one from its index and its id.
    pub(crate) fn ask<R: Reply>(
        &mut self,
        num_items: usize,
        item: impl Fn(usize, u64) -> serde_json::Value,
        stop: &AtomicBool,
    ) -> Result<Vec<R>> {
        let first_id = self.next_id;
        self.next_id += num_items as u64;
        let line = |index: usize| {
            let mut line = item(index, first_id + index as u64).to_string().into_bytes();
            line.push(b'\n');
            line
        };
        let mut round = CommandBatch::new(first_id, num_items);
        let result = self.run(&line, &mut round, stop);
        self.retries += round.asked_again();
        if let Err(error) = result {
            // The program may work on items of this call, which are no longer needed.
            if let Some(mut process) = self.process.take() {
                process.skip_grace();
            }
            self.num_exits = 0;
            return Err(error);
        }
        Ok(round.into_replies())
    }

    fn start(&self) -> Result<Process> {
        let grace = Duration::from_secs_f64(self.config.grace_s);
        Process::start(&self.config.command, grace, &self.stderr).map_err(|source| JudgeError::Start {
            owner: self.owner.clone(),
            command: self.config.command.join(" "),
            source,
        })
    }

    /// Asks until each item has a reply.
    fn run<R: Reply>(
        &mut self,
        line: &dyn Fn(usize) -> Vec<u8>,
        round: &mut CommandBatch<R>,
        stop: &AtomicBool,
    ) -> Result<()> {
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
                process.send(line(index));
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
    fn restart_later<R: Reply>(&mut self, round: &mut CommandBatch<R>, stop: &AtomicBool) -> Result<()> {
        let Some(process) = self.process.take() else { return Ok(()) };
        let how = process.end();
        round.record_exit(&how);
        self.num_exits += 1;
        if self.num_exits > self.config.restarts {
            return Err(JudgeError::Died {
                owner: self.owner.clone(),
                command: self.config.command.join(" "),
                times: self.num_exits,
                how,
                stderr: self.stderr.lines(),
            });
        }
        sleep(self.config.backoff().pause(self.num_exits), stop)?;
        self.restarts += 1;
        Ok(())
    }
}
