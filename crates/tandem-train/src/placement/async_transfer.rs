//! Collectives and host copies on a background thread, so that they overlap with compute.
//!
//! Calls run one after the other, in the order in which they were begun, the same on every rank. A
//! payload moves to the thread and back. Several may be on their way; while none is, the group is
//! available to the caller.
//!
//! On a GPU the thread has its own stream. Events order it after the caller's stream at the start
//! of a call, and the caller's stream after it at the end, so shared memory is never used by both.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use tandem_comm::{CommError, ProcessGroup};
use tandem_kernels::cuda::StreamEvent;
use tandem_kernels::{Device, KernelError};

use crate::Result;

/// Work on a group and a payload.
type Call<C> = Box<dyn FnMut(&Device, &mut ProcessGroup, &mut C) -> Outcome + Send>;

pub(crate) type Outcome = std::result::Result<(), CommError>;

/// A process group and the executor of its calls.
pub(crate) struct AsyncTransfer<C> {
    device: Device,
    /// Used by the thread while a call is in progress.
    group: Arc<Mutex<ProcessGroup>>,
    /// Calls that were begun and not ended.
    under_way: usize,
    /// Most of them.
    capacity: usize,
    carrier: Executor<C>,
}

enum Executor<C> {
    /// Whoever begins the call, at once: where there is nothing to wait for.
    Here {
        call: Call<C>,
        done: VecDeque<(C, Outcome)>,
    },
    There(Option<Worker<C>>),
}

struct Worker<C> {
    to: SyncSender<(C, StreamEvent)>,
    from: Receiver<(C, Outcome, StreamEvent)>,
    thread: JoinHandle<()>,
}

