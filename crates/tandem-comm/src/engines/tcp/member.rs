//! Membership of one rank in one group: the state that its calls share with the poll thread.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::handshake::Purpose;
use super::link::Connection;
use super::mail::Outbox;
use super::wire::sleep;
use crate::error::{CommError, Result};
use crate::health::abort_flag::AbortFlag;
use crate::health::wake::Wake;
use crate::health::{disagreement, failure};
use crate::store::Store;

/// Time for the ranks of a stuck group to notice it, one after another.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time for the last connection of a rank that has left to arrive.
pub(super) const ON_ITS_WAY: Duration = Duration::from_secs(1);

pub(super) struct Member {
    pub(super) rank: usize,
    /// Ranks of this group as ranks of the job.
    pub(super) members: Vec<usize>,
    /// Number of the group in the job.
    pub(super) id: u64,
    pub(super) deadline: Duration,
    /// This group's prefix behind the job's; empty for the job's own group.
    pub(super) path: String,
    /// Store with the job's prefix.
    job: Store,
    /// Store with both prefixes.
    store: Store,
    pub(super) abort_flag: AbortFlag,
    pub(super) wake: Arc<Wake>,
    pub(super) outbox: Outbox,
    arrivals: Mutex<Vec<(Purpose, Arc<Connection>)>>,
    connections: Mutex<Vec<Arc<Connection>>>,
    /// Ranks that have left or are lost, and since when.
    gone: Mutex<Vec<(usize, Instant)>>,
    is_anyone_gone: AtomicBool,
    /// Whether no call can succeed any more.
    is_over: AtomicBool,
    /// Whether ranks found different calls, which each must report.
    calls_differ: AtomicBool,
    verdict: Mutex<Option<CommError>>,
}

impl Member {
    pub(super) fn new(
        job: Store,
        path: String,
        rank: usize,
        members: Vec<usize>,
        deadline: Duration,
        abort_flag: AbortFlag,
    ) -> Result<Arc<Self>> {
        let wake = Wake::new().map_err(|error| CommError::Engine {
            reason: format!("no descriptors for a group of {} ranks: {error}", members.len()),
        })?;
        let wake = Arc::new(wake);
        abort_flag.wake_at_cut(&wake);
        Ok(Arc::new(Self {
            rank,
            members,
            id: super::group_id(&path),
            deadline,
            store: job.prefixed(&path),
            path,
            job,
            abort_flag,
            outbox: Outbox::new(wake.clone()),
            wake,
            arrivals: Mutex::default(),
            connections: Mutex::default(),
            gone: Mutex::default(),
            is_anyone_gone: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            calls_differ: AtomicBool::new(false),
            verdict: Mutex::new(None),
        }))
    }

    /// Creates a subgroup's membership. `members` are ranks of the job.
    pub(super) fn part(&self, path: String, rank: usize, members: Vec<usize>) -> Result<Arc<Self>> {
        let (job, abort_flag) = (self.job.clone(), self.abort_flag.clone());
        Self::new(job, path, rank, members, self.deadline, abort_flag)
    }

    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Keeps a connection, to close it with the group.
    pub(super) fn keep(&self, connection: &Arc<Connection>) {
        lock(&self.connections).push(connection.clone());
        if self.is_over.load(Ordering::Acquire) {
            connection.socket.close();
        }
    }

    /// Takes over a connection that another rank has made.
    pub(super) fn arrive(&self, purpose: Purpose, connection: Arc<Connection>) {
        self.keep(&connection);
        lock(&self.arrivals).push((purpose, connection));
        self.wake.wake();
    }

    /// Returns the connections of a purpose that have arrived since the last call.
    pub(super) fn take_arrivals(&self, purpose: Purpose, mut each: impl FnMut(Arc<Connection>)) {
        let mut arrivals = lock(&self.arrivals);
        while let Some(i) = arrivals.iter().position(|(of, _)| *of == purpose) {
            each(arrivals.remove(i).1);
        }
    }

    /// Records a rank that has left in order.
    pub(super) fn left(&self, rank: usize) {
        self.note_gone(rank);
        self.outbox.lost(rank);
        self.wake.wake();
    }

    fn note_gone(&self, rank: usize) {
        lock(&self.gone).push((rank, Instant::now()));
        self.is_anyone_gone.store(true, Ordering::Release);
    }

    /// Returns whether a rank has left or is lost.
    pub(super) fn is_gone(&self, rank: usize) -> bool {
        self.is_anyone_gone.load(Ordering::Acquire) && lock(&self.gone).iter().any(|(gone, _)| *gone == rank)
    }

    /// Returns whether nothing more can arrive from a rank. One that has left in order may have connected
    /// just before, and what it sent may still be on its way.
    pub(super) fn is_silent(&self, rank: usize) -> bool {
        let has_waited = |since: &Instant| since.elapsed() >= ON_ITS_WAY.min(self.deadline / 2);
        self.is_gone(rank) && lock(&self.gone).iter().any(|(gone, since)| *gone == rank && has_waited(since))
    }

    /// Returns a rank that has left or is lost.
    pub(super) fn first_gone(&self) -> Option<usize> {
        lock(&self.gone).first().map(|(rank, _)| *rank)
    }

    /// Returns whether calls must end.
    pub(super) fn must_end(&self) -> bool {
        self.is_over.load(Ordering::Acquire) || self.abort_flag.is_cut()
    }

