//! Keep-alive among ranks whose parts of a round take different times.
//!
//! A rank that waits in one call for longer than `compute.deadline` gives the others up. So ranks
//! never block on each other's part of a round: a finished rank polls, an unfinished rank sends a
//! keep-alive at intervals. The same call agrees on whether to stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::scope;

use tandem_comm::{ProcessGroup, Reduction};

use super::background_task::wait;
use crate::Result;

/// Vote of a rank; the maximum over ranks decides.
const THROUGH: u8 = 0;
const GOES_ON: u8 = 1;
const STOPS: u8 = 2;

/// Ranks that each work on their own part.
pub(crate) struct KeepAlive<'a> {
    group: &'a mut ProcessGroup,
    stop: &'a AtomicBool,
    is_stopped: bool,
}

impl<'a> KeepAlive<'a> {
    /// Creates the keep-alive of `group`; `stop` stops all ranks.
    pub(crate) fn new(group: &'a mut ProcessGroup, stop: &'a AtomicBool) -> Self {
        Self { group, stop, is_stopped: false }
    }

    /// Returns whether this is the only rank.
    pub(crate) fn is_alone(&self) -> bool {
        self.group.size() == 1
    }

    /// Sends a keep-alive and returns whether to continue.
    pub(crate) fn heartbeat(&mut self) -> Result<bool> {
        if !self.is_stopped {
            self.vote(GOES_ON)?;
        }
        Ok(!self.is_stopped)
    }

    /// Runs work on another thread and keeps this rank alive meanwhile; a stop vote stops the work.
    ///
    /// # Panics
    /// The work panicked.
    pub(crate) fn working<T: Send>(&mut self, work: impl FnOnce(&AtomicBool) -> T + Send) -> Result<T> {
        let stop = AtomicBool::new(false);
        scope(|threads| {
            let (send, done) = sync_channel(1);
            let stop = &stop;
            let thread = threads.spawn(move || drop(send.send(work(stop))));
            let mut outcome = Ok(());
            let found = wait(
                &done,
                || thread.join(),
                || {
                    if outcome.is_ok() {
                        let goes_on = self.heartbeat();
                        stop.store(!matches!(goes_on, Ok(true)), Ordering::Relaxed);
                        outcome = goes_on.map(drop);
                    }
                    Ok(())
                },
            );
            outcome.and(found)
        })
    }

    /// Waits until all are through; `false` if they were stopped before.
    pub(crate) fn end(mut self) -> Result<bool> {
        while !self.is_stopped && self.vote(THROUGH)? == GOES_ON {}
        Ok(!self.is_stopped)
    }

    fn vote(&mut self, own: u8) -> Result<u8> {
        let mut said = [if self.stop.load(Ordering::Relaxed) { STOPS } else { own }];
        if !self.is_alone() {
            self.group.all_reduce(&mut said, Reduction::Max)?;
        }
        self.is_stopped |= said == [STOPS];
        Ok(said[0])
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use tandem_comm::threads;

    use super::*;

    /// Each of three ranks does `part`; whether all came to their ends.
    fn ends(deadline: Duration, part: impl Fn(usize, &mut KeepAlive<'_>, &AtomicBool) + Sync) -> Vec<bool> {
        let rank = |mut group: ProcessGroup| {
            let (rank, stop) = (group.rank(), AtomicBool::new(false));
            let mut company = KeepAlive::new(&mut group, &stop);
            part(rank, &mut company, &stop);
            company.end().unwrap()
        };
        scope(|scope| {
            let groups = threads::groups(3, deadline).into_iter();
            let ranks: Vec<_> = groups.map(|group| scope.spawn(|| rank(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Twice the time of a single wait.
    #[test]
    fn who_takes_long_is_waited_for() {
        let deadline = Duration::from_secs(3);
        let slow = |rank: usize, company: &mut KeepAlive<'_>, _: &AtomicBool| match rank {
            0 => {
                let found = company.working(|_| {
                    sleep(2 * deadline);
                    42
                });
                assert_eq!(found.unwrap(), 42);
            }
            1 => (0..20).for_each(|_| {
                sleep(deadline / 10);
                assert!(company.heartbeat().unwrap());
            }),
            _ => {}
        };
        assert_eq!(ends(deadline, slow), [true; 3]);
    }

    #[test]
    fn one_that_stops_stops_all() {
        let asked = |rank: usize, company: &mut KeepAlive<'_>, stop: &AtomicBool| match rank {
            // Until it is told to stop.
            0 => company
                .working(|stop| {
                    while !stop.load(Ordering::Relaxed) {
                        sleep(Duration::from_millis(1));
                    }
                })
                .unwrap(),
            1 => while company.heartbeat().unwrap() {},
            _ => stop.store(true, Ordering::Relaxed),
        };
        assert_eq!(ends(Duration::from_secs(600), asked), [false; 3]);
    }

    #[test]
    fn a_panic_of_the_work_is_the_callers() {
        let (mut group, stop) = (ProcessGroup::alone(), AtomicBool::new(false));
        let mut company = KeepAlive::new(&mut group, &stop);
        let work = std::panic::AssertUnwindSafe(|| company.working(|_| panic!("at work")));
        let caught = std::panic::catch_unwind(work).map(|result: Result<()>| result.is_ok());
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>().copied(), Some("at work"));
    }
}
