//! Files as memory. Disk blocks are allocated beforehand: writing a mapped page without one kills
//! the process with no error to report.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Makes a file `length` bytes long and allocates all its disk blocks.
pub(crate) fn set_aside(file: &File, length: u64) -> io::Result<()> {
    let length = libc::off_t::try_from(length).map_err(|_| io::ErrorKind::FileTooLarge)?;
    // SAFETY: the descriptor is open as long as `file` is borrowed; the call reads and writes no
    // memory of ours.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// File system of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Bytes that this user may still write.
    pub free: u64,
    /// True if the file system is in memory (tmpfs, ramfs).
    pub is_memory: bool,
}

impl FileSystem {
    /// Reads the file system of an open file or directory.
    pub fn map(file: &File) -> io::Result<Self> {
        // SAFETY: every pattern of bits, zeros too, is a value of this struct of integers.
        let mut found: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open as long as `file` is borrowed, and the struct is ours to
        // be written.
        if unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let is_memory = [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&found.f_type);
        Ok(Self { free: found.f_bavail * found.f_bsize as u64, is_memory })
    }
}

const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;
