//! Engine for ranks that are threads of one process, over shared memory.
//!
//! A collective has three phases. All ranks *arrive* with their call and their buffers' addresses;
//! the last compares the calls. Each rank then does its share of the *work* on all ranks' buffers:
//! in an all-reduce it reduces its `1/N` of the elements in rank order and writes the result to
//! every rank. All *leave* together, because only then may a buffer be reused.
//!
//! A call whose numbers another engine moves is only *noted*: compared with those of the ranks that have
//! noted it already.
//!
//! A rank can fail only while arriving. Between arriving and leaving there is only copying, which
//! always ends, so no buffer is read after its owner went on.

use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::collective::call::Call;
use crate::collective::element::reduce;
use crate::collective::engine::{Engine, MAX_MESSAGE_BYTES, MAX_MESSAGES};
use crate::engines::buffer_pool::BufferPool;
use crate::error::{CommError, Result};
use crate::group::ProcessGroup;

/// Creates a group for each of `size` ranks. A call in which a rank waits longer than `deadline`
/// fails.
///
/// # Panics
/// If `size` is 0.
pub fn groups(size: usize, deadline: Duration) -> Vec<ProcessGroup> {
    assert!(size > 0, "a group of no ranks");
    let shared = Arc::new(Shared::new(size, deadline));
    (0..size).map(|rank| ProcessGroup::new(Box::new(Threads::new(shared.clone(), rank)))).collect()
}

impl ProcessGroup {
    /// Creates a group of one rank.
    pub fn alone() -> Self {
        let mut groups = groups(1, Duration::from_secs(1));
        groups.pop().expect("one group was asked for")
    }
}

/// Engine of one rank.
struct Threads {
    shared: Arc<Shared>,
    rank: usize,
    /// Calls of all ranks, copied when all have arrived.
    peers: Vec<Arrival>,
    /// Buffer for this rank's share of a reduction.
    share: Vec<u64>,
}

struct Shared {
    size: usize,
    deadline: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Calls of the ranks that have arrived.
    arrivals: Vec<Option<Arrival>>,
    num_arrived: usize,
    num_leaving: usize,
    /// Number of collectives in which all have arrived.
    begun: u64,
    /// Number of collectives that all have left.
    ended: u64,
    failure: Option<CommError>,
    gone: Vec<bool>,
    /// Messages in flight, by sender and receiver.
    mail: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    spare: BufferPool,
    /// Calls that were noted and not by all, oldest first, with the first rank that noted each.
    noted: VecDeque<(Call, usize)>,
    /// Number of calls that each rank has noted, and that all have.
    num_noted: Vec<u64>,
    num_noted_by_all: u64,
    /// Groups split off in the current collective, by colour.
    children: HashMap<usize, Arc<Shared>>,
}

/// A call and its buffers' addresses.
#[derive(Clone, Copy)]
struct Arrival {
    call: Call,
    read: *const u8,
    write: *mut u8,
    color: usize,
}

// SAFETY: the pointers are followed only between arriving and leaving, while their owners wait.
// Each access says which rank reads and writes.
unsafe impl Send for Arrival {}

impl Shared {
    fn new(size: usize, deadline: Duration) -> Self {
        let state = State {
            arrivals: vec![None; size],
            gone: vec![false; size],
            num_noted: vec![0; size],
            ..State::default()
        };
        Self { size, deadline, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Locks the state. A panicking rank holds no lock: no code under the lock can fail.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, state: &mut State, error: CommError) -> CommError {
        let error = state.failure.get_or_insert(error).clone();
        self.changed.notify_all();
        error
    }

    /// Fails, and with it the group, if a rank has failed or ended.
    fn check(&self, state: &mut State) -> Result<()> {
        let failure = state.failure.clone().or_else(|| state.lost());
        failure.map_or(Ok(()), |failure| Err(self.fail(state, failure)))
    }
}

impl State {
    /// Returns the error if ranks made different calls.
    fn compare(&self) -> Option<CommError> {
        let behind = (0..self.num_noted.len()).find_map(|rank| self.behind(rank));
        if behind.is_some() {
            return behind;
        }
        let calls: Vec<Call> = self.arrivals.iter().flatten().map(|arrival| arrival.call).collect();
        let other = calls.iter().position(|call| *call != calls[0])?;
        Some(CommError::Mismatch {
            rank: 0,
            call: calls[0].to_string(),
            other_rank: other,
            other_call: calls[other].to_string(),
        })
    }

