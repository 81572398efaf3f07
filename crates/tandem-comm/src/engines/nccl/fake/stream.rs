//! Streams: queues of work that is done in order when anybody looks.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::{lock, own};

/// Work that returns whether it is done; else it is asked again.
pub(super) type Work = Box<dyn FnMut() -> bool + Send>;

#[derive(Default)]
pub(super) struct Stream {
    queue: VecDeque<Work>,
}

/// A stream and the ranks that may look after it: those that meet.
struct InUse {
    stream: Arc<Mutex<Stream>>,
    world: u64,
}

/// Streams that are in use.
static ALL: Mutex<Vec<InUse>> = Mutex::new(Vec::new());

pub(super) fn new() -> Arc<Mutex<Stream>> {
    let stream = Arc::<Mutex<Stream>>::default();
    lock(&ALL).push(InUse { stream: stream.clone(), world: own().world });
    stream
}

/// Returns the stream at an address, if it is in use.
pub(super) fn find(address: usize) -> Option<Arc<Mutex<Stream>>> {
    let all = lock(&ALL);
    let found = all.iter().find(|one| Arc::as_ptr(&one.stream) as usize == address);
    found.map(|one| one.stream.clone())
}

/// Ends a stream.
pub(super) fn forget(stream: &Arc<Mutex<Stream>>) {
    lock(&ALL).retain(|other| !Arc::ptr_eq(&other.stream, stream));
}

pub(super) fn push(stream: &Mutex<Stream>, work: impl FnMut() -> bool + Send + 'static) {
    lock(stream).queue.push_back(Box::new(work));
}

pub(super) fn is_idle(stream: &Mutex<Stream>) -> bool {
    advance(stream);
    lock(stream).queue.is_empty()
}

/// Does all work that can be done, in the streams of the ranks that meet the stream's.
pub(super) fn advance(own: &Mutex<Stream>) {
    loop {
        let mut has_moved = false;
        let all: Vec<_> = {
            let all = lock(&ALL);
            let world = all.iter().find(|one| std::ptr::eq(&*one.stream, own)).map(|one| one.world);
            all.iter().filter(|one| Some(one.world) == world).map(|one| one.stream.clone()).collect()
        };
        for stream in all {
            // Another thread that holds it does its work.
            let Ok(mut stream) = stream.try_lock() else { continue };
            while let Some(work) = stream.queue.front_mut() {
                if !work() {
                    break;
                }
                stream.queue.pop_front();
                has_moved = true;
            }
        }
        if !has_moved {
            return;
        }
    }
}
