//! Bodies of requests: bounded in size, in time, and all together.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::HeaderMap;
use axum::http::header::CONTENT_LENGTH;
use tandem_train::chain;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt;

use super::error::{ApiError, Rejection};
use super::metrics::Metrics;

/// Bytes that each body may have whatever the others hold, so that slow senders of large ones keep
/// nobody from asking.
const ALLOWANCE: usize = 64 << 10;
/// Largest bodies that are read at the same time, in their sizes beyond the allowance.
const LARGE_BODIES: usize = 16;

/// Reader of bodies.
pub(crate) struct Bodies {
    most: usize,
    time: Duration,
    /// Bytes that are free for bodies beyond their allowance.
    room: Arc<Semaphore>,
}

impl Bodies {
    /// Creates a reader of bodies of at most `most` bytes, each within `time`.
    pub(crate) fn new(most: usize, time: Duration) -> Self {
        Self { most, time, room: Arc::new(Semaphore::new(LARGE_BODIES * most)) }
    }

    /// Reads a body.
    ///
    /// # Errors
    /// 413 if it is too large, 408 if it takes too long, 429 if too many large ones are being read, 400
    /// if the client breaks it off.
    pub(crate) async fn read(
        &self,
        metrics: &Arc<Metrics>,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<HeldBody, ApiError> {
        let told = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if told.is_some_and(|told| told > self.most as u64) {
            return Err(ApiError::large_body(self.most));
        }
        let mut held = HeldBody { bytes: Vec::new(), room: None, metrics: Arc::clone(metrics) };
        let (deadline, mut frames) = (Instant::now() + self.time, body.into_data_stream());
        loop {
            let next = timeout_at(deadline, frames.next()).await;
            match next.map_err(|_| ApiError::slow_body(self.time.as_secs()))? {
                None => return Ok(held),
                Some(Ok(bytes)) => self.add(&mut held, &bytes)?,
                Some(Err(error)) => {
                    return Err(ApiError::invalid(
                        None,
                        format!("the body of the request broke off: {}", chain(&error)),
                    ));
                }
            }
        }
    }

    fn add(&self, held: &mut HeldBody, bytes: &Bytes) -> Result<(), ApiError> {
        let length = held.bytes.len() + bytes.len();
        if length > self.most {
            return Err(ApiError::large_body(self.most));
        }
        let wanted = length.saturating_sub(ALLOWANCE) - held.bytes.len().saturating_sub(ALLOWANCE);
        if wanted > 0 {
            // At most 1 GiB: --max-body.
            let room = Arc::clone(&self.room).try_acquire_many_owned(wanted as u32).map_err(|_| {
                ApiError::busy(Rejection::Bodies, "too many large requests are being read; try again later")
            })?;
            held.metrics.body_bytes.add(wanted as i64);
            match &mut held.room {
                None => held.room = Some(room),
                Some(all) => all.merge(room),
            }
        }
        held.bytes.extend_from_slice(bytes);
        Ok(())
    }
}

/// A body in memory.
pub(crate) struct HeldBody {
    pub bytes: Vec<u8>,
    room: Option<OwnedSemaphorePermit>,
    metrics: Arc<Metrics>,
}

impl Drop for HeldBody {
    fn drop(&mut self) {
        let held = self.room.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        self.metrics.body_bytes.add(-(held as i64));
    }
}
