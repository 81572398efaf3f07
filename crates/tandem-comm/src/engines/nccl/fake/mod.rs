//! Fakes of both libraries, for ranks that are threads. Device memory is host memory; communicators
//! are as asynchronous and strict as NCCL's. Each rank's calls are recorded, and it can be made to
//! fail.
//!
//! An operation enters its stream after a few polls of the communicator, and is done when all
//! ranks' streams have it. Calls that NCCL or CUDA would refuse, or that break the engine's
//! promised order (copies in idle streams), fail.

mod communicator;
mod cuda;
mod nccl;

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::libraries::{Functions, Libraries};

pub(super) use cuda::num_buffers;

pub(super) const DEVICES: usize = 8;

/// Failure of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    Nothing,
    /// Communicators cannot be created.
    NoCommunicator,
    /// NCCL notices that another rank is gone.
    RemoteError,
    /// Operations never enter the stream.
    Hangs,
    /// Out of memory.
    NoMemory,
}

thread_local! {
    static TROUBLE: Cell<Trouble> = const { Cell::new(Trouble::Nothing) };
    static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// Context of the current device; 0 before one is selected.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

pub(super) fn libraries() -> Libraries {
    Libraries(Arc::new(Functions { nccl: nccl::functions(), cuda: cuda::functions() }))
}

/// Sets the failure of this rank.
pub(super) fn trouble(trouble: Trouble) {
    TROUBLE.set(trouble);
}

/// Takes the calls of this rank since the last time.
pub(super) fn calls() -> Vec<String> {
    CALLS.take()
}

fn write_down(call: String) {
    CALLS.with_borrow_mut(|calls| calls.push(call));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
