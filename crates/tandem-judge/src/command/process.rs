//! A running command: threads write to it and read from it, so neither side ever waits for the other's full pipe.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::StderrLine;

/// A longer line is cut into several, and is no answer.
const LONGEST_LINE: u64 = 16 << 20;

/// The same of stderr.
const LONGEST_STDERR_LINE: u64 = 64 << 10;

/// Lines of stdout that wait to be looked at. A command that writes more waits.
const WAITING_LINES: usize = 64;

/// Lines of stderr that an error shows.
const TAIL: usize = 20;

/// How long an ended command's last words on stderr are waited for: another process may hold the pipe open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A command's process, the first of a process group of its own. Dropping it closes its stdin, waits a little, and kills what is
/// left of the group.
pub struct Process {
    /// Dropped before the leader, which closes its stdin as soon as all is written.
    to_write: Option<Sender<Vec<u8>>>,
    lines: Receiver<Vec<u8>>,
    /// A line that was received before somebody asked for it.
    ahead: Option<Vec<u8>>,
    /// Disconnected when stderr is at its end.
    stderr_end: Receiver<()>,
    leader: Leader,
    grace: Duration,
    /// Whether it answered an item.
    pub has_answered: bool,
}

impl Process {
    /// Starts a command.
    pub fn start(command: &[String], grace: Duration, tail: &Tail) -> io::Result<Self> {
        let child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let mut leader = Leader { child, end: None };
        let piped = (leader.child.stdin.take(), leader.child.stdout.take(), leader.child.stderr.take());
        let (Some(mut stdin), Some(stdout), Some(stderr)) = piped else {
            unreachable!("all three are piped")
        };

        let (to_write, written) = channel::<Vec<u8>>();
        // An error is that it reads no more: then it ends soon, or does not answer.
        let write = move || written.iter().try_for_each(|line| stdin.write_all(&line)).unwrap_or_default();
        Builder::new().name("judge-stdin".to_owned()).spawn(write)?;

        let (found, lines) = sync_channel(WAITING_LINES);
        let read = move || {
            let mut stdout = BufReader::new(stdout);
            while let Some(line) = next_line(&mut stdout, LONGEST_LINE) {
                if found.send(line).is_err() {
                    return;
                }
            }
        };
        Builder::new().name("judge-stdout".to_owned()).spawn(read)?;

        let (ended, stderr_end) = sync_channel::<()>(0);
        let tail = tail.clone();
        let read = move || {
            let _ended = ended;
            let mut stderr = BufReader::new(stderr);
            while let Some(line) = next_line(&mut stderr, LONGEST_STDERR_LINE) {
                tail.push(&line);
            }
        };
        Builder::new().name("judge-stderr".to_owned()).spawn(read)?;
        let to_write = Some(to_write);
        Ok(Self { to_write, lines, ahead: None, stderr_end, leader, grace, has_answered: false })
    }

    /// Has a line written, some time.
    pub fn send(&self, line: Vec<u8>) {
        if let Some(to_write) = &self.to_write {
            // An error is a command that reads no more, as above.
            let _ = to_write.send(line);
        }
    }

    /// The next line that it wrote. Disconnected: there will be none.
    pub fn receive(&mut self, patience: Duration) -> Result<Vec<u8>, RecvTimeoutError> {
        self.ahead.take().map_or_else(|| self.lines.recv_timeout(patience), Ok)
    }

    /// Whether it closed its stdout and everything that it wrote was received.
    pub fn is_closed(&mut self) -> bool {
        if self.ahead.is_none() {
            match self.lines.try_recv() {
                Ok(line) => self.ahead = Some(line),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        false
    }

    /// Has it killed when it is dropped, without grace.
    pub fn hurry(&mut self) {
        self.grace = Duration::ZERO;
    }

    /// Ends it, and says how it ended. Then what it wrote to stderr was read, as far as can be.
    pub fn end(mut self) -> String {
        self.finish();
        let _ = self.stderr_end.recv_timeout(LAST_WORDS);
        match &self.leader.end {
            Some(Ok(status)) => status.to_string(),
            Some(Err(error)) => error.to_string(),
            None => unreachable!("it was reaped"),
        }
    }

    fn finish(&mut self) {
        self.to_write = None;
        let until = Instant::now() + self.grace;
        while !self.leader.has_ended() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.leader.kill();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.finish();
    }
}

/// The first process of its group.
struct Leader {
    child: Child,
    /// What its end was, once it is reaped. From then on its number, which is the group's too, may be another process's.
    end: Option<io::Result<ExitStatus>>,
}

impl Leader {
    /// Whether it ended. It is not reaped by this.
    fn has_ended(&self) -> bool {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        self.end.is_some() || !matches!(waitid(WaitId::Pid(Pid::from_child(&self.child)), options), Ok(None))
    }

    /// Kills what is left of the group and reaps the leader.
    fn kill(&mut self) {
        if self.end.is_none() {
            // An error is that all of them ended.
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            self.end = Some(self.child.wait());
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last lines that a command and those before it wrote to stderr, each of which is passed on, too.
#[derive(Clone)]
pub struct Tail {
    lines: Arc<Mutex<VecDeque<String>>>,
    on_line: StderrLine,
}

impl Tail {
    /// No lines yet.
    pub fn new(on_line: StderrLine) -> Self {
        Self { lines: Arc::default(), on_line }
    }

    /// The lines, oldest first.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn push(&self, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        let line = line.trim_end();
        (self.on_line)(line);
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL {
            lines.pop_front();
        }
        lines.push_back(line.to_owned());
    }
}

/// The next line, or so much of it as may be one. None at the end, and where reading fails, which is the end too.
fn next_line(reader: &mut impl BufRead, longest: u64) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    let length = reader.by_ref().take(longest).read_until(b'\n', &mut line).ok()?;
    (length > 0).then_some(line)
}
