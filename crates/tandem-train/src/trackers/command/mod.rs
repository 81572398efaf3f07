//! A program of the user's that gets every record as a line of JSON on its stdin.
//!
//! It is never waited for while the run goes on. One that ends is started again, with growing pauses; one
//! that ends too often is given up. Its output goes to `tracker.log` in the run's folder.

mod output;
mod process;

use std::collections::VecDeque;
use std::env;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{Access, access};
use tandem_judge::http::Backoff;

use self::process::{Ended, Process, Written};
use super::message::{End, Message, Start};
use super::{OUTPUT, Tracker, Trouble};

/// Restarts in a row before the program is given up.
const RESTARTS: usize = 5;

/// Lifetime after which an end is not counted with the ones before.
const STABLE: Duration = Duration::from_secs(60);

const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), longest: Duration::from_secs(30) };

/// Refuses a program that does not exist.
pub(super) fn check(command: &[String]) -> Result<(), String> {
    let Some(program) = command.first() else { return Ok(()) };
    let is_program = |path: &Path| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    let path = env::var_os("PATH").unwrap_or_default();
    let found = match program.contains('/') {
        true => is_program(Path::new(program)),
        false => env::split_paths(&path).any(|folder| is_program(&folder.join(program))),
    };
    let place = if program.contains('/') { "there is no such program" } else { "no folder of PATH has it" };
    found.then_some(()).ok_or_else(|| {
        format!("logging.command: cannot run `{program}`: {place}; correct the name, or remove the key")
    })
}

/// Tracker that feeds a program.
pub(super) struct CommandTracker {
    command: Vec<String>,
    start: Arc<Start>,
    process: Option<Process>,
    /// Starts so far.
    starts: usize,
    /// Ends in a row.
    ends: usize,
    /// Whether the process holds the line of the first message.
    has_begun: bool,
}

impl CommandTracker {
    pub(super) fn new(command: &[String], start: &Arc<Start>) -> Self {
        Self {
            command: command.to_vec(),
            start: start.clone(),
            process: None,
            starts: 0,
            ends: 0,
            has_begun: false,
        }
    }

    fn name(&self) -> String {
        format!("logging.command: `{}`", self.command.join(" "))
    }

    fn log(&self) -> String {
        self.start.output.join(OUTPUT).display().to_string()
    }

    /// Returns the running program, which is started if it is not.
    fn process(&mut self) -> Result<&mut Process, Trouble> {
        if self.process.is_none() {
            let first = self.start.line(self.starts);
            match Process::start(&self.command, &self.start.output.join(OUTPUT), first) {
                Ok(process) => self.process = Some(process),
                Err(error) => {
                    let how = format!("cannot be started ({error})");
                    return Err(self.ended(Ended { how, lived: Duration::ZERO, is_success: false }));
                }
            }
            self.starts += 1;
        }
        Ok(self.process.as_mut().expect("as started"))
    }

    /// Counts an end of the program.
    fn ended(&mut self, Ended { how, lived, .. }: Ended) -> Trouble {
        self.ends = if lived >= STABLE { 1 } else { self.ends + 1 };
        let may_restart = self.ends <= RESTARTS;
        let warning = format!(
            "{} {how}, {} times in a row; the run goes on without it: mend it and resume ({} has its output). \
             metrics.jsonl has all records",
            self.name(),
            self.ends,
            self.log()
        );
        Trouble { warning, is_passing: may_restart, pause: may_restart.then(|| BACKOFF.pause(self.ends)) }
    }
}

impl Tracker for CommandTracker {
    fn key(&self) -> &'static str {
        "logging.command"
    }

    fn deliver(&mut self, messages: &mut VecDeque<Arc<Message>>) -> Result<(), Trouble> {
        loop {
            let written = self.process()?.write();
            match written {
                Written::All if self.has_begun => drop(messages.pop_front()),
                Written::All => {}
                Written::Part => return Ok(()),
                Written::Ended => {
                    self.has_begun = false;
                    let ended = self.process.take().map(Process::kill).expect("as started");
                    return Err(self.ended(ended));
                }
            }
            self.has_begun = !messages.is_empty();
            match messages.front() {
                Some(message) => self.process()?.set_line(message.line()),
                None => return Ok(()),
            }
        }
    }

    fn end(&mut self, end: &End, deadline: Instant) -> Result<(), Trouble> {
        let process = self.process()?;
        process.append(&end.line());
        let has_read = loop {
            match process.write() {
                Written::All => break true,
                Written::Ended => break false,
                Written::Part if Instant::now() >= deadline => break false,
                Written::Part => {}
            }
        };
        let has_ended = process.close(deadline);
        let ended = self.process.take().map(Process::kill).expect("as started");
        let seconds = self.start.grace;
        let how = match (has_ended, has_read) {
            (true, true) if ended.is_success => return Ok(()),
            (true, _) => ended.how,
            (false, true) => format!(
                "had not ended {seconds} s after the end of the run (logging.grace_s), and was killed"
            ),
            (false, false) => format!(
                "had not read all {seconds} s after the end of the run (logging.grace_s), and was killed"
            ),
        };
        let warning =
            format!("{} {how}; {} has its output, metrics.jsonl all records", self.name(), self.log());
        Err(Trouble { warning, is_passing: false, pause: None })
    }
}
