//! Running command. Threads write to it and read from it, so neither side waits for the other's
//! full pipe.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use crate::GroupLeader;

/// Receiver of each line that the command writes to stderr.
pub type StderrLine = Arc<dyn Fn(&str) + Send + Sync>;

/// Maximum bytes of a line; a longer one is split and is no answer.
const LONGEST_LINE: u64 = 16 << 20;

const LONGEST_STDERR_LINE: u64 = 64 << 10;

/// Maximum number of unread lines of stdout; then the command waits.
const WAITING_LINES: usize = 64;

/// Number of stderr lines in an error.
const TAIL: usize = 20;

/// Time to read stderr after a command's end: another process may hold the pipe open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Process of a command and leader of its process group. Drop closes stdin, waits briefly, and
/// kills the rest of the group.
pub(super) struct Process {
    /// Dropped before the leader, which closes stdin when everything is written.
    to_write: Option<Sender<Vec<u8>>>,
    lines: Receiver<Vec<u8>>,
    /// A line received ahead of its request.
    ahead: Option<Vec<u8>>,
    /// Disconnected at the end of stderr.
    stderr_end: Receiver<()>,
    leader: GroupLeader,
    grace: Duration,
    /// Whether it has answered an item.
    pub(super) has_answered: bool,
}

impl Process {
    pub(super) fn start(command: &[String], grace: Duration, tail: &Tail) -> io::Result<Self> {
        let mut program = Command::new(&command[0]);
        program.args(&command[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut leader = GroupLeader::start(&mut program)?;
        let child = leader.child();
        let piped = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(mut stdin), Some(stdout), Some(stderr)) = piped else {
            unreachable!("all three are piped")
        };

        let (to_write, written) = channel::<Vec<u8>>();
        // An error means that it no longer reads: it will end or not answer.
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

    pub(super) fn send(&self, line: Vec<u8>) {
        if let Some(to_write) = &self.to_write {
            // An error means that it no longer reads, as above.
            let _ = to_write.send(line);
        }
    }

    /// Returns the next line of output. Disconnected: there are no more.
    pub(super) fn receive(&mut self, patience: Duration) -> Result<Vec<u8>, RecvTimeoutError> {
        self.ahead.take().map_or_else(|| self.lines.recv_timeout(patience), Ok)
    }

    /// Returns whether stdout is closed and everything was received.
    pub(super) fn is_closed(&mut self) -> bool {
        if self.ahead.is_none() {
            match self.lines.try_recv() {
                Ok(line) => self.ahead = Some(line),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return true,
            }
        }
        false
    }

    /// Makes drop kill it without grace.
    pub(super) fn skip_grace(&mut self) {
        self.grace = Duration::ZERO;
    }

    /// Ends it and returns how it ended; its stderr has then been read as far as possible.
    pub(super) fn end(mut self) -> String {
        self.finish();
        let _ = self.stderr_end.recv_timeout(LAST_WORDS);
        match self.leader.kill() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        }
    }

    fn finish(&mut self) {
        self.to_write = None;
        let until = Instant::now() + self.grace;
        while !self.leader.has_ended() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.leader.kill();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.finish();
    }
}

/// The last stderr lines of a command and its predecessors, each also passed on.
#[derive(Clone)]
pub(super) struct Tail {
    lines: Arc<Mutex<VecDeque<String>>>,
    on_line: StderrLine,
}

impl Tail {
    /// Creates an empty tail.
    pub(super) fn new(on_line: StderrLine) -> Self {
        Self { lines: Arc::default(), on_line }
    }

    /// Returns the lines, oldest first.
    pub(super) fn lines(&self) -> Vec<String> {
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

/// Reads the next line, at most `longest` bytes of it. `None` at the end and after a read error.
fn next_line(reader: &mut impl BufRead, longest: u64) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    let length = reader.by_ref().take(longest).read_until(b'\n', &mut line).ok()?;
    (length > 0).then_some(line)
}
