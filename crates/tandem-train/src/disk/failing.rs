//! A disk that is full or fails, for tests.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::disk::{Disk, DiskFile, RealDisk};

/// A disk that is full after some bytes and fails after some operations.
#[derive(Debug)]
pub(crate) struct Failing {
    bytes: Arc<AtomicU64>,
    pub(crate) operations: AtomicU64,
    /// Whether a failure ends the process: every later operation fails too.
    dead: bool,
}

impl Failing {
    pub(crate) fn new(bytes: u64, operations: u64, dead: bool) -> Arc<Self> {
        Arc::new(Self { bytes: Arc::new(bytes.into()), operations: operations.into(), dead })
    }

    fn operate(&self) -> io::Result<()> {
        match self.operations.load(Ordering::Relaxed) {
            0 if self.dead => Err(io::Error::other("the process was killed")),
            n => {
                self.operations.store(n.saturating_sub(1), Ordering::Relaxed);
                Ok(())
            }
        }
    }
}

impl Disk for Failing {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.operate()?;
        RealDisk.create_dir(path)
    }
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.operate()?;
        Ok(Box::new(FailingFile { file: File::create_new(path)?, bytes: self.bytes.clone() }))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operate()?;
        RealDisk.rename(from, to)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.operate()?;
        RealDisk.sync_dir(path)
    }
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        self.operate()?;
        RealDisk.remove_dir(path)
    }
}

struct FailingFile {
    file: File,
    bytes: Arc<AtomicU64>,
}

impl Write for FailingFile {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let room = self.bytes.load(Ordering::Relaxed).min(buffer.len() as u64);
        if room == 0 && !buffer.is_empty() {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        self.bytes.fetch_sub(room, Ordering::Relaxed);
        self.file.write(&buffer[..room as usize])
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl DiskFile for FailingFile {
    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_all()
    }
}
