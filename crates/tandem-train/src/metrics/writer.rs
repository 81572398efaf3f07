//! `metrics.jsonl`, `rows.jsonl` and `samples.jsonl`: an object with a `step` a line; appended line
//! by line, cut back on resume.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use super::record::{Record, Split};
use crate::error::{Result, TrainError};

/// The open file.
#[derive(Debug)]
pub struct MetricsFile {
    file: File,
    path: PathBuf,
    /// Step of the last line.
    last_step: Option<u64>,
}

impl MetricsFile {
    /// Starts a new file, replacing one that is there.
    pub fn create(path: &Path) -> Result<Self> {
        let file = appending(path)?;
        file.set_len(0).map_err(TrainError::io("truncate", path))?;
        Ok(Self { file, path: path.to_path_buf(), last_step: None })
    }

    /// Opens the file of a run that resumes from a checkpoint of `step`, and cuts off what was
    /// written after it: those steps will be run and written again, and the step's evaluation if it
    /// is due. A line torn by the kill is cut off too. A missing file is created. Whole lines that
    /// cannot be read stay; their 1-based numbers are returned.
    pub fn resume(path: &Path, step: u64, is_evaluation_due: bool) -> Result<(Self, Vec<usize>)> {
        let file = appending(path)?;
        let Kept { bytes, last_step, damaged } =
            kept(&file, step, is_evaluation_due).map_err(TrainError::io("read", path))?;
        file.set_len(bytes).map_err(TrainError::io("truncate", path))?;
        Ok((Self { file, path: path.to_path_buf(), last_step }, damaged))
    }

    /// Returns the step of the last line.
    pub(crate) fn last_step(&self) -> Option<u64> {
        self.last_step
    }

    /// Makes all lines durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(TrainError::io("write", &self.path))
    }

    /// Returns the file's path if another file, or none, is there by now. Further lines then go to the
    /// file at the path, which is created if it is missing.
    pub(crate) fn reopen_if_removed(&mut self) -> Result<Option<&Path>> {
        if is_at(&self.file, &self.path) {
            return Ok(None);
        }
        self.file = appending(&self.path)?;
        Ok(Some(&self.path))
    }

    /// Appends one record. The line is handed to the system at once, so it survives a killed
    /// process.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        self.append(record.step(), record.to_json())
    }

    /// Appends the dataset's rows that a 1-based step takes, over all ranks.
    pub fn write_rows(&mut self, step: u64, rows: &[u32]) -> Result<()> {
        self.append(step, json!({ "step": step, "rows": rows }).to_string())
    }

    /// Appends an object that has the 1-based `step` it belongs to.
    pub fn write_line(&mut self, line: &Value) -> Result<()> {
        let step = line["step"].as_u64().expect("each line has its step");
        self.append(step, line.to_string())
    }

    fn append(&mut self, step: u64, mut line: String) -> Result<()> {
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(TrainError::io("write", &self.path))?;
        self.last_step = Some(step);
        Ok(())
    }
}

/// Opens a file whose lines go to its end, also after somebody has emptied it.
fn appending(path: &Path) -> Result<File> {
    let opened = OpenOptions::new().read(true).append(true).create(true).open(path);
    opened.map_err(TrainError::io("open", path))
}

/// Returns whether an open file is the one at a path.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    let identity = |facts: std::io::Result<Metadata>| facts.ok().map(|facts| (facts.dev(), facts.ino()));
    let found = identity(std::fs::metadata(path));
    found.is_some() && found == identity(file.metadata())
}

/// Reads the records of a `metrics.jsonl`, one after the other: those of long runs take gigabytes together. Lines that are
/// none, as damaged or torn ones, are left out, and so are those that are written after this call.
///
/// # Errors
/// The file cannot be read. One that is missing has no records.
pub fn records(path: &Path) -> Result<impl Iterator<Item = Result<Record>> + use<>> {
    let file = match tandem_files::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        opened => Some(opened.map_err(TrainError::io("open", path))?),
    };
    let length = file.as_ref().map_or(Ok(0), |file| file.metadata().map(|facts| facts.len()));
    let length = length.map_err(TrainError::io("read", path))?;
    let lines = file.into_iter().flat_map(move |file| BufReader::new(file.take(length)).split(b'\n'));
    let path = path.to_path_buf();
    Ok(lines.filter_map(move |line| match line {
        Ok(line) => std::str::from_utf8(&line).ok().and_then(Record::from_json).map(Ok),
        Err(error) => Some(Err(TrainError::io("read", &path)(error))),
    }))
}

/// Reads all [`records`].
///
/// # Errors
/// As there.
pub fn read_records(path: &Path) -> Result<Vec<Record>> {
    records(path)?.collect()
}

/// Step and split of a line, the rest of which is not looked at.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Place {
    step: Option<u64>,
    split: Value,
}

/// Lines that a run that goes on keeps.
struct Kept {
    bytes: u64,
    last_step: Option<u64>,
    /// Numbers of those that cannot be read.
    damaged: Vec<usize>,
}

