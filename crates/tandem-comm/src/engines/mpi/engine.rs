//! MPI engine: compares the calls, then lets MPI or the ring do the work.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::communicator::{Communicator, Fold, Number};
use super::messages::Messages;
use super::ring::{self, OrderedReduction};
use super::segments::Segments;
use super::staged::{self, AllGather, Broadcast, IntegerAllReduce, IntegerReduceScatter, Parts};
use super::wait::{Fault, Watch};
use super::world::blocking;
use crate::collective::call::{Call, fnv1a};
use crate::collective::element::ElementKind;
use crate::collective::engine::Engine;
use crate::error::{CommError, Result};
use crate::health::abort_flag::AbortFlag;
use crate::health::failure;
use crate::store::{Store, StoreError};

/// Time that a finished rank waits for the others before it leaves its farewell to [`super::Session`].
const FAREWELL: Duration = Duration::from_secs(1);
/// Time for the ranks of a stuck group to notice it, one after another.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time for a rank to tell its different call.
const ANSWER: Duration = Duration::from_secs(10);
/// Time for the watchdog to learn why MPI failed.
const GRACE: Duration = Duration::from_secs(2);
/// Time for notices of a failure to leave this rank.
const NOTICES: Duration = Duration::from_millis(200);
/// Time for notices to reach a rank that was away for long.
const LATE_NOTICES: Duration = Duration::from_millis(50);
/// Call of a rank that drops its group.
const END: &str = "the end of its group";

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
    /// Number of collectives so far.
    num_calls: u64,
    /// Time when the last collective ended.
    last_call: Instant,
    failure: Option<CommError>,
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
            num_calls: 0,
            last_call: Instant::now(),
            failure: None,
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
    fn notify(&self) {
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
            Fault::Over => self.verdict(GRACE).unwrap_or_else(|| CommError::Engine {
                reason: format!(
                    "{call}: another rank reported a failure, whose record the store does not have"
                ),
            }),
            // A rank that is gone is known to the watchdog soon; MPI only says that a transfer failed.
            Fault::Mpi(words) => self
                .verdict(GRACE.min(self.watch.deadline))
                .unwrap_or_else(|| CommError::Engine { reason: format!("{call}: {words}") }),
        };
        self.fail(error)
    }

    /// Returns the failure that another rank reported, if it does so within `patience`.
    fn verdict(&self, patience: Duration) -> Option<CommError> {
        let Watch { abort_flag, store, .. } = &self.watch;
        let until = Instant::now() + patience;
        loop {
            if abort_flag.is_cut() {
                return abort_flag.verdict();
            }
            let filed = if abort_flag.store_is_lost() { None } else { failure::filed(store).ok().flatten() };
            if filed.is_some() || Instant::now() >= until {
                return filed;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns the `suspects` that hang, and files ranks that these wait for: they may not be of this group,
    /// whose own record then cannot name them. A rank that waits too is none.
    fn hanging(&self, call: &str, suspects: &[usize]) -> Vec<usize> {
        let Watch { abort_flag, store, deadline, .. } = &self.watch;
        let (rank, own) = (self.communicator.rank, self.members[self.communicator.rank]);
        let suspects: Vec<_> = suspects.iter().copied().filter(|&suspect| suspect != rank).collect();
        let late = |missing| CommError::Deadline { call: call.to_owned(), missing, deadline: *deadline };
        let found = if abort_flag.store_is_lost() {
            None
        } else {
            failure::hanging(store, rank, &suspects, PATIENCE.min(*deadline)).ok()
        };
        let Some(hanging) = found else {
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

    fn everyone(&self) -> Vec<usize> {
        (0..self.communicator.size).collect()
    }

    /// Runs a collective: waits until all ranks have arrived with the same call, then does `work`.
    fn collective<T>(
        &mut self,
        call: &Call,
        work: impl FnOnce(&mut Self) -> std::result::Result<T, Fault>,
    ) -> Result<T> {
        self.check_alive()?;
        self.num_calls += 1;
        let text = call.to_string();
        if self.communicator.size > 1 && !self.compare(&text)? {
            let error = self.mismatch(&text);
            return Err(self.fail(error));
        }
        let outcome = work(self).map_err(|fault| {
            let everyone = self.everyone();
            self.fault(&text, fault, &everyone)
        })?;
        self.watch.go_on();
        self.last_call = Instant::now();
        Ok(outcome)
    }

    /// Waits until all ranks have arrived; returns whether their calls are equal.
    fn compare(&mut self, text: &str) -> Result<bool> {
        let compared = self.begin_comparison(text).map_err(Fault::Mpi).and_then(|mut request| {
            self.watch.wait().until_done(&mut request)?;
            let segment = self.communicator.memory(&mut request);
            let are_equal = are_equal(segment.bytes());
            self.segments.put(segment);
            self.look_for_late_notices()?;
            Ok(are_equal)
        });
        compared.map_err(|fault| {
            let everyone = self.everyone();
            self.fault(text, fault, &everyone)
        })
    }

    /// Fails if the others have given this rank up before it came. Their parts of the comparison were
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

    /// Starts a reduction of every rank's fingerprint: its minimum, and that of its complement.
    fn begin_comparison(
        &self,
        text: &str,
    ) -> std::result::Result<super::communicator::Request, super::communicator::Failed> {
        let own = fingerprint(text, self.num_calls);
        let mut segment = self.segments.take(16);
        segment.bytes_mut()[..8].copy_from_slice(&own.to_ne_bytes());
        segment.bytes_mut()[8..16].copy_from_slice(&(!own).to_ne_bytes());
        self.communicator.all_reduce(segment, 2, Number::U64, Fold::Min)
    }

    /// Returns the error of ranks with different calls. Rank 0 reads all calls; the others wait for
    /// its report, and if rank 0 is gone they know that it ended.
    fn mismatch(&self, text: &str) -> CommError {
        let Communicator { rank, size, .. } = self.communicator;
        let store = &self.watch.store;
        let answer = ANSWER.min(self.watch.deadline);
        let told = self.tell(text).and_then(|()| {
            if rank != 0 {
                let calls = self.call_of(0, answer)?;
                return Ok(match (self.verdict(answer), &*calls) {
                    (Some(verdict), _) => verdict,
                    (None, END) => CommError::PeerLost { rank: 0 },
                    (None, other) => different(0, other, rank, text),
                });
            }
            for other in 1..size {
                let call = self.call_of(other, answer)?;
                if call != text {
                    return Ok(different(0, text, other, &call));
                }
            }
            // A hash that is equal by chance would not have come here.
            Ok(CommError::Engine { reason: format!("{text}: ranks disagree about calls that are equal") })
        });
        told.unwrap_or_else(|error| match failure::filed(store) {
            Ok(Some(filed)) => filed,
            _ => CommError::Store(error),
        })
    }

    fn tell(&self, text: &str) -> std::result::Result<(), StoreError> {
        let rank = self.communicator.rank;
        self.watch.store.set(&format!("calls/{}/{rank}", self.num_calls), text.as_bytes())
    }

    fn call_of(&self, rank: usize, limit: Duration) -> std::result::Result<String, StoreError> {
        let call = self.watch.store.get(&format!("calls/{}/{rank}", self.num_calls), limit)?;
        Ok(String::from_utf8_lossy(&call).into_owned())
    }

    /// Reduces parts in a fixed order.
    fn ordered(
        &mut self,
        call: &Call,
        data: &mut [u8],
        parts: &[Range<usize>],
        for_all: bool,
    ) -> std::result::Result<(), Fault> {
        let reduction = OrderedReduction {
            communicator: &self.communicator,
            segments: &self.segments,
            kind: call.kind,
            reduction: call.reduction(),
            parts,
            for_all,
        };
        reduction.run(data, &mut self.watch.wait())
    }

    fn staged(&mut self, collective: &mut dyn staged::Staged) -> std::result::Result<(), Fault> {
        staged::run(collective, &self.communicator, &self.segments, &mut self.watch.wait())
    }

    /// Gathers every rank's `own`.
    fn gather(&mut self, own: u64) -> std::result::Result<Vec<u64>, Fault> {
        let Communicator { rank, size, .. } = self.communicator;
        let mut all = vec![0; size];
        all[rank] = own;
        let parts: Vec<_> = (0..size).map(|rank| 8 * rank..8 * (rank + 1)).collect();
        let data = bytemuck::cast_slice_mut(&mut all);
        self.staged(&mut AllGather(Parts { data, parts: &parts, rank }))?;
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
        self.num_calls += 1;
        let mut request = self.begin_comparison(END)?;
        match self.watch.wait().at_most(FAREWELL).until_done(&mut request) {
            Ok(()) => {}
            Err(Fault::Late) => {
                // A rank that still works, or that made another call, which then finds this one's.
                let told = self.tell(END);
                self.communicator.world.keep_farewell(self.communicator.clone(), request);
                return told.map_err(|error| Fault::Mpi(error.to_string()));
            }
            Err(fault) => return Err(fault),
        }
        let segment = self.communicator.memory(&mut request);
        if !are_equal(segment.bytes()) {
            let error = self.mismatch(END);
            self.fail(error);
        }
        Ok(())
    }
}

/// Returns whether the fingerprints of all ranks are equal: their minimum is their maximum.
fn are_equal(bytes: &[u8]) -> bool {
    bytes[..8].iter().zip(&bytes[8..16]).all(|(smallest, largest)| *smallest == !largest)
}

/// Returns the error of two ranks whose calls differ.
fn different(rank: usize, call: &str, other_rank: usize, other_call: &str) -> CommError {
    match (call, other_call) {
        (END, _) => CommError::PeerLost { rank },
        (_, END) => CommError::PeerLost { rank: other_rank },
        _ => {
            CommError::Mismatch { rank, call: call.to_owned(), other_rank, other_call: other_call.to_owned() }
        }
    }
}

/// Hashes (FNV-1a) a call and its number in the order of calls.
fn fingerprint(call: &str, number: u64) -> u64 {
    fnv1a(call.bytes().chain(number.to_le_bytes()).map(u64::from))
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
        self.collective(&call, |this| match call.kind {
            _ if size == 1 => Ok(()),
            ElementKind::I64 if ring::is_slow(data.len(), size) => {
                this.staged(&mut IntegerAllReduce { data, reduction: call.reduction() })
            }
            _ => {
                let end = |rank: usize| call.len * rank / size * width;
                let parts: Vec<_> = (0..size).map(|rank| end(rank)..end(rank + 1)).collect();
                this.ordered(&call, data, &parts, true)
            }
        })
    }

    fn reduce_scatter(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let (rank, size) = (self.communicator.rank, self.communicator.size);
        let parts: Vec<_> = call.places(counts).collect();
        self.collective(&call, |this| match call.kind {
            _ if size == 1 => Ok(()),
            ElementKind::I64 if ring::is_slow(data.len(), size) => {
                let parts = Parts { data, parts: &parts, rank };
                this.staged(&mut IntegerReduceScatter { parts, reduction: call.reduction() })
            }
            _ => this.ordered(&call, data, &parts, false),
        })
    }

    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let (rank, size) = (self.communicator.rank, self.communicator.size);
        let parts: Vec<_> = call.places(counts).collect();
        self.collective(&call, |this| {
            if size == 1 { Ok(()) } else { this.staged(&mut AllGather(Parts { data, parts: &parts, rank })) }
        })
    }

    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()> {
        let (is_root, size) = (root == self.communicator.rank, self.communicator.size);
        self.collective(&call, |this| {
            if size == 1 { Ok(()) } else { this.staged(&mut Broadcast { data, root, is_root }) }
        })
    }

    fn barrier(&mut self, call: Call) -> Result<()> {
        self.collective(&call, |_| Ok(()))
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
        let colors = self.collective(&call, |this| this.gather(color as u64))?;
        let members: Vec<_> =
            (0..self.communicator.size).filter(|&rank| colors[rank] == color as u64).collect();
        // MPI's colours are smaller numbers: the first rank of each colour.
        let part = self.divide(members[0]);
        let part = part.map_err(|fault| self.fault(&call.to_string(), fault, &members))?;
        let path = format!("{}split-{}-{color}/", self.path, self.num_calls);
        let of_job = members.iter().map(|&member| self.members[member]).collect();
        let (deadline, abort_flag) = (self.watch.deadline, self.watch.abort_flag.clone());
        Ok(Box::new(Self::new(part, self.job.clone(), path, of_job, deadline, abort_flag)))
    }

    fn abort(&mut self, reason: &str) {
        if self.failure.is_none() {
            self.fail(CommError::Aborted { rank: self.communicator.rank, reason: reason.to_owned() });
        }
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
            && self.farewell().is_err()
        {
            // The others are told by the store; MPI cannot be finalised with them.
            self.communicator.world.set_failed();
        }
    }
}
