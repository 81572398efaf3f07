//! Links: one direction of a connection between two ranks of a group.
//!
//! A link carries frames: a header, and as many bytes as the call says. Both sides know the number
//! of bytes, so nothing repeats it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::header::{HEADER, Header};
use super::memory::{SharedMemory, Side};
use super::socket::{Gone, Socket};
use crate::collective::element::{ElementKind, Reduction, reduce};

/// Connection between two ranks, which the poll thread watches too.
pub(super) struct Connection {
    /// The other rank in the group.
    pub(super) peer: usize,
    /// Side of this rank.
    pub(super) side: Side,
    pub(super) socket: Socket,
    /// Memory that the bytes go through, if the ranks share any.
    pub(super) memory: Option<SharedMemory>,
}

impl Connection {
    /// Returns whether the other rank has left in order. Asked when the connection has ended.
    pub(super) fn has_left(&self) -> bool {
        match &self.memory {
            Some(memory) if self.side == Side::Reader => memory.has_left(Side::Writer),
            Some(memory) => memory.has_left(Side::Reader),
            None => self.socket.ends_with(&Header::FAREWELL.encode()),
        }
    }

    /// Tells the other rank that this one leaves in order. `await_room` waits until the socket may
    /// have room, and returns whether to go on.
    pub(super) fn leave_when(&self, await_room: impl Fn() -> bool) {
        match &self.memory {
            Some(memory) => memory.leave(self.side),
            None => {
                let (farewell, mut sent) = (Header::FAREWELL.encode(), 0);
                while sent < HEADER {
                    match self.socket.send(&farewell[sent..]) {
                        Ok(0) if await_room() => {}
                        // A peer that is gone needs no farewell.
                        Ok(0) | Err(Gone) => break,
                        Ok(more) => sent += more,
                    }
                }
            }
        }
        self.socket.finish();
    }

    /// Refuses a connection of a group that this rank has left.
    pub(super) fn leave(&self) {
        self.leave_when(|| false);
    }

    /// Wakes the other side, which sleeps until its socket is readable.
    fn wake(&self) -> Result<(), Gone> {
        self.socket.send(&[0]).map(|_| ())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Sending side.
pub(super) struct OutLink {
    pub(super) connection: Arc<Connection>,
    header: [u8; HEADER],
    /// Bytes of the header that are sent.
    sent: usize,
    /// Number of the call that the last frame belongs to.
    pub(super) call: u64,
    is_closed: bool,
}

impl OutLink {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, header: [0; HEADER], sent: HEADER, call: 0, is_closed: false }
    }

    /// Begins a frame.
    pub(super) fn begin(&mut self, header: &Header) {
        (self.header, self.sent, self.call) = (header.encode(), 0, header.position.number);
    }

    /// Sends what fits of the header and of `bytes`, elements of `width` bytes; returns the number
    /// of `bytes` that were sent.
    pub(super) fn write(&mut self, bytes: &[u8], width: usize) -> Result<usize, Gone> {
        let left = &self.header[self.sent..];
        let Some(memory) = &self.connection.memory else {
            let socket = &self.connection.socket;
            let sent = match left {
                [] => return socket.send(bytes),
                left => socket.send_both(left, bytes)?,
            };
            let of_header = sent.min(left.len());
            self.sent += of_header;
            return Ok(sent - of_header);
        };
        let mut wakes = false;
        if !left.is_empty() {
            let (sent, wake) = memory.write(left, 8);
            self.sent += sent;
            wakes = wake;
        }
        let mut sent = 0;
        if self.sent == HEADER && !bytes.is_empty() {
            let (written, wake) = memory.write(bytes, width);
            (sent, wakes) = (written, wakes | wake);
        }
        if wakes {
            self.connection.wake()?;
        }
        Ok(sent)
    }

    pub(super) fn is_header_sent(&self) -> bool {
        self.sent == HEADER
    }

    /// Ends a frame of which all is sent.
    pub(super) fn end(&mut self) -> Result<(), Gone> {
        match &self.connection.memory {
            Some(memory) if memory.align(Side::Writer) => self.connection.wake(),
            _ => Ok(()),
        }
    }

    /// Returns whether more bytes fit; for a socket only a poll tells.
    pub(super) fn is_ready(&self) -> bool {
        self.is_closed || self.connection.memory.as_ref().is_some_and(|memory| memory.room() > 0)
    }

    /// Removes wake-ups, and notices the end of the connection.
    pub(super) fn clear_wakes(&mut self) -> Result<(), Gone> {
        if self.connection.memory.is_some() && drain(&self.connection.socket).is_err() {
            self.is_closed = true;
            return Err(Gone);
        }
        Ok(())
    }
}

