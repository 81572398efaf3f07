//! Messages from one rank to another, on connections of their own: a collective overtakes messages
//! that wait to be received.
//!
//! A sender copies a message and goes on. What the connection does not take at once, the poll
//! thread sends later.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::header::{Frame, HEADER, Header};
use super::link::Connection;
use super::socket::Gone;
use crate::collective::call_chain::Position;
use crate::collective::engine::{MAX_MESSAGE_BYTES, MAX_MESSAGES};
use crate::engines::buffer_pool::BufferPool;
use crate::health::wake::Wake;

/// Messages of a rank that are not sent in full.
pub(super) struct Outbox {
    state: Mutex<State>,
    /// Wakes the sender when there is room.
    wake: Arc<Wake>,
}

#[derive(Default)]
struct State {
    queues: Vec<Queue>,
    spare: BufferPool,
    num: usize,
    bytes: usize,
    /// Bytes sent so far.
    num_sent: u64,
}

struct Queue {
    connection: Arc<Connection>,
    messages: VecDeque<Vec<u8>>,
    /// Bytes of the first message that are sent.
    sent: usize,
}

impl Outbox {
    pub(super) fn new(wake: Arc<Wake>) -> Self {
        Self { state: Mutex::default(), wake }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_connected(&self, peer: usize) -> bool {
        self.lock().queues.iter().any(|queue| queue.connection.peer == peer)
    }

    pub(super) fn connect(&self, connection: Arc<Connection>) {
        self.lock().queues.push(Queue { connection, messages: VecDeque::new(), sent: 0 });
    }

    /// Returns whether a message of `len` bytes may be added.
    pub(super) fn has_room(&self, len: usize) -> bool {
        let state = self.lock();
        state.num == 0 || state.num < MAX_MESSAGES && state.bytes + len <= MAX_MESSAGE_BYTES
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().num == 0
    }

    /// Returns the number of bytes sent so far.
    pub(super) fn num_sent(&self) -> u64 {
        self.lock().num_sent
    }

    /// Returns a rank that the oldest messages wait for.
    pub(super) fn awaited(&self) -> Option<usize> {
        let state = self.lock();
        state.queues.iter().find(|queue| !queue.messages.is_empty()).map(|queue| queue.connection.peer)
    }

    /// Adds a message and sends what fits. Returns whether anything is left for the poll thread.
    pub(super) fn send(&self, peer: usize, data: &[u8]) -> Result<bool, Gone> {
        let mut state = self.lock();
        let mut message = state.spare.take(HEADER + data.len());
        let position = Position { number: data.len() as u64, ..Position::default() };
        let header = Header { frame: Frame::Call, position };
        message.extend_from_slice(&header.encode());
        message.extend_from_slice(data);
        state.num += 1;
        state.bytes += data.len();
        let i = state.queues.iter().position(|queue| queue.connection.peer == peer).ok_or(Gone)?;
        state.queues[i].messages.push_back(message);
        state.flush(i)?;
        Ok(!state.queues[i].messages.is_empty())
    }

    /// Sends what fits to the ranks whose connections may have room.
    pub(super) fn flush(&self) {
        let mut state = self.lock();
        let before = state.num;
        for i in 0..state.queues.len() {
            // The poll thread finds a broken connection as it finds others.
            let _ = state.flush(i);
        }
        if state.num < before {
            self.wake.wake();
        }
    }

    /// Drops the messages to a rank that is gone.
    pub(super) fn lost(&self, peer: usize) {
        let mut state = self.lock();
        for i in 0..state.queues.len() {
            if state.queues[i].connection.peer == peer {
                while let Some(message) = state.queues[i].messages.pop_front() {
                    state.finish(message);
                }
                state.queues[i].sent = 0;
            }
        }
    }

    /// Calls `each` with the connections that wait for room.
    pub(super) fn full_connections(&self, mut each: impl FnMut(&Arc<Connection>)) {
        let state = self.lock();
        state.queues.iter().filter(|queue| !queue.messages.is_empty()).for_each(|q| each(&q.connection));
    }
}

impl State {
    fn flush(&mut self, i: usize) -> Result<(), Gone> {
        loop {
            let queue = &mut self.queues[i];
            let Some(message) = queue.messages.front() else { return Ok(()) };
            let sent = queue.connection.socket.send(&message[queue.sent..])?;
            if sent == 0 {
                return Ok(());
            }
            queue.sent += sent;
            self.num_sent += sent as u64;
            if queue.sent == message.len() {
                queue.sent = 0;
                let message = queue.messages.pop_front().expect("the message that was sent");
                self.finish(message);
            }
        }
    }

    fn finish(&mut self, message: Vec<u8>) {
        self.num -= 1;
        self.bytes -= message.len() - HEADER;
        self.spare.put(message);
    }
}

/// Incoming messages of one rank.
pub(super) struct Inbox {
    pub(super) connection: Arc<Connection>,
    header: [u8; HEADER],
    arrived: usize,
}

impl Inbox {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, header: [0; HEADER], arrived: 0 }
    }

    /// Returns the length of the next message when it is known.
    pub(super) fn next_len(&mut self) -> Result<Option<usize>, Gone> {
        while self.arrived < HEADER {
            match self.connection.socket.recv(&mut self.header[self.arrived..])? {
                0 => return Ok(None),
                read => self.arrived += read,
            }
        }
        match Header::decode(&self.header) {
            Some(Header { frame: Frame::Call, position }) => Ok(Some(position.number as usize)),
            _ => Err(Gone),
        }
    }

    /// Begins to read the message of which the length is known.
    pub(super) fn accept(&mut self) {
        self.arrived = 0;
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
