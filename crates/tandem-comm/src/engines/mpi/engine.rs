//! MPI engine: lets MPI or the ring do the work, and compares the marks that come with it.

use std::fmt::Display;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::communicator::{Communicator, Fold, Number, Request};
use super::mark::{MARK, Mark};
use super::messages::Messages;
use super::ring::{self, OrderedReduction};
use super::segments::Segments;
use super::staged::{self, AllGather, Broadcast, IntegerAllReduce, IntegerReduceScatter, Parts};
use super::wait::{Fault, Watch};
use super::world::blocking;
use crate::collective::call::Call;
use crate::collective::call_chain::END;
use crate::collective::element::{ElementKind, Reduction};
use crate::collective::engine::Engine;
use crate::error::{CommError, Result};
use crate::health::abort_flag::AbortFlag;
use crate::health::{disagreement, failure};
use crate::store::Store;

/// Time that a finished rank waits for the others before it leaves its farewell to [`super::Session`].
const FAREWELL: Duration = Duration::from_secs(1);
/// Time for the ranks of a stuck group to notice it, one after another.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time to learn why MPI failed: from the watchdog, or from calls that differ.
const GRACE: Duration = Duration::from_secs(2);
/// Time for notices of a failure to leave this rank.
const NOTICES: Duration = Duration::from_millis(200);
/// Time for notices to reach a rank that was away for long.
const LATE_NOTICES: Duration = Duration::from_millis(50);

pub(super) struct Mpi {
    watch: Watch,
    communicator: Communicator,
    segments: Segments,
    messages: Messages,
    /// Store with the job's prefix.
    job: Store,
    /// This group's prefix behind the job's; empty for the job's own group.
    path: String,
    /// Ranks of this group as ranks of the job.
    members: Vec<usize>,
    /// Time when the last collective ended.
    last_call: Instant,
    failure: Option<CommError>,
    /// Whether the other ranks have been told to look into the store.
    has_notified: bool,
}

impl Mpi {
    /// Creates the engine of a group. `members` are ranks of the job.
    pub(super) fn new(
        communicator: Communicator,
        job: Store,
        path: String,
        members: Vec<usize>,
        deadline: Duration,
        abort_flag: AbortFlag,
    ) -> Self {
        let segments = Segments::default();
        Self {
            watch: Watch::new(communicator.clone(), (&job, &path), members.clone(), abort_flag, deadline),
            messages: Messages::new(communicator.clone(), segments.clone()),
            communicator,
            segments,
            job,
            path,
            members,
            last_call: Instant::now(),
            failure: None,
            has_notified: false,
        }
    }

    /// Fails the group, here and through the store for all, and tells the other ranks to look there.
    fn fail(&mut self, error: CommError) -> CommError {
        let abort_flag = self.watch.abort_flag.clone();
        let own = error.clone();
        let error = match abort_flag.verdict() {
            Some(verdict) if abort_flag.is_cut() => verdict,
            _ if abort_flag.store_is_lost() => error,
            _ => failure::report(&self.watch.store, self.communicator.rank, error),
        };
        let mut verdict = failure::in_parent(error.clone(), &self.members);
        if !self.path.is_empty() && !abort_flag.is_cut() && !abort_flag.store_is_lost() {
            verdict = failure::report(&self.job, self.members[self.communicator.rank], verdict);
        }
        abort_flag.note(verdict);
        self.communicator.world.set_failed();
        // Ranks that found this failure need not spread it.
        if error == own {
            self.notify();
        }
        self.failure.insert(error).clone()
    }

    /// Tells all ranks, which may wait for this one, that the group has failed.
    fn notify(&mut self) {
        if std::mem::replace(&mut self.has_notified, true) {
            return;
        }
        let Communicator { rank, size, .. } = self.communicator;
        let notice = |to| self.communicator.notify(self.segments.take(0), to).ok();
        let mut notices: Vec<_> = (0..size).filter(|&to| to != rank).filter_map(notice).collect();
        let until = Instant::now() + NOTICES;
        // A notice that does not leave is for a rank that is gone, or that finds out at its deadline.
        while !notices.is_empty() && Instant::now() < until {
            notices.retain_mut(|notice| self.communicator.is_done(notice) == Ok(false));
            std::thread::yield_now();
        }
    }

