//! File operations of crash-safe writes, as a trait so that tests can make any of them fail.

#[cfg(test)]
pub(crate) mod failing;

use std::fmt::Debug;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Result, TrainError};

/// A file system. Several threads use it.
pub(crate) trait Disk: Debug + Send + Sync {
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a file that is not there yet.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;
    /// Renames; a file at `to` is replaced, a folder must be empty.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Makes renames and creations within a folder durable.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Removes a folder with everything in it.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
}

/// A file being written.
pub(crate) trait DiskFile: Write {
    /// Makes the content durable.
    fn sync(&mut self) -> io::Result<()>;
}

/// The real one.
#[derive(Debug)]
pub(crate) struct RealDisk;

impl Disk for RealDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::create_new(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

/// Writes a file so that a reader sees the old content or the new one.
///
/// # Errors
/// A file `PATH.tmp` cannot be written beside it, or not be renamed; the error names the path.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let mut file = File::create(&temporary).map_err(TrainError::io("create", &temporary))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(TrainError::io("write", &temporary))?;
    fs::rename(&temporary, path).map_err(TrainError::io("rename to", path))
}

impl DiskFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