impl<C: Send + 'static> AsyncTransfer<C> {
    /// Starts a thread of that name which makes `call` with the group, on a device that does not
    /// wait for the walk's, if a call may take a while: else whoever begins it makes it. So it is
    /// on a device that computes nothing. At most `capacity` calls may be under way.
    pub(crate) fn new(
        device: &Device,
        name: &str,
        group: ProcessGroup,
        capacity: usize,
        takes_a_while: bool,
        mut call: impl FnMut(&Device, &mut ProcessGroup, &mut C) -> Outcome + Send + 'static,
    ) -> Result<Self> {
        let group = Arc::new(Mutex::new(group));
        let (device, under_way) = (device.clone(), 0);
        if !takes_a_while || device.is_meta() {
            let carrier = Executor::Here { call: Box::new(call), done: VecDeque::with_capacity(capacity) };
            return Ok(Self { device, group, under_way, capacity, carrier });
        }
        // Both channels hold all calls that there can be, and are allocated here.
        let (to, calls) = sync_channel::<(C, StreamEvent)>(capacity);
        let (results, from) = sync_channel(capacity);
        let (by, shared) = (device.on_one_thread()?, group.clone());
        let work = move || {
            while let Ok((mut payload, begun)) = calls.recv() {
                let mut group = lock(&shared);
                let made =
                    by.after(&begun).map_err(not_made).and_then(|()| call(&by, &mut group, &mut payload));
                drop(group);
                let (outcome, done) = match by.mark() {
                    Ok(done) => (made, done),
                    Err(error) => (made.and(Err(not_made(error))), StreamEvent::default()),
                };
                if let Err(unsent) = results.send((payload, outcome, done)) {
                    // Nobody waits for it: its memory is given back when nothing uses it any more.
                    let _ = by.synchronize();
                    drop(unsent);
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(work);
        let thread =
            thread.map_err(|source| KernelError::System { what: "starting a thread for a group", source })?;
        let carrier = Executor::There(Some(Worker { to, from, thread }));
        Ok(Self { device, group, under_way, capacity, carrier })
    }

    /// Begins a call.
    ///
    /// # Panics
    /// If there is no room for one more.
    pub(crate) fn begin(&mut self, mut payload: C) {
        assert!(self.under_way < self.capacity, "{FULL}");
        self.under_way += 1;
        match &mut self.carrier {
            Executor::Here { call, done } => {
                let outcome = call(&self.device, &mut lock(&self.group), &mut payload);
                done.push_back((payload, outcome));
            }
            Executor::There(there) => {
                let there = there.as_ref().expect(ALIVE);
                // A mark that a GPU refuses is no mark; what is put into its streams next fails as
                // well.
                let begun = self.device.mark().unwrap_or_default();
                // If the thread is gone, [`AsyncTransfer::end`] finds out why.
                let _ = there.to.send((payload, begun));
            }
        }
    }

    /// Waits for the call that was begun first, if any is in progress, and returns its payload and
    /// result.
    ///
    /// # Panics
    /// The thread panicked.
    pub(crate) fn end(&mut self) -> Option<(C, Outcome)> {
        if self.under_way == 0 {
            return None;
        }
        self.under_way -= 1;
        match &mut self.carrier {
            Executor::Here { done, .. } => done.pop_front(),
            Executor::There(there) => {
                let from = &there.as_ref().expect(ALIVE).from;
                let Ok((payload, outcome, done)) = self.device.time_host_work("wait", 0, || from.recv())
                else {
                    let thread = there.take().expect(ALIVE).thread;
                    let panic = thread.join().expect_err("it goes on as long as it is listened to");
                    std::panic::resume_unwind(panic);
                };
                let seen = self.device.after(&done).map_err(not_made);
                Some((payload, outcome.and(seen)))
            }
        }
    }

    /// Returns whether a call is in progress.
    pub(crate) fn is_under_way(&self) -> bool {
        self.under_way > 0
    }

    /// The group, for calls on this thread.
    ///
    /// # Panics
    /// A call is in progress.
    pub(crate) fn group(&mut self) -> MutexGuard<'_, ProcessGroup> {
        assert!(self.under_way == 0, "a group is free when no call is under way");
        lock(&self.group)
    }
}

/// The group, also after a panic: what it was used for then is lost, and so says its next call.
fn lock(group: &Mutex<ProcessGroup>) -> MutexGuard<'_, ProcessGroup> {
    group.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call that a device could not take part in.
pub(crate) fn not_made(error: KernelError) -> CommError {
    CommError::Device { call: "a layer's journey".to_owned(), reason: crate::chain(&error) }
}

const FULL: &str = "more calls were begun than there is room for";
const ALIVE: &str = "the thread lives until it panics";

impl<C> Drop for AsyncTransfer<C> {
    /// Does not wait for calls in progress after an aborted pass: other ranks may never join them.
    /// Thread and group end with the first of them.
    fn drop(&mut self) {
        if let Executor::There(there) = &mut self.carrier
            && let Some(Worker { to, from, thread }) = there.take()
            && self.under_way == 0
        {
            drop((to, from));
            // An idle thread cannot have panicked.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use tandem_comm::{Reduction, threads};

    use super::*;

    /// Longer than anything here takes.
    const PATIENCE: Duration = Duration::from_secs(600);

    /// Each of two ranks with a courier that sums over both.
    fn pair() -> [AsyncTransfer<[f32; 2]>; 2] {
        let device = Device::cpu(1, 1 << 21).unwrap();
        let groups = threads::groups(2, PATIENCE).into_iter();
        let couriers = groups.map(|group| {
            AsyncTransfer::new(&device, "sum", group, 2, true, |_, group, payload: &mut [f32; 2]| {
                group.all_reduce(payload, Reduction::Sum)
            })
        });
        couriers.collect::<Result<Vec<_>>>().unwrap().try_into().ok().unwrap()
    }

    #[test]
    fn a_call_is_under_way_until_it_is_asked_for() {
        let [mut a, mut b] = pair();
        for round in 0..3 {
            let x = round as f32;
            assert!(a.end().is_none());
            a.begin([x, 1.0]);
            // The other rank has not called yet; this thread continues.
            b.begin([10.0, x]);
            for transfer in [&mut a, &mut b] {
                let (payload, outcome) = transfer.end().expect("one is under way");
                assert!(outcome.is_ok());
                assert_eq!(payload, [x + 10.0, 1.0 + x]);
                assert_eq!(transfer.group().size(), 2);
            }
        }
    }

    #[test]
    fn calls_that_wait_are_made_in_their_order() {
        let [mut a, mut b] = pair();
        a.begin([1.0, 2.0]);
        a.begin([3.0, 4.0]);
        assert!(a.is_under_way());
        b.begin([10.0, 20.0]);
        b.begin([30.0, 40.0]);
        for expected in [[11.0, 22.0], [33.0, 44.0]] {
            assert_eq!(a.end().expect("one is under way").0, expected);
            assert_eq!(b.end().expect("one is under way").0, expected);
        }
        assert!(a.end().is_none() && !b.is_under_way());
    }

    #[test]
    fn a_rank_that_gives_up_leaves_nobody_waiting() {
        let [mut a, b] = pair();
        a.begin([1.0, 2.0]);
        drop(b);
        let (_, outcome) = a.end().unwrap();
        assert!(matches!(outcome, Err(CommError::PeerLost { rank: 1 })), "{outcome:?}");
        // Dropping with a call in progress does not wait.
        let [mut a, mut b] = pair();
        a.begin([1.0, 2.0]);
        drop(a);
        b.begin([1.0, 2.0]);
        // The started call completes; the next one finds no peer.
        assert!(b.end().unwrap().1.is_ok());
        b.begin([1.0, 2.0]);
        let (_, outcome) = b.end().unwrap();
        assert!(matches!(outcome, Err(CommError::PeerLost { rank: 0 })), "{outcome:?}");
    }

    #[test]
    fn a_panic_in_the_thread_is_the_callers() {
        let device = Device::cpu(1, 1 << 21).unwrap();
        let (told, hears) = channel();
        let mut groups = threads::groups(2, PATIENCE).into_iter();
        let call = move |_: &Device, _: &mut ProcessGroup, (): &mut ()| {
            told.send(thread::current().name().map(str::to_owned)).unwrap();
            panic!("in the thread")
        };
        let mut transfer =
            AsyncTransfer::new(&device, "panic", groups.next().unwrap(), 1, true, call).unwrap();
        transfer.begin(());
        assert_eq!(hears.recv().unwrap().as_deref(), Some("panic"));
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| transfer.end()));
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>().copied(), Some("in the thread"));
    }

    #[test]
    fn a_call_that_takes_no_time_is_made_at_once() {
        let here = thread::current().id();
        for (device, takes_a_while) in [(Device::meta(), true), (Device::cpu(1, 1 << 21).unwrap(), false)] {
            let call = move |_: &Device, _: &mut ProcessGroup, payload: &mut u8| {
                assert_eq!(thread::current().id(), here);
                *payload += 1;
                Ok(())
            };
            let mut transfer =
                AsyncTransfer::new(&device, "none", ProcessGroup::alone(), 1, takes_a_while, call).unwrap();
            transfer.begin(1);
            assert_eq!(transfer.end().map(|(payload, outcome)| (payload, outcome.is_ok())), Some((2, true)));
            assert!(transfer.end().is_none());
        }
    }
}
