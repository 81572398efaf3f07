//! Queue between the training thread and a tracker's thread. A full one drops its oldest message, so
//! the training thread never waits.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::message::{End, Message};

/// Most waiting messages: tens of megabytes, and at a step a second almost three hours.
pub(super) const CAPACITY: usize = 10_000;

/// Most messages of one delivery.
const DELIVERY: usize = 200;

/// Queue of one tracker.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// Notified of messages and the end.
    arrived: Condvar,
    /// Notified of the end alone, so that a pause is not woken by each message.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Arc<Message>>,
    /// Messages that the tracker's thread holds.
    in_hand: usize,
    /// Messages that were dropped.
    lost: usize,
    end: Option<(Arc<End>, Instant)>,
    /// Whether the tracker takes no more messages.
    is_closed: bool,
}

impl Queue {
    /// Appends a message. Returns whether the oldest one was dropped for it.
    pub(super) fn push(&self, message: Arc<Message>) -> bool {
        let mut state = self.lock();
        if state.is_closed {
            return false;
        }
        let is_full = state.waiting.len() == CAPACITY;
        if is_full {
            state.waiting.pop_front();
            state.lost += 1;
        }
        state.waiting.push_back(message);
        self.arrived.notify_one();
        is_full
    }

    /// Announces the end of the run, and when the tracker has to have delivered it.
    pub(super) fn end(&self, end: Arc<End>, deadline: Instant) {
        self.lock().end = Some((end, deadline));
        self.arrived.notify_one();
        self.ended.notify_one();
    }

    /// Drops all messages, also later ones.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        state.waiting = VecDeque::new();
    }

    /// Waits for messages or the end, at most `patience`, and moves messages into `hand`.
    pub(super) fn take(&self, hand: &mut VecDeque<Arc<Message>>, patience: Duration) {
        let is_idle = |state: &mut State| state.waiting.is_empty() && state.end.is_none();
        let waited = self.arrived.wait_timeout_while(self.lock(), patience, is_idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let num = state.waiting.len().min(DELIVERY);
        hand.extend(state.waiting.drain(..num));
        state.in_hand = hand.len();
    }

    /// Notes how many messages the tracker's thread still holds.
    pub(super) fn hold(&self, num: usize) {
        self.lock().in_hand = num;
    }

    /// Sleeps, but not beyond the end of the run.
    pub(super) fn pause(&self, pause: Duration) {
        let state = self.lock();
        let waiting = |state: &mut State| state.end.is_none();
        drop(self.ended.wait_timeout_while(state, pause, waiting));
    }

    /// Returns the end of the run, and when it has to have been delivered.
    pub(super) fn ended(&self) -> Option<(Arc<End>, Instant)> {
        self.lock().end.clone()
    }

    /// Returns whether messages wait.
    pub(super) fn is_empty(&self) -> bool {
        self.lock().waiting.is_empty()
    }

    /// Returns the number of messages that were not delivered.
    pub(super) fn undelivered(&self) -> usize {
        let state = self.lock();
        state.lost + state.in_hand + state.waiting.len()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