/// Receiving side.
pub(super) struct InLink {
    pub(super) connection: Arc<Connection>,
    header: [u8; HEADER],
    /// Bytes of the header that have arrived.
    arrived: usize,
    /// Bytes of an element that has arrived in part.
    rest: [u8; 8],
    num_rest: usize,
    /// A probe of a call that this rank has not made yet.
    pub(super) probe: Option<Header>,
    is_closed: bool,
}

impl InLink {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self {
            connection,
            header: [0; HEADER],
            arrived: 0,
            rest: [0; 8],
            num_rest: 0,
            probe: None,
            is_closed: false,
        }
    }

    /// Returns the next frame's header when it has arrived. Until [`InLink::accept`] it stays the
    /// next one.
    pub(super) fn next_header(&mut self) -> Result<Option<Header>, Gone> {
        while self.arrived < HEADER {
            let to = &mut self.header[self.arrived..];
            let read = match &self.connection.memory {
                None => self.connection.socket.recv(to)?,
                Some(memory) => {
                    let unread = memory.unread(to.len(), 8);
                    let len = unread.len();
                    to[..len].copy_from_slice(unread);
                    consumed(&self.connection, memory, len)?;
                    len
                }
            };
            if read == 0 {
                return if self.is_closed { Err(Gone) } else { Ok(None) };
            }
            self.arrived += read;
        }
        // Another program cannot know the token; bytes that are no header are a broken peer's.
        Header::decode(&self.header).map(Some).ok_or(Gone)
    }

    /// Begins to read the frame behind the header.
    pub(super) fn accept(&mut self) {
        (self.arrived, self.num_rest) = (0, 0);
    }

    /// Reads available bytes into their place.
    pub(super) fn read(&mut self, to: &mut [u8], width: usize) -> Result<usize, Gone> {
        let Some(memory) = &self.connection.memory else { return self.connection.socket.recv(to) };
        let unread = memory.unread(to.len(), width);
        let len = unread.len();
        to[..len].copy_from_slice(unread);
        consumed(&self.connection, memory, len)?;
        self.nothing_is_the_end(len)
    }

    /// Reduces available elements into their place. `room` takes those that come through a socket.
    pub(super) fn reduce(
        &mut self,
        into: &mut [u8],
        kind: ElementKind,
        reduction: Reduction,
        room: &mut [u64],
    ) -> Result<usize, Gone> {
        let width = kind.size();
        if let Some(memory) = &self.connection.memory {
            let unread = memory.unread(into.len(), width);
            let len = unread.len();
            reduce(kind, reduction, &mut into[..len], unread);
            consumed(&self.connection, memory, len)?;
            return self.nothing_is_the_end(len);
        }
        let room: &mut [u8] = bytemuck::cast_slice_mut(room);
        let most = room.len().min(into.len());
        room[..self.num_rest].copy_from_slice(&self.rest[..self.num_rest]);
        let read = self.connection.socket.recv(&mut room[self.num_rest..most])?;
        let arrived = self.num_rest + read;
        let len = arrived / width * width;
        reduce(kind, reduction, &mut into[..len], &room[..len]);
        self.num_rest = arrived - len;
        self.rest[..self.num_rest].copy_from_slice(&room[len..arrived]);
        Ok(len)
    }

    fn nothing_is_the_end(&self, len: usize) -> Result<usize, Gone> {
        if len == 0 && self.is_closed { Err(Gone) } else { Ok(len) }
    }

    /// Ends a frame of which all has arrived.
    pub(super) fn end(&mut self) -> Result<(), Gone> {
        match &self.connection.memory {
            Some(memory) if memory.align(Side::Reader) => self.connection.wake(),
            _ => Ok(()),
        }
    }

    /// Returns whether bytes have arrived; for a socket only a poll tells.
    pub(super) fn is_ready(&self) -> bool {
        let has_bytes = |memory: &SharedMemory| !memory.unread(8, 1).is_empty();
        self.is_closed || self.connection.memory.as_ref().is_some_and(has_bytes)
    }

    /// Removes wake-ups, and notices the end of the connection: unread bytes in memory come first.
    pub(super) fn clear_wakes(&mut self) {
        if self.connection.memory.is_some() && drain(&self.connection.socket).is_err() {
            self.is_closed = true;
        }
    }
}

fn consumed(connection: &Connection, memory: &SharedMemory, len: usize) -> Result<(), Gone> {
    if len > 0 && memory.consume(len) {
        // A writer that has sent everything may be gone already.
        let _ = connection.wake();
    }
    Ok(())
}

fn drain(socket: &Socket) -> Result<(), Gone> {
    while socket.recv(&mut [0; 64])? > 0 {}
    Ok(())
}
