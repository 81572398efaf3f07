//! `metrics.jsonl`, `rows.jsonl` and `samples.jsonl`: an object with a `step` a line; appended line
//! by line, cut back on resume.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::record::{Record, Split};
use crate::error::{Result, TrainError};

/// The open file.
#[derive(Debug)]
pub struct MetricsFile {
    file: File,
    path: PathBuf,
}

impl MetricsFile {
    /// Starts a new file, replacing one that is there.
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create(path).map_err(TrainError::io("create", path))?;
        Ok(Self { file, path: path.to_path_buf() })
    }

    /// Opens the file of a run that resumes from a checkpoint of `step`, and cuts off what was
    /// written after it: those steps will be run and written again, and the step's evaluation if it
    /// is due. A line torn by the kill is cut off too. A missing file is created.
    pub fn resume(path: &Path, step: u64, is_evaluation_due: bool) -> Result<Self> {
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(TrainError::io("open", path))?;
        let keep = kept_bytes(&file, step, is_evaluation_due).map_err(TrainError::io("read", path))?;
        file.set_len(keep).map_err(TrainError::io("truncate", path))?;
        file.seek(SeekFrom::End(0)).map_err(TrainError::io("seek in", path))?;
        Ok(Self { file, path: path.to_path_buf() })
    }

    /// Appends one record. The line is handed to the system at once, so it survives a killed
    /// process.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        self.append(record.to_json())
    }

    /// Appends the dataset's rows that a 1-based step takes, over all ranks.
    pub fn write_rows(&mut self, step: u64, rows: &[u32]) -> Result<()> {
        self.append(json!({ "step": step, "rows": rows }).to_string())
    }

    /// Appends an object that has the 1-based `step` it belongs to.
    pub fn write_line(&mut self, line: &Value) -> Result<()> {
        self.append(line.to_string())
    }

    fn append(&mut self, mut line: String) -> Result<()> {
        line.push('\n');
        self.file.write_all(line.as_bytes()).map_err(TrainError::io("write", &self.path))
    }
}

/// Reads the records of a `metrics.jsonl`, up to a line that is none.
///
/// # Errors
/// The file cannot be read. One that is missing has no records.
pub fn read_records(path: &Path) -> Result<Vec<Record>> {
    let file = match tandem_files::open(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened.map_err(TrainError::io("open", path))?,
    };
    let mut records = Vec::new();
    for line in BufReader::new(file).lines() {
        match Record::from_json(&line.map_err(TrainError::io("read", path))?) {
            Some(record) => records.push(record),
            None => break,
        }
    }
    Ok(records)
}

/// Length of the leading whole lines of steps up to `step`, without this step's evaluation if it is
/// due.
fn kept_bytes(file: &File, step: u64, is_evaluation_due: bool) -> std::io::Result<u64> {
    let mut reader = BufReader::new(file);
    let (mut keep, mut line) = (0, Vec::new());
    loop {
        line.clear();
        let read = reader.read_until(b'\n', &mut line)? as u64;
        let found: Value = serde_json::from_slice(&line).unwrap_or_default();
        let at = found["step"].as_u64();
        let is_due = is_evaluation_due && at == Some(step) && found["split"] == Split::Eval.name();
        if line.last() != Some(&b'\n') || at.is_none_or(|at| at > step) || is_due {
            return Ok(keep);
        }
        keep += read;
    }
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
        let mut file = MetricsFile::resume(&path, 2, false).expect("resumed");
        assert_eq!(lines(&path), whole[..4]);
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
    fn resume_without_a_file_starts_one() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("metrics.jsonl");
        MetricsFile::resume(&path, 5, false)
            .expect("resumed")
            .write(&record(6, Split::Train))
            .expect("written");
        assert_eq!(lines(&path).len(), 1);
    }
}
