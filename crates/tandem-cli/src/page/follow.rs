//! Reading of a file of lines that grows, or is cut back and written again.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes before the position that must still be there for the file to be the one that was read.
const TAIL: usize = 256;
/// Most bytes read at once.
const MOST: u64 = 64 << 20;

/// Reader of whole lines from a file that another process writes.
pub(crate) struct LineFollower {
    path: PathBuf,
    /// Bytes of whole lines that were read.
    position: u64,
    /// Device and inode, which a replaced file does not share.
    identity: Option<(u64, u64)>,
    /// Last bytes before the position. A resumed run may have written past it meanwhile.
    tail: Vec<u8>,
}

/// Lines that have come since the last poll.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct NewLines {
    /// Whether all earlier lines are void: the file was cut back, replaced or deleted.
    pub is_restarted: bool,
    /// Whole lines without their ends.
    pub lines: Vec<String>,
}

impl LineFollower {
    /// Creates a reader of a file that may not exist yet.
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), position: 0, identity: None, tail: Vec::new() }
    }

    /// Reads the lines that have become whole, and says whether the file has started anew.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub(crate) fn poll(&mut self) -> io::Result<NewLines> {
        let mut file = match tandem_files::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(NewLines { is_restarted: self.restart(), lines: Vec::new() });
            }
            Err(error) => return Err(error),
        };
        let facts = file.metadata()?;
        let identity = Some((facts.dev(), facts.ino()));
        let is_same =
            self.identity == identity && self.position <= facts.len() && self.has_tail(&mut file)?;
        let is_restarted = !is_same && self.restart();
        self.identity = identity;
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(self.position))?;
        file.take(MOST).read_to_end(&mut bytes)?;
        // A line is written at once, but may be seen in parts.
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        bytes.truncate(whole);
        self.position += whole as u64;
        self.tail.extend(&bytes[whole.saturating_sub(TAIL)..]);
        self.tail.drain(..self.tail.len().saturating_sub(TAIL));
        let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let lines = lines.map(|line| String::from_utf8_lossy(line).into_owned()).collect();
        Ok(NewLines { is_restarted, lines })
    }

    /// Begins at the start of the file; returns whether anything was read before.
    pub(crate) fn restart(&mut self) -> bool {
        let had_lines = self.position > 0;
        (self.position, self.identity) = (0, None);
        self.tail.clear();
        had_lines
    }

    fn has_tail(&self, file: &mut File) -> io::Result<bool> {
        let mut found = vec![0; self.tail.len()];
        file.seek(SeekFrom::Start(self.position - self.tail.len() as u64))?;
        match file.read_exact(&mut found) {
            Ok(()) => Ok(found == self.tail),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    fn lines(lines: &[&str]) -> NewLines {
        NewLines { is_restarted: false, lines: lines.iter().map(|line| (*line).to_owned()).collect() }
    }

    fn restarted(with: &[&str]) -> NewLines {
        NewLines { is_restarted: true, ..lines(with) }
    }

    #[test]
    fn lines_are_read_once_they_are_whole_and_the_file_may_come_later() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        let mut follower = LineFollower::new(&path);
        assert_eq!(follower.poll().expect("nothing there"), lines(&[]));
        let mut file = File::create(&path).expect("created");
        file.write_all(b"one\ntw").expect("written");
        assert_eq!(follower.poll().expect("read"), lines(&["one"]));
        assert_eq!(follower.poll().expect("read"), lines(&[]));
        file.write_all(b"o\n").expect("written");
        assert_eq!(follower.poll().expect("read"), lines(&["two"]));
    }

    #[test]
    fn a_file_that_was_cut_back_replaced_or_deleted_starts_anew() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        fs::write(&path, "one\ntwo\nthree\n").expect("written");
        let mut follower = LineFollower::new(&path);
        follower.poll().expect("read");
        // A torn end that a resume cuts off is no reason to start anew.
        let mut file = File::options().append(true).open(&path).expect("opened");
        file.write_all(b"to").expect("written");
        assert_eq!(follower.poll().expect("read"), lines(&[]));
        file.set_len(14).expect("cut");
        assert_eq!(follower.poll().expect("read"), lines(&[]));
        file.set_len(4).expect("cut");
        assert_eq!(follower.poll().expect("read"), restarted(&["one"]));
        // Cut back and written past the position between two polls.
        file.set_len(0).expect("cut");
        file.write_all(b"six\nseven\n").expect("written");
        assert_eq!(follower.poll().expect("read"), restarted(&["six", "seven"]));
        fs::write(folder.path().join("new"), "six\nseven\neight\n").expect("written");
        fs::rename(folder.path().join("new"), &path).expect("renamed");
        assert_eq!(follower.poll().expect("read"), restarted(&["six", "seven", "eight"]));
        fs::remove_file(&path).expect("removed");
        assert_eq!(follower.poll().expect("gone"), restarted(&[]));
        assert_eq!(follower.poll().expect("gone"), lines(&[]));
    }
}
