//! Position of a row in its files, for messages and reports.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bytemuck::{Pod, Zeroable};

/// Position of a row: a file and a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// 1-based line; for an element of a JSON array, the line on which it starts; for Parquet and
    /// Arrow, the row.
    pub line: u64,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

/// Rows that are on consecutive lines of a file, up to the next run.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Zeroable, Pod)]
struct Run {
    row: u64,
    file: u64,
    line: u64,
}

/// Places of the rows of a data set by their number from 0.
///
/// Tokens do not depend on the format of the files, and lines do: the token cache holds the numbers
/// of rows, and a file beside it these runs.
///
/// ```text
/// key      32 bytes: the key of the token cache
/// tokens   32 bytes: the checksum of its header
/// runs     3 × u64 each
/// checksum 32 bytes: BLAKE3 of the bytes before
/// ```
#[derive(Debug)]
pub(crate) struct Places {
    files: Vec<PathBuf>,
    runs: Vec<Run>,
}

const HASH: usize = blake3::OUT_LEN;

impl Places {
    pub(crate) fn new(files: Vec<PathBuf>) -> Self {
        Self { files, runs: Vec::new() }
    }

    /// Adds the next row, whose number is larger than those before.
    pub(crate) fn push(&mut self, row: u64, file: usize, line: u64) {
        let file = file as u64;
        let continues =
            |run: &Run| run.file == file && line.checked_sub(run.line) == row.checked_sub(run.row);
        if !self.runs.last().is_some_and(continues) {
            self.runs.push(Run { row, file, line });
        }
    }

    /// Returns the place of row `row`.
    pub(crate) fn place(&self, row: u64) -> Place {
        let after = self.runs.partition_point(|run| run.row <= row);
        let run = self.runs[after - 1];
        Place { path: self.files[run.file as usize].clone(), line: run.line + (row - run.row) }
    }

    pub(crate) fn files(&self) -> &[PathBuf] {
        &self.files
    }

    pub(crate) fn write(&self, path: &Path, key: &blake3::Hash, tokens: &[u8; HASH]) -> io::Result<()> {
        let runs: &[u8] = bytemuck::cast_slice(&self.runs);
        let mut bytes = [key.as_bytes(), tokens, runs].concat();
        let checksum = blake3::hash(&bytes);
        bytes.extend_from_slice(checksum.as_bytes());
        let mut file = File::create_new(path)?;
        file.write_all(&bytes)?;
        file.sync_all()
    }

    /// Reads the places of a token cache. The inner error says why they are invalid.
    pub(crate) fn read(
        path: &Path,
        key: &blake3::Hash,
        tokens: &[u8; HASH],
        files: Vec<PathBuf>,
    ) -> io::Result<Result<Self, &'static str>> {
        let bytes = match std::fs::read(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                return Ok(Err("the places of its rows are missing"));
            }
            bytes => bytes?,
        };
        let Some((bytes, checksum)) = bytes.split_last_chunk::<HASH>() else {
            return Ok(Err("the places of its rows are cut off"));
        };
        if blake3::hash(bytes) != *checksum {
            return Ok(Err("the places of its rows are damaged"));
        }
        let Some(runs) = bytes.strip_prefix(key.as_bytes()).and_then(|rest| rest.strip_prefix(tokens)) else {
            return Ok(Err("it was made from other data"));
        };
        let runs: Vec<Run> = runs.chunks_exact(size_of::<Run>()).map(bytemuck::pod_read_unaligned).collect();
        let is_known = |run: &Run| usize::try_from(run.file).is_ok_and(|file| file < files.len());
        if runs.first().is_none_or(|run| run.row != 0) || !runs.iter().all(is_known) {
            return Ok(Err("the places of its rows are damaged"));
        }
        Ok(Ok(Self { files, runs }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_find_their_lines_across_gaps_and_files() {
        let rows = [(0, 2), (0, 3), (0, 7), (0, 8), (0, 8), (1, 1), (1, 2), (2, 3)];
        let mut places = Places::new(["a", "b", "c"].map(PathBuf::from).to_vec());
        for (row, (file, line)) in (0..).zip(rows) {
            places.push(row, file, line);
        }
        assert_eq!(places.runs.len(), 5);
        for (row, (file, line)) in (0..).zip(rows) {
            let expected = Place { path: places.files[file].clone(), line };
            assert_eq!(places.place(row), expected, "row {row}");
        }
    }
}
