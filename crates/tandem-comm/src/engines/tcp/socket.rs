//! Sockets of connections: TCP between hosts, Unix within one. None of them blocks.

use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::{Errno, ioctl_fionread, retry_on_intr};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, send, sendmsg, shutdown};

/// The other side has closed the connection, or it broke.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gone;

pub(super) struct Socket(OwnedFd);

impl Socket {
    pub(super) fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self(stream.into()))
    }

    pub(super) fn unix(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self(stream.into()))
    }

    /// Sends the bytes that fit, maybe none.
    pub(super) fn send(&self, bytes: &[u8]) -> Result<usize, Gone> {
        would_block(retry_on_intr(|| send(&self.0, bytes, no_signal())))
    }

    /// Sends the bytes of two buffers that fit, in one packet if possible.
    pub(super) fn send_both(&self, first: &[u8], second: &[u8]) -> Result<usize, Gone> {
        let parts = [IoSlice::new(first), IoSlice::new(second)];
        let none = &mut SendAncillaryBuffer::default();
        would_block(retry_on_intr(|| sendmsg(&self.0, &parts, none, no_signal())))
    }

    /// Receives the bytes that are there, maybe none.
    pub(super) fn recv(&self, to: &mut [u8]) -> Result<usize, Gone> {
        self.recv_with(to, RecvFlags::empty())
    }

    /// As [`Socket::recv`], and leaves the bytes there.
    pub(super) fn peek(&self, to: &mut [u8]) -> Result<usize, Gone> {
        self.recv_with(to, RecvFlags::PEEK)
    }

    fn recv_with(&self, to: &mut [u8], flags: RecvFlags) -> Result<usize, Gone> {
        if to.is_empty() {
            return Ok(0);
        }
        match retry_on_intr(|| recv(&self.0, &mut *to, flags)) {
            Ok((0, _)) => Err(Gone),
            other => would_block(other.map(|(received, _)| received)),
        }
    }

    /// Returns whether the last unread bytes are `tail`.
    pub(super) fn ends_with(&self, tail: &[u8]) -> bool {
        let Ok(unread @ 1..) = ioctl_fionread(&self.0) else { return false };
        let mut bytes = vec![0; unread as usize];
        // If the reader takes some meanwhile, the rest still ends alike.
        self.peek(&mut bytes).is_ok_and(|read| bytes[..read].ends_with(tail))
    }

    /// Closes both directions. The other side receives all sent bytes, then the end.
    pub(super) fn close(&self) {
        // A connection that has ended needs no closing.
        let _ = shutdown(&self.0, Shutdown::Both);
    }

    /// Closes the direction of sending.
    pub(super) fn finish(&self) {
        let _ = shutdown(&self.0, Shutdown::Write);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A broken connection is an error, not a signal.
fn no_signal() -> SendFlags {
    #[cfg(target_os = "linux")]
    return SendFlags::NOSIGNAL;
    // Rust programs ignore SIGPIPE.
    #[cfg(not(target_os = "linux"))]
    SendFlags::empty()
}

fn would_block(result: Result<usize, Errno>) -> Result<usize, Gone> {
    match result {
        Err(Errno::AGAIN) => Ok(0),
        other => other.map_err(|_| Gone),
    }
}
