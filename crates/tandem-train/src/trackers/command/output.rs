//! Output of a program: the beginning of it in a file, and its last line for sentences.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;
use std::time::Duration;

/// Most bytes of a run's log: a program must not fill the disk that the run writes to.
const MOST: u64 = 4 << 20;

/// Longest line.
const LONGEST: u64 = 64 << 10;

/// Longest last line in a sentence.
const SHOWN: usize = 200;

/// Time to read the rest after a program's end: another process may hold the pipe open.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// The last line that is not blank.
pub(super) struct LastLine {
    line: Arc<Mutex<String>>,
    /// Disconnected at the end of the output.
    end: Receiver<()>,
}

impl LastLine {
    /// Returns the line after the end of the program.
    pub(super) fn take(&self) -> Option<String> {
        // Disconnected: everything is read.
        let _ = self.end.recv_timeout(LAST_WORDS);
        let line = self.line.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (!line.is_empty()).then_some(line)
    }
}

/// Copies output to the end of the file `log`, on a thread.
pub(super) fn keep(output: File, log: &Path) -> io::Result<LastLine> {
    // Without a file the output is still read, or the program would wait.
    let mut log = File::options().append(true).create(true).open(log).ok();
    let mut room = log.as_ref().map_or(0, |log| MOST.saturating_sub(log.metadata().map_or(0, |m| m.len())));
    let (line, (at_end, end)) = (Arc::new(Mutex::new(String::new())), sync_channel(0));
    let kept = line.clone();
    let copy = move || {
        let _at_end = at_end;
        let mut output = BufReader::new(output);
        let mut bytes = Vec::new();
        while matches!(output.by_ref().take(LONGEST).read_until(b'\n', &mut bytes), Ok(1..)) {
            if let Some(file) = &mut log {
                let is_last = bytes.len() as u64 >= room;
                room = room.saturating_sub(bytes.len() as u64);
                let text = if is_last { &b"tandem: the rest is left out\n"[..] } else { &bytes };
                if file.write_all(text).is_err() || is_last {
                    log = None;
                }
            }
            let text = String::from_utf8_lossy(&bytes);
            if !text.trim().is_empty() {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                *kept = text.trim().chars().take(SHOWN).collect();
            }
            bytes.clear();
        }
    };
    Builder::new().name("tracker-output".to_owned()).spawn(copy)?;
    Ok(LastLine { line, end })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_writes_without_end_fills_no_disk() {
        let folder = tempfile::tempdir().unwrap();
        let (output, log) = (folder.path().join("output"), folder.path().join("log"));
        let line = [b"x".repeat(1023), b"\n".to_vec()].concat();
        std::fs::write(&output, [line.repeat(5 << 10), b"the end\n\n".to_vec()].concat()).unwrap();
        let last = keep(File::open(&output).unwrap(), &log).unwrap();
        while last.end.recv() != Err(std::sync::mpsc::RecvError) {}
        assert_eq!(last.take().as_deref(), Some("the end"));
        let kept = std::fs::read(&log).unwrap();
        assert!(kept.len() as u64 <= MOST + 100 && kept.ends_with(b"left out\n"), "{}", kept.len());
    }
}