    pub(super) fn calls_differ(&self) -> bool {
        self.calls_differ.load(Ordering::Acquire)
    }

    /// Returns the failure, if the group or the job has failed.
    pub(super) fn failure(&self) -> Option<CommError> {
        let mut verdict = lock(&self.verdict);
        if verdict.is_none() && self.abort_flag.is_cut() {
            *verdict = self.abort_flag.verdict();
            self.close();
        }
        verdict.clone()
    }

    /// Ends the group because a connection to `rank` has ended. If a rank has found different
    /// calls, this rank must report its own; then there is no failure yet.
    pub(super) fn lose(&self, rank: usize) {
        self.note_gone(rank);
        let asks = self.asks_store() && lock(&self.verdict).is_none();
        if asks && disagreement::is_found(&self.store).is_ok_and(|found| found) {
            self.calls_differ.store(true, Ordering::Release);
            self.close();
        } else {
            self.fail(CommError::PeerLost { rank });
        }
    }

    fn asks_store(&self) -> bool {
        !self.abort_flag.is_cut() && !self.abort_flag.store_is_lost()
    }

    /// Fails the group, here and through the store for all. The first failure is kept.
    pub(super) fn fail(&self, error: CommError) -> CommError {
        let mut verdict = lock(&self.verdict);
        if let Some(earlier) = &*verdict {
            return earlier.clone();
        }
        let error = match self.abort_flag.verdict() {
            Some(verdict) if self.abort_flag.is_cut() => verdict,
            _ if self.abort_flag.store_is_lost() => error,
            _ => failure::report(&self.store, self.rank, error),
        };
        // The job is told before connections close. Ranks that wait for this rank in another group
        // then learn which rank is lost, instead of blaming this one.
        let mut of_job = failure::in_parent(error.clone(), &self.members);
        if !self.path.is_empty() && self.asks_store() {
            of_job = failure::report(&self.job, self.members[self.rank], of_job);
        }
        self.abort_flag.note(of_job);
        *verdict = Some(error.clone());
        self.close();
        error
    }

    /// Fails the group at the deadline because of `missing` ranks, or of those that they wait for.
    pub(super) fn late(&self, call: String, missing: Vec<usize>) -> CommError {
        let (deadline, own) = (self.deadline, self.members[self.rank]);
        let of_job: Vec<usize> = missing.iter().map(|&rank| self.members[rank]).collect();
        let causes =
            if self.asks_store() { failure::root_causes(&self.job, own, &of_job).ok() } else { None };
        // A cause may not be of this group, whose record then cannot name it.
        if let Some(causes) = causes.filter(|causes| *causes != of_job) {
            let error = CommError::Deadline { call: call.clone(), missing: causes, deadline };
            self.abort_flag.note(failure::report(&self.job, own, error));
        }
        self.fail(CommError::Deadline { call, missing, deadline })
    }

    /// Ends all connections and calls.
    pub(super) fn close(&self) {
        self.is_over.store(true, Ordering::Release);
        lock(&self.connections).iter().for_each(|connection| connection.socket.close());
        self.wake.wake();
    }

    /// Leaves in order: the other ranks' calls so far succeed.
    pub(super) fn leave(&self) {
        let connections = std::mem::take(&mut *lock(&self.connections));
        for connection in &connections {
            connection.leave_when(|| {
                let has_room = (connection.as_fd(), PollFlags::OUT);
                sleep(self, [Some(has_room), None], self.deadline).is_ok()
            });
        }
    }

    /// Says in the store that this rank waits in a call of all.
    pub(super) fn say_stuck(&self) -> bool {
        self.say_waiting(&self.members) && self.store.set(&failure::stuck(self.rank), b"").is_ok()
    }

    /// Takes [`Member::say_stuck`] back: the call was only slow.
    pub(super) fn say_moving(&self) {
        // If the store is gone, its next user finds out.
        let _ = self.store.delete(&failure::stuck(self.rank));
        self.say_met();
    }

    /// Says in the store that this rank waits for `peer` to send or receive a message.
    pub(super) fn say_waiting_for(&self, peer: usize) -> bool {
        self.say_waiting(&[self.members[peer]])
    }

    /// Takes [`Member::say_waiting_for`] back.
    pub(super) fn say_met(&self) {
        // As above.
        let _ = failure::say_moving(&self.job, self.members[self.rank]);
    }

    fn say_waiting(&self, ranks_of_job: &[usize]) -> bool {
        let own = self.members[self.rank];
        !self.abort_flag.store_is_lost() && failure::say_waiting(&self.job, own, ranks_of_job).is_ok()
    }

    /// Returns the ranks that do not wait, if that can be determined.
    pub(super) fn hanging(&self) -> Option<Vec<usize>> {
        if self.abort_flag.store_is_lost() {
            return None;
        }
        let all: Vec<usize> = (0..self.size()).collect();
        let hanging = failure::hanging(&self.store, self.rank, &all, self.deadline.min(PATIENCE)).ok()?;
        Some(hanging).filter(|hanging| !hanging.is_empty())
    }

    /// Reports this rank's last calls and returns the verdict: the first rank to come compares
    /// those of all.
    pub(super) fn compare_calls(&self, report: &str) -> CommError {
        // The others notice that this rank's connections end, and find that they must report.
        let (place, close) = ((self.rank, self.size()), || self.close());
        let verdict = disagreement::verdict(&self.store, place, report, self.deadline, close);
        self.fail(verdict.unwrap_or_else(CommError::Store))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