/// Keeps the whole lines before the first of a step after `step`, or of this step's evaluation if it is due.
fn kept(file: &File, step: u64, is_evaluation_due: bool) -> std::io::Result<Kept> {
    let mut reader = BufReader::new(file);
    let (mut kept, mut line) = (Kept { bytes: 0, last_step: None, damaged: Vec::new() }, Vec::new());
    for number in 1.. {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)? as u64;
        let Place { step: at, split } = serde_json::from_slice(&line).unwrap_or_default();
        let is_due = is_evaluation_due && at == Some(step) && split == Split::Eval.name();
        if line.last() != Some(&b'\n') || at.is_some_and(|at| at > step) || is_due {
            break;
        }
        kept.damaged.extend(at.is_none().then_some(number));
        kept.last_step = at.or(kept.last_step);
        kept.bytes += read;
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: u64, split: Split) -> Record {
        let mut record = Record::new(step, split);
        record.set("loss", 0.5);
        record
    }

    fn lines(path: &Path) -> Vec<String> {
        std::fs::read_to_string(path).expect("text").lines().map(str::to_string).collect()
    }

    #[test]
    fn one_object_a_line_step_and_split_first() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::create(&path).expect("a new file");
        let mut record = record(3, Split::Eval);
        record.set("rewards/chosen", 1e-7);
        record.set_count("num_tokens", u64::MAX);
        record.set("grad_norm", f64::NAN);
        file.write(&record).expect("written");
        // Read while the file is still open: a line is not held back.
        let expected = r#"{"step":3,"split":"eval","loss":0.5,"rewards/chosen":1e-7,"num_tokens":18446744073709551615,"grad_norm":null}"#;
        assert_eq!(lines(&path), [expected]);
        let read = read_records(&path).expect("a text");
        assert_eq!(read[0].to_json(), expected);
        assert_eq!((read[0].get("rewards/chosen"), read[0].get("grad_norm")), (Some(1e-7), None));
    }

    #[test]
    fn resume_cuts_off_what_came_after_the_checkpoint() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::create(&path).expect("a new file");
        for step in 1..=4 {
            file.write(&record(step, Split::Train)).expect("written");
            file.write(&record(step, Split::Eval)).expect("written");
        }
        drop(file);
        let whole = lines(&path);
        let (mut file, damaged) = MetricsFile::resume(&path, 2, false).expect("resumed");
        assert_eq!((lines(&path), damaged), (whole[..4].to_vec(), Vec::new()));
        file.write(&record(3, Split::Train)).expect("written");
        assert_eq!(lines(&path), whole[..5]);
        drop(MetricsFile::resume(&path, 2, true).expect("resumed"));
        assert_eq!(lines(&path), whole[..3], "the evaluation is made again");
    }

    #[test]
    fn rows_of_steps_are_cut_off_too() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("rows.jsonl");
        let mut file = MetricsFile::create(&path).expect("a new file");
        for step in 1..=3 {
            file.write_rows(step, &[7, step as u32]).expect("written");
        }
        drop(file);
        drop(MetricsFile::resume(&path, 2, false).expect("resumed"));
        assert_eq!(lines(&path), [r#"{"step":1,"rows":[7,1]}"#, r#"{"step":2,"rows":[7,2]}"#]);
    }

    #[test]
    fn resume_cuts_off_a_torn_line() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\n{\"step\":2,\"lo").expect("written");
        drop(MetricsFile::resume(&path, 9, false).expect("resumed"));
        assert_eq!(lines(&path), ["{\"step\":1}"]);
        // Torn right before its newline: whole JSON, but the next line would be glued to it.
        std::fs::write(&path, "{\"step\":1}\n{\"step\":2}").expect("written");
        drop(MetricsFile::resume(&path, 9, false).expect("resumed"));
        assert_eq!(lines(&path), ["{\"step\":1}"]);
    }

    #[test]
    fn a_damaged_line_stays_and_takes_no_later_line_along() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::create(&path).expect("a new file");
        for step in 1..=5 {
            file.write(&record(step, Split::Train)).expect("written");
        }
        for byte in [b'#', 0xff] {
            let mut bytes = std::fs::read(&path).expect("bytes");
            let second = bytes.iter().position(|byte| *byte == b'\n').expect("an end of a line") + 1;
            bytes[second] = byte;
            std::fs::write(&path, &bytes).expect("written");
            let (_, damaged) = MetricsFile::resume(&path, 4, false).expect("resumed");
            assert_eq!(damaged, [2]);
            let kept = std::fs::read(&path).expect("bytes");
            assert!(bytes.starts_with(&kept) && kept.split(|byte| *byte == b'\n').count() == 5, "4 lines");
            let steps: Vec<u64> = read_records(&path).expect("lines").iter().map(Record::step).collect();
            assert_eq!(steps, [1, 3, 4]);
        }
    }

    #[test]
    fn a_file_that_was_removed_or_replaced_is_noticed_and_begun_again() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::create(&path).expect("a new file");
        file.write(&record(1, Split::Train)).expect("written");
        assert_eq!(file.reopen_if_removed().expect("the same"), None);
        std::fs::remove_file(&path).expect("removed");
        assert_eq!(file.reopen_if_removed().expect("created"), Some(&*path));
        file.write(&record(2, Split::Train)).expect("written");
        let replaced = folder.path().join("other");
        std::fs::copy(&path, &replaced).expect("copied");
        std::fs::rename(&replaced, &path).expect("renamed");
        assert_eq!(file.reopen_if_removed().expect("opened"), Some(&*path));
        file.write(&record(3, Split::Train)).expect("written");
        let steps: Vec<u64> = read_records(&path).expect("lines").iter().map(Record::step).collect();
        assert_eq!(steps, [2, 3]);
    }

    #[test]
    fn lines_after_a_file_was_emptied_are_at_its_beginning() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "of another run\n").expect("written");
        let mut file = MetricsFile::create(&path).expect("a new file");
        file.write(&record(1, Split::Train)).expect("written");
        std::fs::write(&path, "").expect("emptied");
        file.write(&record(2, Split::Train)).expect("written");
        assert_eq!(lines(&path), [record(2, Split::Train).to_json()]);
    }

    #[test]
    fn resume_without_a_file_starts_one() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        let (mut file, _) = MetricsFile::resume(&path, 5, false).expect("resumed");
        file.write(&record(6, Split::Train)).expect("written");
        assert_eq!(lines(&path).len(), 1);
    }
}
