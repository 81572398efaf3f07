//! A running program: leader of a process group of its own, fed through a pipe that never blocks.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tandem_judge::GroupLeader;

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
    leader: GroupLeader,
    stdin: Option<ChildStdin>,
    /// What the pipe has yet to take.
    line: Vec<u8>,
    written: usize,
    started: Instant,
    last_line: LastLine,
}

impl Process {
    /// Starts a program whose output goes to the file `log`, and whose first line is `first`.
    pub(super) fn start(command: &[String], log: &Path, first: Vec<u8>) -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        let mut program = Command::new(&command[0]);
        program.args(&command[1..]).stdin(Stdio::piped()).stdout(writer.try_clone()?).stderr(writer);
        // The terminal's Ctrl-C is for the run, which tells the program when it is over.
        let mut leader = GroupLeader::start(&mut program)?;
        // The program's own ends of the pipe are the last ones.
        drop(program);
        let stdin = leader.child().stdin.take().expect("it is piped");
        fcntl_setfl(&stdin, fcntl_getfl(&stdin)? | OFlags::NONBLOCK)?;
        let last_line = output::keep(File::from(OwnedFd::from(reader)), log)?;
        let (stdin, started) = (Some(stdin), Instant::now());
        Ok(Self { leader, stdin, line: first, written: 0, started, last_line })
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
        if self.leader.has_ended() { Written::Ended } else { Written::All }
    }

    /// Closes the pipe and returns whether the program has ended before `deadline`.
    pub(super) fn close(&mut self, deadline: Instant) -> bool {
        self.stdin = None;
        while !self.leader.has_ended() {
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
        while !self.leader.has_ended() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (mut how, is_success) = match self.leader.kill() {
            Ok(status) => (format!("ended with {status}"), status.success()),
            Err(error) => (format!("ended ({error})"), false),
        };
        if let Some(line) = self.last_line.take() {
            how += &format!("; its last line: {line}");
        }
        Ended { how, lived: self.started.elapsed(), is_success }
    }
}
