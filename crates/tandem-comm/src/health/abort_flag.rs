//! Abort flag of a rank: whether its job is over, and why.
//!
//! A rank waits for others inside a collective of any of its groups. The watchdog's thread may
//! learn that one of them will never come; all waiting then ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::CommError;
use crate::health::wake::Wake;

/// Flag shared by all groups of a rank. Clones are the same flag.
#[derive(Clone, Debug, Default)]
pub struct AbortFlag(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_cut: AtomicBool,
    store_is_lost: AtomicBool,
    /// First failure, with ranks of the job.
    verdict: Mutex<Option<CommError>>,
    /// Groups that wait for other ranks.
    sleepers: Mutex<Vec<Weak<Wake>>>,
}

impl AbortFlag {
    /// Ends the job: calls that wait for another rank fail soon. The first reason is kept.
    pub(crate) fn cut(&self, why: CommError) {
        self.note(why);
        self.0.is_cut.store(true, Ordering::Release);
        self.sleepers().iter().filter_map(Weak::upgrade).for_each(|sleeper| sleeper.wake());
    }

    /// Wakes `sleeper` when the flag is cut.
    pub(crate) fn wake_at_cut(&self, sleeper: &Arc<Wake>) {
        let mut sleepers = self.sleepers();
        sleepers.retain(|other| other.strong_count() > 0);
        sleepers.push(Arc::downgrade(sleeper));
    }

    /// Records a group's failure; the rank's other groups continue. The first reason is kept.
    pub(crate) fn note(&self, why: CommError) {
        self.lock().get_or_insert(why);
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.0.is_cut.load(Ordering::Acquire)
    }

    /// Returns why the job ended, or why the first of this rank's groups failed.
    pub(crate) fn verdict(&self) -> Option<CommError> {
        self.lock().clone()
    }

    /// Sets whether the store is lost. A lost store is not asked why a rank is missing.
    pub(crate) fn set_store_is_lost(&self, is_lost: bool) {
        self.0.store_is_lost.store(is_lost, Ordering::Relaxed);
    }

    pub(crate) fn store_is_lost(&self) -> bool {
        self.0.store_is_lost.load(Ordering::Relaxed)
    }

    fn sleepers(&self) -> MutexGuard<'_, Vec<Weak<Wake>>> {
        self.0.sleepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Option<CommError>> {
        self.0.verdict.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
