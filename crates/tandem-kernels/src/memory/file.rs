//! What must be known of a file before memory lies in it: a page that has no place on the disk ends the process when it is
//! written, with no error to report.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Makes a file `length` bytes long, with a place on the disk for each of them.
pub(crate) fn set_aside(file: &File, length: u64) -> io::Result<()> {
    let length = libc::off_t::try_from(length).map_err(|_| io::ErrorKind::FileTooLarge)?;
    // SAFETY: the descriptor is open as long as `file` is borrowed; the call reads and writes no memory of ours.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// The disk that a file lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSystem {
    /// Bytes that this user may still write.
    pub free: u64,
    /// Whether it is no disk but memory.
    pub is_memory: bool,
}

impl FileSystem {
    /// Of an open file or folder.
    ///
    /// # Errors
    /// If the system does not tell.
    pub fn of(file: &File) -> io::Result<Self> {
        // SAFETY: every pattern of bits, zeros too, is a value of this struct of integers.
        let mut found: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: the descriptor is open as long as `file` is borrowed, and the struct is ours to be written.
        if unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let is_memory = [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&found.f_type);
        Ok(Self { free: found.f_bavail * found.f_bsize as u64, is_memory })
    }
}

const RAMFS_MAGIC: libc::__fsword_t = 0x8584_58f6;
