//! Work on a background thread.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::{Result, TrainError};

/// Poll interval of a waiting thread.
const GLANCE: Duration = Duration::from_millis(100);

/// Work on a thread of its own.
pub(crate) struct BackgroundTask<T> {
    thread: JoinHandle<()>,
    result: Receiver<T>,
}

impl<T: Send + 'static> BackgroundTask<T> {
    /// Begins it.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(crate) fn begin(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<Self> {
        let (send, result) = sync_channel(1);
        // After a failure nothing receives.
        let work = move || drop(send.send(work()));
        let thread = Builder::new().name(name.to_owned()).spawn(work).map_err(TrainError::thread)?;
        Ok(Self { thread, result })
    }

    /// Waits for it, and does something else now and then.
    ///
    /// # Panics
    /// The thread panicked.
    pub(crate) fn end(self, meanwhile: impl FnMut() -> Result<()>) -> Result<T> {
        let Self { thread, result } = self;
        wait(&result, || thread.join(), meanwhile)
    }
}

/// Waits for a thread's result and polls in between; `join` joins the thread.
///
/// # Panics
/// The thread panicked.
pub(super) fn wait<T>(
    result: &Receiver<T>,
    join: impl FnOnce() -> std::thread::Result<()>,
    mut meanwhile: impl FnMut() -> Result<()>,
) -> Result<T> {
    loop {
        match result.recv_timeout(GLANCE) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => meanwhile()?,
            Err(RecvTimeoutError::Disconnected) => {
                std::panic::resume_unwind(join().expect_err("it ends with a result"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn who_waits_looks_around_until_there_is_a_result() {
        let (go, told) = channel();
        let work = BackgroundTask::begin("slow", move || told.recv().map(|n: u32| n + 1)).expect("a thread");
        let mut go = Some(go);
        let meanwhile = || {
            go.take().iter().for_each(|go| go.send(41).unwrap());
            Ok(())
        };
        assert_eq!(work.end(meanwhile).unwrap(), Ok(42));
        assert!(go.is_none());
    }

    #[test]
    fn a_panic_there_is_one_here() {
        let work = BackgroundTask::<()>::begin("panic", || panic!("in the thread")).expect("a thread");
        let caught = catch_unwind(AssertUnwindSafe(|| work.end(|| Ok(()))));
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>().copied(), Some("in the thread"));
    }
}
