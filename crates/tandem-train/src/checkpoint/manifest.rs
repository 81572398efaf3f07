//! Manifest: files of a checkpoint with size and checksum.

use std::io::{ErrorKind, Read};
use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::error::{Result, TrainError};

/// Name of the manifest within the folder.
pub(super) const MANIFEST: &str = "manifest.json";
/// Name of the cursor within the folder.
pub(super) const CURSOR: &str = "cursor.json";
/// Version of the written layout. Version 1 is that of a single rank, without `ranks` in the
/// manifest.
pub(super) const FORMAT: u32 = 2;
/// Bytes read at once to be checked.
const BUFFER: usize = 256 << 10;

/// `manifest.json`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub format: u32,
    pub step: u64,
    /// How many ranks wrote it, each a file.
    #[serde(default)]
    pub ranks: usize,
    pub files: Vec<FileEntry>,
}

/// One file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FileEntry {
    pub name: String,
    pub bytes: u64,
    pub blake3: String,
}

/// The error for a checkpoint that cannot be used.
pub(super) fn broken(folder: &Path, reason: impl Into<String>) -> TrainError {
    TrainError::BrokenCheckpoint { path: folder.to_path_buf(), reason: reason.into() }
}

impl Manifest {
    pub(crate) fn read(folder: &Path) -> Result<Self> {
        if !folder.is_dir() {
            return Err(broken(folder, "there is no such folder"));
        }
        let text = read_text(folder, MANIFEST)?;
        let manifest: Self =
            serde_json::from_str(&text).map_err(|e| broken(folder, format!("{MANIFEST}: {e}")))?;
        let found = manifest.format;
        if !(1..=FORMAT).contains(&found) {
            return Err(broken(
                folder,
                format!("{MANIFEST}: format {found}; this version reads formats 1 to {FORMAT}"),
            ));
        }
        for FileEntry { name, .. } in &manifest.files {
            if Path::new(name).file_name() != Some(name.as_ref()) {
                return Err(broken(folder, format!("{MANIFEST}: {name:?} is not a plain file name")));
            }
        }
        Ok(manifest)
    }

    /// Verifies size and checksum of every file, in parallel: one core hashes more slowly than many
    /// disks read. The first damaged file in the list is reported.
    pub(crate) fn verify(&self, folder: &Path) -> Result<()> {
        let checked: Vec<_> = self.files.par_iter().map(|entry| entry.verify(folder)).collect();
        checked.into_iter().collect()
    }
}

impl FileEntry {
    pub(crate) fn verify(&self, folder: &Path) -> Result<()> {
        let Self { name, bytes, blake3 } = self;
        let path = folder.join(name);
        let mut file = match tandem_files::open(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Err(broken(folder, format!("{name} is missing")));
            }
            other => other.map_err(TrainError::io("open", &path))?,
        };
        let found = file.metadata().map_err(TrainError::io("read", &path))?.len();
        if found != *bytes {
            return Err(broken(folder, format!("{name} has {found} bytes, expected {bytes}")));
        }
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; BUFFER];
        loop {
            match file.read(&mut buffer).map_err(TrainError::io("read", &path))? {
                0 => break,
                n => hasher.update(&buffer[..n]),
            };
        }
        let found = hasher.finalize().to_hex();
        if found.as_str() != blake3 {
            return Err(broken(folder, format!("{name} has checksum {found}, expected {blake3}")));
        }
        Ok(())
    }
}

/// Reads a small file of a checkpoint; one that is missing or not text means the checkpoint is
/// broken.
pub(super) fn read_text(folder: &Path, name: &str) -> Result<String> {
    let path = folder.join(name);
    tandem_files::read_text(&path, tandem_files::MAX_TABLE).map_err(|e| match e.kind() {
        ErrorKind::NotFound => broken(folder, format!("{name} is missing")),
        ErrorKind::InvalidData => broken(folder, format!("{name} is not text")),
        _ => TrainError::io("read", &path)(e),
    })
}
