//! Stand-ins for both libraries, for ranks that are threads: device memory is host memory, and communicators are as
//! asynchronous and as strict as NCCL's. What a rank called is written down, and its own copy can be told to fail.
//!
//! An operation is put into its stream when the communicator has been asked for its state a few times, and is done when all
//! ranks have put the same one there. A call that NCCL or CUDA would refuse, or that is not in the order which the engine has
//! promised (copies in idle streams), is refused.

mod communicator;
mod cuda;
mod nccl;

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::libraries::{Functions, Libraries};

pub(super) use cuda::num_buffers;

/// GPUs of the machine.
pub(super) const DEVICES: usize = 8;

/// What goes wrong on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    Nothing,
    /// Communicators cannot be made.
    NoCommunicator,
    /// NCCL notices that another rank is gone.
    RemoteError,
    /// Operations never get into the stream.
    Hangs,
    /// There is no memory.
    NoMemory,
}

thread_local! {
    static TROUBLE: Cell<Trouble> = const { Cell::new(Trouble::Nothing) };
    static CALLS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    /// The context of the current device; 0 before one is chosen.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Both, in place of those that are opened.
pub(super) fn libraries() -> Libraries {
    Libraries(Arc::new(Functions { nccl: nccl::functions(), cuda: cuda::functions() }))
}

/// From now on this goes wrong on this rank.
pub(super) fn trouble(trouble: Trouble) {
    TROUBLE.set(trouble);
}

/// What this rank has called since it last asked.
pub(super) fn calls() -> Vec<String> {
    CALLS.take()
}

fn write_down(call: String) {
    CALLS.with_borrow_mut(|calls| calls.push(call));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
