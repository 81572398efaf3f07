//! What the threads of a rank know together: whether its job is over, and why.
//!
//! A rank waits for others inside a collective, of the job's group or of one that split off. Another thread, which watches over
//! the ranks, may learn meanwhile that one of them will never come; then nobody should go on waiting.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::CommError;

/// Shared by all groups of a rank. Clones are the same lifeline.
#[derive(Clone, Debug, Default)]
pub struct Lifeline(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_cut: AtomicBool,
    store_is_lost: AtomicBool,
    /// Ranks in it are those of the job.
    verdict: Mutex<Option<CommError>>,
}

impl Lifeline {
    /// The job is over: whoever waits for another rank soon stops waiting and fails. The first reason stays.
    pub(crate) fn cut(&self, why: CommError) {
        self.note(why);
        self.0.is_cut.store(true, Ordering::Release);
    }

    /// A group failed for this reason; the others of this rank go on for themselves. The first reason stays.
    pub(crate) fn note(&self, why: CommError) {
        self.lock().get_or_insert(why);
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.0.is_cut.load(Ordering::Acquire)
    }

    /// Why the job is over, or why the first of this rank's groups failed.
    pub(crate) fn verdict(&self) -> Option<CommError> {
        self.lock().clone()
    }

    /// Whether the store answers. While it does not, nobody should wait for its answers to find out why a rank is missing.
    pub(crate) fn set_store_is_lost(&self, is_lost: bool) {
        self.0.store_is_lost.store(is_lost, Ordering::Relaxed);
    }

    pub(crate) fn store_is_lost(&self) -> bool {
        self.0.store_is_lost.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Option<CommError>> {
        self.0.verdict.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
