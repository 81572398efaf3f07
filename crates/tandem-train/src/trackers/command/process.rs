//! A running program: leader of a process group of its own, fed through a pipe that never blocks.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::output::{self, LastLine};

/// Longest wait for a full pipe; the caller then looks at other things.
const LOOK: Duration = Duration::from_millis(50);

/// Result of writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// The line is in the pipe.
    All,
    /// The pipe is full.
    Part,
    /// The program reads no more.
    Ended,
}

/// End of a program.
pub(super) struct Ended {
    /// Predicate of a sentence: "ended with exit status: 1; its last line: …".
    pub how: String,
    pub lived: Duration,
    /// Whether its exit status is 0.
    pub is_success: bool,
}

/// Process of a program. Drop kills its group.
pub(super) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    /// What the pipe has yet to take.
    line: Vec<u8>,
    written: usize,
    started: Instant,
    last_line: LastLine,
    /// Exit status, once reaped. From then on another process may have its id, which is the group's too.
    status: Option<io::Result<ExitStatus>>,
}

impl Process {
    /// Starts a program whose output goes to the file `log`, and whose first line is `first`.
    pub(super) fn start(command: &[String], log: &Path, first: Vec<u8>) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::piped())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            // The terminal's Ctrl-C is for the run, which tells the program when it is over.
            .process_group(0)
            .spawn()?;
        let stdin = child.stdin.take().expect("it is piped");
        fcntl_setfl(&stdin, fcntl_getfl(&stdin)? | OFlags::NONBLOCK)?;
        let last_line = output::keep(File::from(OwnedFd::from(reader)), log)?;
        let (stdin, started) = (Some(stdin), Instant::now());
        Ok(Self { child, stdin, line: first, written: 0, started, last_line, status: None })
    }

    /// Sets the next line; the one before is in the pipe.
    pub(super) fn set_line(&mut self, line: Vec<u8>) {
        (self.line, self.written) = (line, 0);
    }

    /// Appends a line to what the pipe has yet to take.
    pub(super) fn append(&mut self, line: &[u8]) {
        self.line.extend_from_slice(line);
    }

    /// Writes what the pipe takes; waits for it at most a moment.
    pub(super) fn write(&mut self) -> Written {
        let Some(stdin) = &mut self.stdin else { return Written::Ended };
        let mut has_waited = false;
        while self.written < self.line.len() {
            match stdin.write(&self.line[self.written..]) {
                Ok(num) => self.written += num,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !has_waited => {
                    has_waited = true;
                    let patience = Timespec::try_from(LOOK).expect("a short time");
                    // An error here comes again from the next write.
                    let _ = poll(&mut [PollFd::new(&*stdin, PollFlags::OUT)], Some(&patience));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Written::Part,
                Err(_) => return Written::Ended,
            }
        }
        // A program that ended without reading leaves a pipe that looks open to the next short line.
        if self.has_ended() { Written::Ended } else { Written::All }
    }

    /// Closes the pipe and returns whether the program has ended before `deadline`.
    pub(super) fn close(&mut self, deadline: Instant) -> bool {
        self.stdin = None;
        while !self.has_ended() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    /// Ends the group.
    pub(super) fn kill(mut self) -> Ended {
        self.stdin = None;
        // A program that has closed its stdin is about to end by itself.
        let until = Instant::now() + LOOK;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill_group();
        let (mut how, is_success) = match self.status.take() {
            Some(Ok(status)) => (format!("ended with {status}"), status.success()),
            Some(Err(error)) => (format!("ended ({error})"), false),
            None => unreachable!("it was reaped"),
        };
        if let Some(line) = self.last_line.take() {
            how += &format!("; its last line: {line}");
        }
        Ended { how, lived: self.started.elapsed(), is_success }
    }

    /// Returns whether it has ended, without reaping it.
    fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.status.is_some()
            || !matches!(waitid(WaitId::Pid(Pid::from_child(&self.child)), options), Ok(None))
    }

    /// Kills the rest of the group and reaps the leader.
    fn kill_group(&mut self) {
        if self.status.is_none() {
            // An error means that all of them have ended.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            self.status = Some(self.child.wait());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill_group();
    }
}
