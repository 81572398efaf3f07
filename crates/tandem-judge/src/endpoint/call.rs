//! Concurrent requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;

use super::asker::EndpointClient;
use super::cache::Reply;
use crate::Result;
use crate::backoff::receive;

/// State shared by the threads of one call.
struct Call {
    asker: Arc<EndpointClient>,
    bodies: Vec<String>,
    next: AtomicUsize,
    /// Whether replies are no longer needed.
    is_over: AtomicBool,
}

/// Guard that ends a call when it goes out of scope.
struct Ending<'a>(&'a Call);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// Returns the replies to requests, in order. On an early return, requests in flight continue:
/// their threads end with them, and their replies still reach the cache.
pub(super) fn ask_all(
    asker: &Arc<EndpointClient>,
    bodies: Vec<String>,
    concurrency: usize,
    stop: &AtomicBool,
) -> Result<Vec<Result<Reply, String>>> {
    let num_requests = bodies.len();
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let call = Arc::new(Call { asker: Arc::clone(asker), bodies, next, is_over });
    let _ending = Ending(&call);
    let (send, received) = channel();
    for _ in 0..concurrency.min(num_requests) {
        let (call, send) = (Arc::clone(&call), send.clone());
        std::thread::spawn(move || {
            while let Some((index, reply)) = call.ask_next() {
                if send.send((index, reply)).is_err() {
                    return;
                }
            }
        });
    }
    drop(send);
    let mut replies: Vec<_> = (0..num_requests).map(|_| None).collect();
    while let Some((index, reply)) = receive(&received, stop)? {
        replies[index] = Some(reply?);
    }
    Ok(replies.into_iter().map(|reply| reply.expect("a thread of the judge panicked")).collect())
}

impl Call {
    fn ask_next(&self) -> Option<(usize, Result<Result<Reply, String>>)> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let body = self.bodies.get(index).filter(|_| !self.is_over.load(Ordering::Relaxed))?;
        Some((index, self.asker.ask(body, &self.is_over)))
    }
}