    /// Returns the error if another rank has come to a collective before it noted what `rank` has.
    fn behind(&self, rank: usize) -> Option<CommError> {
        let (other, arrival) = self.arrivals.iter().enumerate().find_map(|(other, arrival)| {
            Some((other, (*arrival)?)).filter(|_| self.num_noted[other] < self.num_noted[rank])
        })?;
        let (noted, _) = self.noted[(self.num_noted[other] - self.num_noted_by_all) as usize];
        Some(different((rank, noted), (other, arrival.call)))
    }

    /// Notes a call of a rank; returns the error if another rank has noted another one.
    fn note(&mut self, rank: usize, call: Call) -> Option<CommError> {
        match self.noted.get((self.num_noted[rank] - self.num_noted_by_all) as usize) {
            None => self.noted.push_back((call, rank)),
            Some((known, _)) if *known == call => {}
            Some((known, by)) => return Some(different((*by, *known), (rank, call))),
        }
        self.num_noted[rank] += 1;
        while self.num_noted.iter().all(|num| *num > self.num_noted_by_all) {
            self.noted.pop_front();
            self.num_noted_by_all += 1;
        }
        None
    }

    fn lost(&self) -> Option<CommError> {
        self.gone.iter().position(|&gone| gone).map(|rank| CommError::PeerLost { rank })
    }
}

/// Creates the error for different calls of two ranks.
fn different(a: (usize, Call), b: (usize, Call)) -> CommError {
    let ((rank, call), (other_rank, other_call)) = if a.0 < b.0 { (a, b) } else { (b, a) };
    CommError::Mismatch { rank, call: call.to_string(), other_rank, other_call: other_call.to_string() }
}

impl Threads {
    fn new(shared: Arc<Shared>, rank: usize) -> Self {
        let peers = Vec::with_capacity(shared.size);
        Self { shared, rank, peers, share: Vec::new() }
    }

    /// Waits until all ranks have arrived with the same call; `peers` then has their buffers'
    /// addresses.
    fn arrive(&mut self, call: Call, read: *const u8, write: *mut u8, color: usize) -> Result<()> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        shared.check(&mut state)?;
        state.arrivals[self.rank] = Some(Arrival { call, read, write, color });
        state.num_arrived += 1;
        if state.num_arrived == shared.size {
            if let Some(error) = state.compare() {
                return Err(shared.fail(&mut state, error));
            }
            state.num_arrived = 0;
            state.begun += 1;
            shared.changed.notify_all();
        } else {
            let this = state.begun;
            state = self.wait(
                state,
                &call,
                |state| state.begun > this,
                |state| (0..shared.size).filter(|&rank| state.arrivals[rank].is_none()).collect(),
            )?;
        }
        self.peers.clear();
        self.peers.extend(state.arrivals.iter().flatten());
        Ok(())
    }

