//! Waits for other ranks: polled, so that a deadline or another rank's failure ends them.

use std::time::{Duration, Instant};

use super::communicator::{Communicator, Failed, Request};
use crate::collective::call_chain::CallChain;
use crate::health::abort_flag::AbortFlag;
use crate::health::{disagreement, failure};
use crate::store::Store;

/// Time for which a wait polls without giving the core away: on a busy machine it is not soon back.
const SPIN: Duration = Duration::from_micros(30);
/// Time for which a wait polls without pause; most segments take less.
const BUSY: Duration = Duration::from_millis(2);
/// Interval of polling afterwards.
const PAUSE: Duration = Duration::from_micros(50);
/// Interval of looking for another rank's failure.
const LOOK: Duration = Duration::from_millis(10);
/// Time after which a waiting rank says so in the store: at a deadline it is not the one that hangs.
const LONG: Duration = Duration::from_secs(1);

/// End of a wait without its result.
#[derive(Debug)]
pub(super) enum Fault {
    /// The deadline.
    Late,
    /// The group has failed elsewhere.
    Over,
    /// Another rank has made a different call.
    Different,
    /// MPI's own error.
    Mpi(Failed),
}

impl From<Failed> for Fault {
    fn from(words: Failed) -> Self {
        Self::Mpi(words)
    }
}

/// What a waiting rank shows to the others and looks for: its calls, and signs of a failure.
pub(super) struct Watch {
    pub(super) communicator: Communicator,
    /// Store with the group's prefix.
    pub(super) store: Store,
    /// Store with the job's prefix.
    job: Store,
    /// Ranks of this group as ranks of the job.
    members: Vec<usize>,
    /// Ranks of the job that the current wait is for.
    awaited: Vec<usize>,
    pub(super) abort_flag: AbortFlag,
    pub(super) deadline: Duration,
    /// This rank's collectives.
    pub(super) chain: CallChain,
    /// Whether this rank has said in the store that it waits.
    is_said: bool,
    /// Number of the last call that is in the store.
    shown: Option<u64>,
}

impl Watch {
    pub(super) fn new(
        communicator: Communicator,
        (job, path): (&Store, &str),
        members: Vec<usize>,
        abort_flag: AbortFlag,
        deadline: Duration,
    ) -> Self {
        let (store, job) = (job.prefixed(path), job.clone());
        let (awaited, chain) = (Vec::new(), CallChain::new());
        let (is_said, shown) = (false, None);
        Self { communicator, store, job, members, awaited, abort_flag, deadline, chain, is_said, shown }
    }

    /// Fails if the group has failed elsewhere.
    pub(super) fn look(&self) -> Result<(), Fault> {
        if self.abort_flag.is_cut() || self.communicator.is_notified()? {
            return Err(Fault::Over);
        }
        Ok(())
    }

    /// Begins a wait for all ranks, at most until the deadline.
    pub(super) fn wait(&mut self) -> Wait<'_> {
        self.awaited.clone_from(&self.members);
        self.begin()
    }

    /// Begins a wait for one rank, at most until the deadline.
    pub(super) fn wait_for(&mut self, peer: usize) -> Wait<'_> {
        self.awaited = vec![self.members[peer]];
        self.begin()
    }

    fn begin(&mut self) -> Wait<'_> {
        let (now, limit) = (Instant::now(), self.deadline);
        Wait { limit, watch: self, since: now, looked: now, shows_after: LONG.min(limit / 2) }
    }

    /// Shows the others, in a call of all, that this rank waits, and in which call.
    pub(super) fn show(&mut self) -> Result<(), Fault> {
        self.awaited.clone_from(&self.members);
        self.say();
        self.compare_calls()
    }

    fn say(&mut self) {
        if !self.is_said && !self.abort_flag.store_is_lost() {
            // Without the store the other ranks know less; this rank's own wait goes on.
            let own = self.communicator.rank;
            self.is_said = self.store.set(&failure::stuck(own), b"").is_ok()
                && failure::say_waiting(&self.job, self.members[own], &self.awaited).is_ok();
        }
    }

    /// Shows this rank's last calls in the store, and compares those that the ranks beside it have shown.
    /// Of ranks that wait in different calls, two are neighbours.
    pub(super) fn compare_calls(&mut self) -> Result<(), Fault> {
        let Communicator { rank, size, .. } = self.communicator;
        if size == 1 || self.abort_flag.store_is_lost() {
            return Ok(());
        }
        let (report, number) = (self.chain.report(), self.chain.number());
        if self.shown != Some(number) && disagreement::tell(&self.store, rank, &report).is_ok() {
            self.shown = Some(number);
        }
        for beside in [(rank + 1) % size, (rank + size - 1) % size] {
            if disagreement::is_told_of(&self.store, &report, beside).unwrap_or(false) {
                return Err(Fault::Different);
            }
        }
        Ok(())
    }

    /// Takes back that this rank waits.
    pub(super) fn go_on(&mut self) {
        if std::mem::take(&mut self.is_said) {
            // If the store is gone, its next user finds out.
            let own = self.communicator.rank;
            let _ = self.store.delete(&failure::stuck(own));
            let _ = failure::say_moving(&self.job, self.members[own]);
        }
    }
}

/// A wait in progress.
pub(super) struct Wait<'a> {
    watch: &'a mut Watch,
    limit: Duration,
    /// Time of the last progress.
    since: Instant,
    looked: Instant,
    /// Time without progress after which this rank shows its call: at first [`LONG`], then twice as long
    /// each time.
    shows_after: Duration,
}

impl Wait<'_> {
    /// Lowers the limit to `limit`.
    pub(super) fn at_most(mut self, limit: Duration) -> Self {
        self.limit = self.limit.min(limit);
        self.shows_after = self.shows_after.min(self.limit / 2);
        self
    }

    /// Notes that something has arrived.
    pub(super) fn progressed(&mut self) {
        self.since = Instant::now();
        self.shows_after = LONG.min(self.limit / 2);
    }

    /// Pauses, or fails if there is no use in waiting.
    pub(super) fn idle(&mut self) -> Result<(), Fault> {
        let now = Instant::now();
        let waited = now - self.since;
        if waited < SPIN {
            std::hint::spin_loop();
            return Ok(());
        }
        if waited < BUSY {
            std::thread::yield_now();
            return Ok(());
        }
        std::thread::sleep(PAUSE);
        if now - self.looked < LOOK {
            return Ok(());
        }
        self.looked = now;
        self.watch.look()?;
        if waited >= self.limit {
            return Err(Fault::Late);
        }
        if waited >= self.shows_after {
            self.shows_after = 2 * waited;
            self.watch.say();
            self.watch.compare_calls()?;
        }
        Ok(())
    }

    /// Waits until a request is done.
    pub(super) fn until_done(&mut self, request: &mut Request) -> Result<(), Fault> {
        while !self.watch.communicator.is_done(request)? {
            self.idle()?;
        }
        self.progressed();
        Ok(())
    }
}
