//! Output of ranks: each line with its rank before it, whole, and in a file of its own if wanted.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;

/// Time for the last lines of a member that has ended. A program that it started may keep its pipes
/// open for longer.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Longest error that is shown again at the end, in bytes.
const ERROR: usize = 8 << 10;

/// A stream of this process.
#[derive(Clone, Copy)]
enum Stream {
    Out,
    Error,
}

/// Readers of one member's output.
pub(super) struct Output {
    readers: Vec<JoinHandle<()>>,
    /// The last lines from one that begins with `error:` on.
    error: Arc<Mutex<String>>,
}

impl Output {
    /// Begins to pass lines on, each after `prefix`, and into `log`.
    pub(super) fn pass_on(
        out: impl Read + Send + 'static,
        error: impl Read + Send + 'static,
        prefix: &str,
        log: Option<File>,
    ) -> std::io::Result<Self> {
        let (text, log) = (Arc::new(Mutex::new(String::new())), Arc::new(Mutex::new(log)));
        let reader = |from: Box<dyn Read + Send>, stream: Stream| {
            let (prefix, log, text) = (prefix.to_owned(), Arc::clone(&log), Arc::clone(&text));
            std::thread::Builder::new()
                .name("output of a rank".to_owned())
                .spawn(move || read(from, stream, &prefix, &log, &text))
        };
        let readers = vec![reader(Box::new(out), Stream::Out)?, reader(Box::new(error), Stream::Error)?];
        Ok(Self { readers, error: text })
    }

    /// Waits for the last lines, and returns the error with which they end, if any.
    pub(super) fn end(self) -> Option<String> {
        let until = Instant::now() + LAST_LINES;
        while !self.readers.iter().all(JoinHandle::is_finished) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = self.error.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (!error.is_empty()).then_some(error)
    }
}

fn read(
    from: Box<dyn Read + Send>,
    stream: Stream,
    prefix: &str,
    log: &Mutex<Option<File>>,
    error: &Mutex<String>,
) {
    let (mut from, mut line) = (BufReader::new(from), Vec::new());
    // A rank that ends closes its end.
    while from.read_until(b'\n', &mut line).is_ok_and(|count| count > 0) {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches(['\n', '\r']);
        let whole = format!("{prefix}{text}\n");
        // The launcher goes on where nobody reads what it prints.
        let _ = match stream {
            Stream::Out => std::io::stdout().lock().write_all(whole.as_bytes()),
            Stream::Error => std::io::stderr().lock().write_all(whole.as_bytes()),
        };
        if let Some(log) = &mut *log.lock().unwrap_or_else(PoisonError::into_inner) {
            // A full disk must not end the run, whose own files report it.
            let _ = log.write_all(&line);
        }
        if matches!(stream, Stream::Error) {
            keep_error(&mut error.lock().unwrap_or_else(PoisonError::into_inner), text);
        }
        line.clear();
    }
}

/// Adds a line to the error that is kept: a new one begins with `error:`.
fn keep_error(error: &mut String, line: &str) {
    let begins =
        line.starts_with("error:") || line.contains("] error:") || line.contains(r#""level":"error""#);
    if begins {
        error.clear();
    } else if error.is_empty() || error.len() + line.len() > ERROR {
        return;
    } else {
        error.push('\n');
    }
    error.push_str(line);
}

/// Opens the file of a rank's output in `folder`; a later attempt is appended.
pub(super) fn log_file(folder: &Path, rank: usize) -> anyhow::Result<File> {
    let path: PathBuf = folder.join(format!("rank-{rank}.log"));
    let file = File::options().create(true).append(true).open(&path);
    file.with_context(|| format!("--log-dir: cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_error_is_kept_with_its_lines() {
        let mut error = String::new();
        for line in ["step 1", "error: one", "caused by", "[rank 3] error: two", "more"] {
            keep_error(&mut error, line);
        }
        assert_eq!(error, "[rank 3] error: two\nmore");
    }

    #[test]
    fn lines_reach_the_log_whole() {
        let folder = tempfile::tempdir().unwrap();
        let log = log_file(folder.path(), 3).unwrap();
        let output = Output::pass_on(&b"a\nb"[..], &b"error: c\nd\n"[..], "[rank 3] ", Some(log)).unwrap();
        assert_eq!(output.end().unwrap(), "error: c\nd");
        let log = std::fs::read_to_string(folder.path().join("rank-3.log")).unwrap();
        let mut lines: Vec<&str> = log.split_inclusive('\n').collect();
        lines.sort_unstable();
        assert_eq!(log.len(), "a\nberror: c\nd\n".len(), "{lines:?}");
    }
}
