//! Position of a row in its files, for messages and reports.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Compact position of a row: a file's index and a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Origin {
    /// Index into the data set's files.
    pub file: u32,
    /// 1-based line; for an element of a JSON array, the line on which it starts.
    pub line: u32,
}

/// Position of a row: a file and a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// 1-based line; for an element of a JSON array, the line on which it starts.
    pub line: u32,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

impl Place {
    /// Resolves an origin, given the files in the order of [`Origin::file`].
    pub fn new(origin: Origin, files: &[impl AsRef<Path>]) -> Self {
        Self { path: files[origin.file as usize].as_ref().to_path_buf(), line: origin.line }
    }
}
