//! Fakes of both libraries, for ranks that are threads. Device memory is host memory; communicators
//! and streams are as asynchronous and strict as NCCL's and CUDA's. Each rank's calls are recorded, and
//! it can be made to fail.
//!
//! An operation enters its stream after a few polls of the communicator. A stream does its work in order,
//! whenever anybody polls. An operation runs when the streams of all ranks have come to it. Calls that NCCL or
//! CUDA would refuse, or that break the engine's promised order (copies in idle streams, memory that is
//! freed while an operation uses it), fail.

mod communicator;
mod cuda;
mod nccl;
mod stream;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::libraries::{Functions, Libraries};
use crate::collective::element::DeviceNumbers;

pub(super) use cuda::num_buffers;

pub(super) const DEVICES: usize = 8;

/// Failure of this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Trouble {
    #[default]
    Nothing,
    /// Communicators cannot be created.
    NoCommunicator,
    /// NCCL notices that another rank is gone.
    RemoteError,
    /// Operations never enter the stream.
    Hangs,
    /// Out of memory.
    NoMemory,
    /// An abort takes for ever.
    AbortHangs,
}

/// A rank, for all threads that work for it.
#[derive(Default)]
struct Rank {
    /// The same number for ranks that meet.
    world: u64,
    trouble: Mutex<Trouble>,
    calls: Mutex<Vec<String>>,
}

impl Rank {
    fn trouble(&self) -> Trouble {
        *lock(&self.trouble)
    }

    fn write_down(&self, call: String) {
        lock(&self.calls).push(call);
    }
}

thread_local! {
    /// The rank that began on this thread.
    static OWN: RefCell<Arc<Rank>> = RefCell::default();
    /// Context of the current device; 0 before one is selected.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Makes this thread a rank that meets others of the same number.
pub(super) fn begin(world: u64) {
    OWN.set(Arc::new(Rank { world, ..Rank::default() }));
}

fn own() -> Arc<Rank> {
    OWN.with_borrow(Arc::clone)
}

pub(super) fn libraries() -> Libraries {
    Libraries(Arc::new(Functions { nccl: nccl::functions(), cuda: cuda::functions() }))
}

/// Sets the failure of this rank.
pub(super) fn trouble(trouble: Trouble) {
    *lock(&own().trouble) = trouble;
}

/// Takes the calls of this rank since the last time.
pub(super) fn calls() -> Vec<String> {
    std::mem::take(&mut lock(&own().calls))
}

/// Numbers of a rank in GPU memory, with a stream that computes them.
pub(super) struct Numbers {
    address: u64,
    len: usize,
    stream: Arc<Mutex<stream::Stream>>,
}

impl Numbers {
    /// Creates numbers, which the stream has not written yet.
    pub(super) fn new(len: usize) -> Self {
        Self { address: cuda::new_buffer(4 * len), len, stream: stream::new() }
    }

    /// Lets the stream compute when it has come so far.
    pub(super) fn compute(&self, work: impl Fn(&mut [f32]) + Send + 'static) {
        let (address, len) = (self.address as usize, self.len);
        stream::push(&self.stream, move || {
            // SAFETY: the buffer stays until these numbers are dropped, which waits for the stream.
            work(unsafe { std::slice::from_raw_parts_mut(address as *mut f32, len) });
            true
        });
    }

    /// Keeps the stream from going on until the result is true.
    pub(super) fn hold(&self) -> Arc<AtomicBool> {
        let may_go_on = Arc::new(AtomicBool::new(false));
        let seen = may_go_on.clone();
        stream::push(&self.stream, move || seen.load(Ordering::Acquire));
        may_go_on
    }

    /// Returns whether the stream has done all of its work.
    pub(super) fn is_idle(&self) -> bool {
        stream::is_idle(&self.stream)
    }

    /// Waits for the stream as a host does that reads a result, and reads.
    pub(super) fn result(&self) -> Vec<f32> {
        while !self.is_idle() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // SAFETY: as in `compute`; nothing writes any more.
        unsafe { std::slice::from_raw_parts(self.address as *const f32, self.len) }.to_vec()
    }
}

impl DeviceNumbers for &Numbers {
    fn address(&self) -> (usize, u64) {
        (CURRENT.get() - cuda::FIRST, self.address)
    }

    fn stream(&self) -> Result<u64, String> {
        Ok(Arc::as_ptr(&self.stream) as u64)
    }

    fn synchronize(&mut self) -> Result<(), String> {
        self.result();
        Ok(())
    }

    fn read(&mut self, _: std::ops::Range<usize>, _: &mut [u8]) -> Result<(), String> {
        unreachable!("the engine takes the GPU's memory")
    }

    fn write(&mut self, _: std::ops::Range<usize>, _: &[u8]) -> Result<(), String> {
        unreachable!("the engine takes the GPU's memory")
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        // A rank that panics leaves its memory to the streams of the others.
        if !std::thread::panicking() {
            self.result();
            cuda::drop_buffer(self.address);
        }
        stream::forget(&self.stream);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
