//! Wake-up of a thread that sleeps in a poll.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// Pair of sockets: a byte written to one makes the other readable.
#[derive(Debug)]
pub(crate) struct Wake {
    ring: UnixStream,
    bell: UnixStream,
}

impl Wake {
    pub(crate) fn new() -> std::io::Result<Self> {
        let (ring, bell) = UnixStream::pair()?;
        ring.set_nonblocking(true)?;
        bell.set_nonblocking(true)?;
        Ok(Self { ring, bell })
    }

    /// Wakes the sleeper, now or at its next poll.
    pub(crate) fn wake(&self) {
        // Where no byte fits, enough are there.
        let _ = (&self.ring).write(&[0]);
    }

    /// Removes all wake-ups.
    pub(crate) fn clear(&self) {
        while (&self.bell).read(&mut [0; 64]).is_ok_and(|read| read > 0) {}
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