    /// Waits until `done`; `missing` lists the awaited ranks. Fails with the group, and at the
    /// deadline fails the group.
    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        call: &dyn std::fmt::Display,
        done: impl Fn(&State) -> bool,
        missing: impl Fn(&State) -> Vec<usize>,
    ) -> Result<MutexGuard<'a, State>>
    where
        Self: 'a,
    {
        let shared: &Shared = &self.shared;
        let until = Instant::now() + shared.deadline;
        loop {
            if done(&state) {
                return Ok(state);
            }
            if let Some(failure) = state.failure.clone() {
                return Err(failure);
            }
            let now = Instant::now();
            if now >= until {
                let (missing, call) = (missing(&state), call.to_string());
                let error = CommError::Deadline { call, missing, deadline: shared.deadline };
                return Err(shared.fail(&mut state, error));
            }
            let waited = shared.changed.wait_timeout(state, until - now);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until all ranks have done their work. This cannot fail: see the module's description.
    fn leave(&mut self) {
        let shared = &*self.shared;
        let mut state = shared.lock();
        let this = state.ended;
        state.num_leaving += 1;
        if state.num_leaving == shared.size {
            state.num_leaving = 0;
            state.ended += 1;
            state.arrivals.fill(None);
            state.children.clear();
            shared.changed.notify_all();
        }
        while state.ended == this {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Reduces `range` (bytes) of all ranks' buffers into `self.share`, in rank order.
    ///
    /// # Safety
    /// Only between arriving and leaving. Every rank's `read` contains the range, and no rank
    /// writes to it meanwhile.
    unsafe fn reduce_range(&mut self, call: Call, range: Range<usize>) {
        self.share.resize(range.len().div_ceil(8), 0);
        let share = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut self.share)[..range.len()];
        for (rank, peer) in self.peers.iter().enumerate() {
            // SAFETY: the caller guarantees it.
            let part = unsafe { std::slice::from_raw_parts(peer.read.add(range.start), range.len()) };
            if rank == 0 {
                share.copy_from_slice(part);
            } else {
                reduce(call.kind, call.reduction(), share, part);
            }
        }
    }
}

/// Returns the share of rank `rank` of `size` in `len` elements.
fn share(len: usize, rank: usize, size: usize) -> Range<usize> {
    len * rank / size..len * (rank + 1) / size
}

/// Bytes reduced at once, so that they stay in the cache.
const PIECE: usize = 1 << 18;

impl Engine for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.shared.size
    }

    fn is_one_process(&self) -> bool {
        true
    }

    fn all_reduce(&mut self, call: Call, data: &mut [u8]) -> Result<()> {
        let place = data.as_mut_ptr();
        self.arrive(call, place, place, 0)?;
        let size = call.kind.size();
        let mine = share(call.len, self.rank, self.shared.size);
        for start in mine.clone().step_by(PIECE / size) {
            let piece = start * size..mine.end.min(start + PIECE / size) * size;
            // SAFETY: all buffers have the call's length. Only this rank reads and writes this
            // share.
            unsafe {
                self.reduce_range(call, piece.clone());
                let result = bytemuck::cast_slice::<u64, u8>(&self.share).as_ptr();
                for peer in &self.peers {
                    std::ptr::copy_nonoverlapping(result, peer.write.add(piece.start), piece.len());
                }
            }
        }
        self.leave();
        Ok(())
    }

    fn reduce_scatter(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let place = data.as_mut_ptr();
        self.arrive(call, place, place, 0)?;
        let mine = call.places(counts).nth(self.rank).expect("a part for each rank");
        for start in mine.clone().step_by(PIECE) {
            let piece = start..mine.end.min(start + PIECE);
            // SAFETY: all buffers have the call's length. Only this rank reads and writes this
            // part.
            unsafe {
                self.reduce_range(call, piece.clone());
                let result = bytemuck::cast_slice::<u64, u8>(&self.share).as_ptr();
                std::ptr::copy_nonoverlapping(result, place.add(piece.start), piece.len());
            }
        }
        self.leave();
        Ok(())
    }

    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let place = data.as_mut_ptr();
        self.arrive(call, place, place, 0)?;
        let mine = call.places(counts).nth(self.rank).expect("a part for each rank");
        for peer in self.peers.iter().filter(|peer| !std::ptr::eq(peer.read, place)) {
            // SAFETY: all buffers have the call's length. Only this rank reads and writes this
            // part, and the peers' buffers are different ones.
            unsafe {
                std::ptr::copy_nonoverlapping(place.add(mine.start), peer.write.add(mine.start), mine.len());
            };
        }
        self.leave();
        Ok(())
    }

    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()> {
        let place = data.as_mut_ptr();
        self.arrive(call, place, place, 0)?;
        if self.rank != root {
            // SAFETY: the root's buffer is as long as this one, and no rank writes to it.
            unsafe { std::ptr::copy_nonoverlapping(self.peers[root].read, place, data.len()) };
        }
        self.leave();
        Ok(())
    }

    fn barrier(&mut self, call: Call) -> Result<()> {
        self.arrive(call, std::ptr::null(), std::ptr::null_mut(), 0)?;
        self.leave();
        Ok(())
    }

    fn send(&mut self, to: usize, data: &[u8]) -> Result<()> {
        let (shared, from) = (&*self.shared, self.rank);
        let has_room = |state: &State| {
            let queues = state.mail.iter().filter(|((sender, _), _)| *sender == from).map(|(_, queue)| queue);
            let (num, bytes) = queues.flatten().fold((0, 0), |(num, bytes), m| (num + 1, bytes + m.len()));
            num == 0 || num < MAX_MESSAGES && bytes + data.len() <= MAX_MESSAGE_BYTES
        };
        let call = format_args!("send of {} bytes to rank {to}", data.len());
        let done = |state: &State| has_room(state) || state.gone[to];
        let mut message = self.wait(shared.lock(), &call, done, |_| vec![to])?.spare.take(data.len());
        message.extend_from_slice(data);
        let mut state = shared.lock();
        if let Some(failure) = state.failure.clone() {
            return Err(failure);
        }
        if state.gone[to] {
            return Err(CommError::PeerLost { rank: to });
        }
        state.mail.entry((from, to)).or_default().push_back(message);
        shared.changed.notify_all();
        Ok(())
    }

    fn recv(&mut self, from: usize, data: &mut [u8]) -> Result<()> {
        let shared = &*self.shared;
        let mail = (from, self.rank);
        let waiting = |state: &State| state.mail.get(&mail).is_some_and(|queue| !queue.is_empty());
        let call = format!("recv of {} bytes from rank {from}", data.len());
        let come = |state: &State| waiting(state) || state.gone[from];
        let mut state = self.wait(shared.lock(), &call, come, |_| vec![from])?;
        let Some(message) = state.mail.get_mut(&mail).and_then(VecDeque::pop_front) else {
            return Err(CommError::PeerLost { rank: from });
        };
        if message.len() != data.len() {
            let error = CommError::Mismatch {
                rank: self.rank,
                call,
                other_rank: from,
                other_call: format!("send of {} bytes", message.len()),
            };
            return Err(shared.fail(&mut state, error));
        }
        drop(state);
        data.copy_from_slice(&message);
        // The sender may be waiting for room.
        shared.lock().spare.put(message);
        shared.changed.notify_all();
        Ok(())
    }

    fn split(&mut self, call: Call, color: usize) -> Result<Box<dyn Engine>> {
        self.arrive(call, std::ptr::null(), std::ptr::null_mut(), color)?;
        let members = |peers: &[Arrival]| peers.iter().filter(|peer| peer.color == color).count();
        let (size, rank) = (members(&self.peers), members(&self.peers[..self.rank]));
        let deadline = self.shared.deadline;
        let child = {
            let mut state = self.shared.lock();
            let child = state.children.entry(color);
            child.or_insert_with(|| Arc::new(Shared::new(size, deadline))).clone()
        };
        self.leave();
        Ok(Box::new(Self::new(child, rank)))
    }

    fn abort(&mut self, reason: &str) {
        let mut state = self.shared.lock();
        self.shared.fail(&mut state, CommError::Aborted { rank: self.rank, reason: reason.to_owned() });
    }

    fn check(&mut self) -> Result<()> {
        self.shared.check(&mut self.shared.lock())
    }

    fn note(&mut self, call: Call) -> Result<()> {
        let mut state = self.shared.lock();
        self.shared.check(&mut state)?;
        state.note(self.rank, call).map_or(Ok(()), |error| Err(self.shared.fail(&mut state, error)))
    }

    fn look_around(&mut self, _: &dyn Display) -> Result<()> {
        let mut state = self.shared.lock();
        self.shared.check(&mut state)?;
        state.behind(self.rank).map_or(Ok(()), |error| Err(self.shared.fail(&mut state, error)))
    }

    fn at_deadline(&mut self, what: &dyn Display) -> Result<()> {
        self.look_around(what)?;
        let mut state = self.shared.lock();
        let own = state.num_noted[self.rank];
        let missing: Vec<usize> = (0..self.shared.size).filter(|&rank| state.num_noted[rank] < own).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let (call, deadline) = (what.to_string(), self.shared.deadline);
        Err(self.shared.fail(&mut state, CommError::Deadline { call, missing, deadline }))
    }
}

impl Drop for Threads {
    /// Tells waiting ranks that this rank has ended.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.gone[self.rank] = true;
        if state.num_arrived > 0 {
            self.shared.fail(&mut state, CommError::PeerLost { rank: self.rank });
        }
        self.shared.changed.notify_all();
    }
}