    fn check_alive(&mut self) -> Result<()> {
        if self.watch.abort_flag.is_cut() && self.failure.is_none() {
            self.failure = self.watch.abort_flag.verdict();
            self.communicator.world.set_failed();
        }
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Converts the end of a wait in a call that `suspects` take part in.
    fn fault(&mut self, call: &str, fault: Fault, suspects: &[usize]) -> CommError {
        let error = match fault {
            Fault::Late => {
                let missing = self.hanging(call, suspects);
                CommError::Deadline { call: call.to_owned(), missing, deadline: self.watch.deadline }
            }
            Fault::Different => self.disagreement(),
            Fault::Over => self.verdict(GRACE).unwrap_or_else(|| CommError::Engine {
                reason: format!(
                    "{call}: another rank reported a failure, whose record the store does not have"
                ),
            }),
            // A rank that is gone is known to the watchdog soon, and one that made another call waits
            // in it; MPI only says that a transfer failed.
            Fault::Mpi(words) => self
                .verdict(GRACE.min(self.watch.deadline))
                .unwrap_or_else(|| CommError::Engine { reason: format!("{call}: {words}") }),
        };
        self.fail(error)
    }

    /// Returns the failure that another rank reported, or that calls differ, if that becomes known within
    /// `patience`.
    fn verdict(&mut self, patience: Duration) -> Option<CommError> {
        let until = Instant::now() + patience;
        loop {
            let Watch { abort_flag, store, .. } = &self.watch;
            if abort_flag.is_cut() {
                return abort_flag.verdict();
            }
            if !abort_flag.store_is_lost() {
                if let Ok(Some(filed)) = failure::filed(store) {
                    return Some(filed);
                }
                if disagreement::is_found(store) == Ok(true) || self.watch.compare_calls().is_err() {
                    return Some(self.disagreement());
                }
            }
            if Instant::now() >= until {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Reports this rank's last calls and returns the verdict on those of all.
    fn disagreement(&mut self) -> CommError {
        let Communicator { rank, size, .. } = self.communicator;
        let (store, deadline) = (self.watch.store.clone(), self.watch.deadline);
        let report = self.watch.chain.report();
        let verdict = disagreement::verdict(&store, (rank, size), &report, deadline, || self.notify());
        verdict.unwrap_or_else(CommError::Store)
    }

    /// Returns the `suspects` that hang, and files ranks that these wait for: they may not be of this group,
    /// whose own record then cannot name them. A rank that waits too is none.
    fn hanging(&self, call: &str, suspects: &[usize]) -> Vec<usize> {
        let Watch { abort_flag, deadline, .. } = &self.watch;
        let (rank, own) = (self.communicator.rank, self.members[self.communicator.rank]);
        let suspects: Vec<_> = suspects.iter().copied().filter(|&suspect| suspect != rank).collect();
        let late = |missing| CommError::Deadline { call: call.to_owned(), missing, deadline: *deadline };
        let Some(hanging) = self.not_waiting(&suspects) else {
            // The store is in the process of the job's first rank, which then hangs as a whole.
            if own != 0 {
                abort_flag.note(late(vec![0]));
            }
            return suspects;
        };
        let hanging = if hanging.is_empty() { suspects } else { hanging };
        let of_job: Vec<usize> = hanging.iter().map(|&rank| self.members[rank]).collect();
        let causes = failure::root_causes(&self.job, own, &of_job).unwrap_or_default();
        if !causes.is_empty() && causes != of_job && !abort_flag.is_cut() {
            abort_flag.note(failure::report(&self.job, own, late(causes)));
        }
        hanging
    }

    /// Returns the `suspects` that do not wait, unless the store is lost.
    fn not_waiting(&self, suspects: &[usize]) -> Option<Vec<usize>> {
        let Watch { abort_flag, store, deadline, .. } = &self.watch;
        let patience = PATIENCE.min(*deadline);
        let ask = || failure::hanging(store, self.communicator.rank, suspects, patience).ok();
        if abort_flag.store_is_lost() { None } else { ask() }
    }

    fn everyone(&self) -> Vec<usize> {
        (0..self.communicator.size).collect()
    }

    /// Runs a collective. Its messages carry this rank's mark.
    fn collective<T>(
        &mut self,
        call: &Call,
        work: impl FnOnce(&mut Self, Mark) -> std::result::Result<T, Fault>,
    ) -> Result<T> {
        self.check_alive()?;
        self.watch.chain.push(*call, 0);
        let mark = Mark(self.watch.chain.hash());
        let done = work(self, mark).and_then(|outcome| self.look_for_late_notices().map(|()| outcome));
        let outcome = done.map_err(|fault| {
            let everyone = self.everyone();
            self.fault(&call.to_string(), fault, &everyone)
        })?;
        self.watch.go_on();
        self.last_call = Instant::now();
        Ok(outcome)
    }

    /// Waits until all ranks have come with this rank's mark.
    fn meet(&mut self, mark: Mark) -> std::result::Result<(), Fault> {
        if self.communicator.size == 1 {
            return Ok(());
        }
        let mut request = self.begin_meeting(mark)?;
        self.watch.wait().until_done(&mut request)?;
        self.end_meeting(mark, &mut request)
    }

    fn begin_meeting(&self, mark: Mark) -> std::result::Result<Request, Fault> {
        let mut segment = self.segments.take(MARK);
        mark.write(segment.bytes_mut(), 0);
        Ok(self.communicator.all_reduce(segment, MARK / 8, Number::U64, Fold::Sum)?)
    }

    fn end_meeting(&self, mark: Mark, request: &mut Request) -> std::result::Result<(), Fault> {
        let segment = self.communicator.memory(request);
        let met = mark.check_reduced(segment.bytes(), 0, Reduction::Sum, self.communicator.size);
        self.segments.put(segment);
        met
    }

    /// Fails if the others have given this rank up before it came. Their parts of the collective were
    /// there already; their notices follow.
    fn look_for_late_notices(&self) -> std::result::Result<(), Fault> {
        // The others waited for a deadline, all of which this rank spent elsewhere.
        if self.last_call.elapsed() < self.watch.deadline / 2 {
            return Ok(());
        }
        let until = Instant::now() + LATE_NOTICES;
        while Instant::now() < until {
            self.watch.look()?;
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Reduces parts in a fixed order.
    fn ordered(
        &mut self,
        call: &Call,
        data: &mut [u8],
        parts: &[Range<usize>],
        for_all: bool,
        mark: Mark,
    ) -> std::result::Result<(), Fault> {
        // Receives of the ring have room for any of its messages.
        if ring::is_gathered(data.len(), self.communicator.size) {
            self.compare_first(mark)?;
        }
        let reduction = OrderedReduction {
            communicator: &self.communicator,
            segments: &self.segments,
            kind: call.kind,
            reduction: call.reduction(),
            parts,
            for_all,
            mark,
        };
        reduction.run(data, &mut self.watch.wait())
    }

    /// Compares this rank's mark with the others' where MPI cannot bear that they differ.
    fn compare_first(&mut self, mark: Mark) -> std::result::Result<(), Fault> {
        if self.communicator.world.library.bears_differences { Ok(()) } else { self.meet(mark) }
    }

    fn staged(&mut self, collective: &mut dyn staged::Staged, mark: Mark) -> std::result::Result<(), Fault> {
        self.compare_first(mark)?;
        staged::run(collective, &self.communicator, &self.segments, &mut self.watch.wait())
    }

    /// Gathers every rank's `own`.
    fn gather(&mut self, own: u64, mark: Mark) -> std::result::Result<Vec<u64>, Fault> {
        let Communicator { rank, size, .. } = self.communicator;
        let mut all = vec![0; size];
        all[rank] = own;
        let parts: Vec<_> = (0..size).map(|rank| 8 * rank..8 * (rank + 1)).collect();
        let data = bytemuck::cast_slice_mut(&mut all);
        self.staged(&mut AllGather(Parts { data, parts: &parts, rank, mark }), mark)?;
        Ok(all)
    }

    /// Divides the communicator; the call blocks, so it has a thread of its own.
    fn divide(&mut self, color: usize) -> std::result::Result<Communicator, Fault> {
        let communicator = self.communicator.clone();
        let until = Instant::now() + self.watch.deadline;
        let mut fault = Fault::Mpi("the system refuses a thread for MPI_Comm_split".to_owned());
        let part = blocking(
            move || communicator.split(color),
            || match self.watch.look() {
                Ok(()) if Instant::now() < until => false,
                Ok(()) => {
                    fault = Fault::Late;
                    true
                }
                Err(found) => {
                    fault = found;
                    true
                }
            },
        );
        part.ok_or(fault)?.map_err(Fault::Mpi)
    }

    /// Waits briefly until the other ranks end too.
    fn farewell(&mut self) -> std::result::Result<(), Fault> {
        self.messages.settle_all(&mut self.watch.wait())?;
        self.watch.go_on();
        if self.communicator.size == 1 {
            return Ok(());
        }
        self.watch.chain.end();
        let mark = Mark(self.watch.chain.hash());
        let mut request = self.begin_meeting(mark)?;
        match self.watch.wait().at_most(FAREWELL).until_done(&mut request) {
            Ok(()) => self.end_meeting(mark, &mut request),
            Err(Fault::Late) => {
                // A rank that still works, or that made another call, which then finds this one's.
                let told = self.watch.compare_calls();
                self.communicator.world.keep_farewell(self.communicator.clone(), request);
                told
            }
            Err(fault) => Err(fault),
        }
    }
}

impl Engine for Mpi {
    fn rank(&self) -> usize {
        self.communicator.rank
    }

    fn size(&self) -> usize {
        self.communicator.size
    }

    fn all_reduce(&mut self, call: Call, data: &mut [u8]) -> Result<()> {
        let (size, width) = (self.communicator.size, call.kind.size());
        self.collective(&call, |this, mark| match call.kind {
            _ if size == 1 => Ok(()),
            ElementKind::I64 if ring::is_slow(data.len(), size) => {
                this.staged(&mut IntegerAllReduce { data, reduction: call.reduction(), size, mark }, mark)
            }
            _ => {
                let end = |rank: usize| call.len * rank / size * width;
                let parts: Vec<_> = (0..size).map(|rank| end(rank)..end(rank + 1)).collect();
                this.ordered(&call, data, &parts, true, mark)
            }
        })
    }

    fn reduce_scatter(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let (rank, size) = (self.communicator.rank, self.communicator.size);
        let parts: Vec<_> = call.places(counts).collect();
        self.collective(&call, |this, mark| match call.kind {
            _ if size == 1 => Ok(()),
            ElementKind::I64 if ring::is_slow(data.len(), size) => {
                let parts = Parts { data, parts: &parts, rank, mark };
                this.staged(&mut IntegerReduceScatter { parts, reduction: call.reduction() }, mark)
            }
            _ => this.ordered(&call, data, &parts, false, mark),
        })
    }

    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let (rank, size) = (self.communicator.rank, self.communicator.size);
        let parts: Vec<_> = call.places(counts).collect();
        self.collective(&call, |this, mark| {
            if size == 1 {
                return Ok(());
            }
            this.staged(&mut AllGather(Parts { data, parts: &parts, rank, mark }), mark)
        })
    }

    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()> {
        let (is_root, size) = (root == self.communicator.rank, self.communicator.size);
        self.collective(&call, |this, mark| {
            if size == 1 { Ok(()) } else { this.staged(&mut Broadcast { data, root, is_root, mark }, mark) }
        })
    }

    fn barrier(&mut self, call: Call) -> Result<()> {
        self.collective(&call, Self::meet)
    }

    fn send(&mut self, to: usize, data: &[u8]) -> Result<()> {
        self.check_alive()?;
        let sent = self.messages.send(to, data, &mut self.watch.wait_for(to));
        sent.map_err(|fault| {
            self.fault(&format!("send of {} bytes to rank {to}", data.len()), fault, &[to])
        })?;
        self.watch.go_on();
        Ok(())
    }

    fn recv(&mut self, from: usize, data: &mut [u8]) -> Result<()> {
        self.check_alive()?;
        let call = format!("recv of {} bytes from rank {from}", data.len());
        let len = self.messages.recv_len(from, &mut self.watch.wait_for(from));
        let len = len.map_err(|fault| self.fault(&call, fault, &[from]))?;
        if len != data.len() as u64 {
            let (rank, other_call) = (self.communicator.rank, format!("send of {len} bytes"));
            return Err(self.fail(CommError::Mismatch { rank, call, other_rank: from, other_call }));
        }
        let received = self.messages.recv(from, data, &mut self.watch.wait_for(from));
        received.map_err(|fault| self.fault(&call, fault, &[from]))?;
        self.watch.go_on();
        Ok(())
    }

    fn split(&mut self, call: Call, color: usize) -> Result<Box<dyn Engine>> {
        let colors = self.collective(&call, |this, mark| this.gather(color as u64, mark))?;
        let members: Vec<_> =
            (0..self.communicator.size).filter(|&rank| colors[rank] == color as u64).collect();
        // MPI's colours are smaller numbers: the first rank of each colour.
        let part = self.divide(members[0]);
        let part = part.map_err(|fault| self.fault(&call.to_string(), fault, &members))?;
        let path = format!("{}split-{}-{color}/", self.path, self.watch.chain.number());
        let of_job = members.iter().map(|&member| self.members[member]).collect();
        let (deadline, abort_flag) = (self.watch.deadline, self.watch.abort_flag.clone());
        Ok(Box::new(Self::new(part, self.job.clone(), path, of_job, deadline, abort_flag)))
    }

    fn abort(&mut self, reason: &str) {
        if self.failure.is_none() {
            self.fail(CommError::Aborted { rank: self.communicator.rank, reason: reason.to_owned() });
        }
    }

    /// The next call's mark tells of it.
    fn note(&mut self, call: Call) -> Result<()> {
        self.collective(&call, |_, _| Ok(()))
    }

    fn look_around(&mut self, what: &dyn Display) -> Result<()> {
        self.check()?;
        self.watch.show().map_err(|fault| self.fault(&what.to_string(), fault, &[]))
    }

    fn at_deadline(&mut self, what: &dyn Display) -> Result<()> {
        self.look_around(what)?;
        let everyone = self.everyone();
        match self.not_waiting(&everyone) {
            Some(hanging) if hanging.is_empty() => Ok(()),
            _ => Err(self.fault(&what.to_string(), Fault::Late, &everyone)),
        }
    }

    fn end_noted(&mut self) {
        self.watch.go_on();
    }

    fn check(&mut self) -> Result<()> {
        self.check_alive()?;
        self.watch.look().map_err(|fault| self.fault("a look at the other ranks", fault, &[]))
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // A rank that panics, or of which another group failed, does not wait: the others should
        // not wait for it.
        if self.failure.is_none()
            && self.watch.abort_flag.verdict().is_none()
            && !std::thread::panicking()
            && let Err(fault) = self.farewell()
        {
            // MPI cannot be finalised with the others, who are told by the store.
            let everyone = self.everyone();
            self.fault(END, fault, &everyone);
        }
    }
}
