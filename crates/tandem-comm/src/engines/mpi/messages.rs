//! Messages in flight from one rank of a group.
//!
//! MPI moves a large message only while its sender is inside of a call of MPI. A sender that
//! computes meanwhile has a thread that polls for it.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::communicator::{Communicator, Failed, Request};
use super::segments::{SEGMENT, Segments};
use super::wait::{Fault, Wait};
use crate::collective::engine::{MAX_MESSAGE_BYTES, MAX_MESSAGES};

/// Tag of a message's length.
const LEN: c_int = 2;
/// Tag of its bytes.
const BYTES: c_int = 3;
/// Interval of polling.
const PAUSE: Duration = Duration::from_micros(100);
/// Number of pieces that a receiver is ready for at once.
const WINDOW: usize = 3;

/// A message: its length, and its bytes in pieces of a segment.
struct Message {
    requests: VecDeque<Request>,
    len: usize,
}

/// Outgoing messages.
pub(super) struct Messages {
    shared: Arc<Shared>,
    has_thread: bool,
}

struct Shared {
    communicator: Communicator,
    segments: Segments,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Message>,
    failure: Option<Failed>,
    is_over: bool,
}

impl Messages {
    pub(super) fn new(communicator: Communicator, segments: Segments) -> Self {
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { shared: Arc::new(Shared { communicator, segments, state, changed }), has_thread: false }
    }

    /// Sends a copy; waits for room in flight.
    pub(super) fn send(&mut self, to: usize, data: &[u8], wait: &mut Wait) -> Result<(), Fault> {
        self.settle(wait, |state| {
            let bytes: usize = state.queue.iter().map(|message| message.len).sum();
            state.queue.is_empty()
                || state.queue.len() < MAX_MESSAGES && bytes + data.len() <= MAX_MESSAGE_BYTES
        })?;
        let Shared { communicator, segments, .. } = &*self.shared;
        let mut requests = VecDeque::with_capacity(1 + data.len().div_ceil(SEGMENT));
        let mut post = |bytes: &[u8], tag| -> Result<(), Failed> {
            let mut segment = segments.take(bytes.len());
            segment.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            requests.push_back(communicator.send(segment, bytes.len(), to, tag)?);
            Ok(())
        };
        post(&(data.len() as u64).to_le_bytes(), LEN)?;
        data.chunks(SEGMENT).try_for_each(|piece| post(piece, BYTES))?;
        let is_idle = {
            let mut state = self.shared.lock();
            state.queue.push_back(Message { requests, len: data.len() });
            self.shared.poll(&mut state);
            self.shared.changed.notify_all();
            state.queue.is_empty()
        };
        if !is_idle && !self.has_thread {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("mpi messages".to_owned());
            // Without a thread, messages move during this rank's next calls.
            self.has_thread = thread.spawn(move || shared.run()).is_ok();
        }
        Ok(())
    }

    /// Waits until all messages have left.
    pub(super) fn settle_all(&self, wait: &mut Wait) -> Result<(), Fault> {
        self.settle(wait, |state| state.queue.is_empty())
    }

    fn settle(&self, wait: &mut Wait, is_settled: impl Fn(&State) -> bool) -> Result<(), Fault> {
        loop {
            let mut state = self.shared.lock();
            let has_moved = self.shared.poll(&mut state);
            if let Some(failure) = state.failure.clone() {
                return Err(Fault::Mpi(failure));
            }
            if is_settled(&state) {
                return Ok(());
            }
            drop(state);
            if has_moved {
                wait.progressed();
            } else {
                wait.idle()?;
            }
        }
    }

    /// Receives the length of a peer's next message.
    pub(super) fn recv_len(&self, from: usize, wait: &mut Wait) -> Result<u64, Fault> {
        let Shared { communicator, segments, .. } = &*self.shared;
        let mut request = communicator.recv(segments.take(8), 8, from, LEN)?;
        wait.until_done(&mut request)?;
        let segment = communicator.memory(&mut request);
        let len = u64::from_le_bytes(*segment.bytes().first_chunk().expect("a segment has 8 bytes"));
        segments.put(segment);
        Ok(len)
    }

    /// Receives the bytes of a message.
    pub(super) fn recv(&self, from: usize, data: &mut [u8], wait: &mut Wait) -> Result<(), Fault> {
        let Shared { communicator, segments, .. } = &*self.shared;
        let mut lens = data.chunks(SEGMENT).map(<[u8]>::len).collect::<Vec<_>>().into_iter();
        let mut coming = VecDeque::with_capacity(WINDOW);
        for piece in data.chunks_mut(SEGMENT) {
            while coming.len() < WINDOW
                && let Some(len) = lens.next()
            {
                coming.push_back(communicator.recv(segments.take(len), len, from, BYTES)?);
            }
            let mut request = coming.pop_front().expect("one for each piece");
            wait.until_done(&mut request)?;
            let segment = communicator.memory(&mut request);
            piece.copy_from_slice(&segment.bytes()[..piece.len()]);
            segments.put(segment);
        }
        Ok(())
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes what has left; returns whether anything has.
    fn poll(&self, state: &mut State) -> bool {
        let mut has_moved = false;
        for message in &mut state.queue {
            while let Some(request) = message.requests.front_mut() {
                match self.communicator.is_done(request) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(failure) => {
                        state.failure = Some(failure);
                        return has_moved;
                    }
                }
                self.segments.put(self.communicator.memory(request));
                message.requests.pop_front();
                has_moved = true;
            }
        }
        while state.queue.front().is_some_and(|message| message.requests.is_empty()) {
            state.queue.pop_front();
        }
        has_moved
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.is_over && state.failure.is_none() {
            if state.queue.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            self.poll(&mut state);
            drop(state);
            std::thread::sleep(PAUSE);
            state = self.lock();
        }
    }
}
