//! Place of a request among those that wait for the engine or are answered by it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::error::{ApiError, Rejection};
use super::state::State;

/// A request that waits or runs; dropped when it ends, for whatever reason.
pub(crate) struct Ticket {
    state: Arc<State>,
    /// Arrival of the header.
    arrived: Instant,
    is_running: bool,
}

impl Ticket {
    /// Queues a request.
    ///
    /// # Errors
    /// 429 if the queue is full.
    pub(crate) fn take(state: &Arc<State>, arrived: Instant) -> Result<Self, ApiError> {
        let most = state.limits().max_queue.get();
        let has_room = |queued: usize| (queued < most).then_some(queued + 1);
        if state.queue().fetch_update(Ordering::AcqRel, Ordering::Acquire, has_room).is_err() {
            return Err(ApiError::busy(
                Rejection::Queue,
                format!("{most} requests wait already (--max-queue); try again later"),
            ));
        }
        state.metrics().queued.add(1);
        Ok(Self { state: Arc::clone(state), arrived, is_running: false })
    }

    /// Leaves the queue at the first token.
    pub(crate) fn run(&mut self) {
        if !std::mem::replace(&mut self.is_running, true) {
            self.leave_queue();
            self.state.metrics().running.add(1);
            self.state.metrics().first_token.observe(self.arrived.elapsed());
        }
    }

    fn leave_queue(&self) {
        self.state.queue().fetch_sub(1, Ordering::AcqRel);
        self.state.metrics().queued.add(-1);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.is_running {
            self.state.metrics().running.add(-1);
        } else {
            self.leave_queue();
        }
        self.state.metrics().request.observe(self.arrived.elapsed());
    }
}
