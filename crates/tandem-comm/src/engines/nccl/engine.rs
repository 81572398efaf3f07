//! NCCL engine: NCCL does the work, and another engine compares the calls.

use std::fmt::Display;
use std::ops::Range;
use std::sync::mpsc::{SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::communicator::{Communicator, Place, unique_id};
use super::gpu::{Gpu, InFlight};
use super::libraries::Libraries;
use super::raw::{RawStream, UniqueId};
use super::staging::Staging;
use crate::collective::call::{Call, Operation, fnv1a};
use crate::collective::call_chain::COMPARED_CALLS;
use crate::collective::element::ElementKind;
use crate::collective::engine::{Engine, StreamRange};
use crate::error::{CommError, Result};
use crate::health::failure::in_parent;

/// Time for which a wait polls without pause; collectives of small buffers take less.
const BUSY: Duration = Duration::from_millis(1);
/// Interval of polling afterwards.
const PAUSE: Duration = Duration::from_micros(100);
/// Interval of checking the other ranks.
const LOOK: Duration = Duration::from_millis(250);
/// Time after which a waiting rank shows its call to the others, at first; then twice as long each time.
const SHOW: Duration = Duration::from_secs(1);
/// Time for the control to find a lost rank that NCCL may have noticed first.
const GRACE: Duration = Duration::from_secs(2);
/// Interval of asking the control for it.
const ASK: Duration = Duration::from_millis(10);
/// Time that a finished rank waits for the others.
const FAREWELL: Duration = Duration::from_secs(1);
/// Time that it waits before for its operations in streams: a rank that fails may be all that they need.
const SETTLE: Duration = Duration::from_secs(5);

/// One rank's end of a group. Its state is shared with a thread that looks after operations in streams.
pub(super) struct Nccl {
    state: Arc<Mutex<State>>,
    rank: usize,
    size: usize,
    ordinal: usize,
    is_one_process: bool,
    /// Wakes the thread; it ends with this.
    watch: SyncSender<()>,
}

struct State {
    // Before the staging, whose memory it uses: fields are dropped in this order. `None` after a
    // failure.
    communicator: Option<Communicator>,
    in_flight: InFlight,
    staging: Staging,
    /// Engine for everything but numbers: the comparison of calls, messages, failures.
    control: Box<dyn Engine>,
    libraries: Libraries,
    gpu: Gpu,
    deadline: Duration,
    /// Number of calls that the control has noted since it last compared them.
    num_noted: u64,
    /// Calls that are going to be one operation.
    together: Option<Vec<Queued>>,
    /// Time of waiting after which the oldest operation in flight is shown to the other ranks.
    shows_after: Duration,
    /// Ranks of this group as ranks of the first one.
    members: Arc<[usize]>,
    /// Whether an operation of this group in a stream has failed.
    has_failed: bool,
    failure: SharedFailure,
}

/// A call in parts or not, on numbers in GPU memory.
struct Queued {
    call: Call,
    place: Place,
    counts: Vec<usize>,
}

/// The first failure of an operation in a stream, in ranks of the first group. All groups of a rank that
/// were divided from one share it: what they computed since may depend on that operation.
type SharedFailure = Arc<Mutex<Option<CommError>>>;

impl Nccl {
    /// Meets the other ranks on GPUs, each by its number on its machine or on its only visible one.
    pub(super) fn meet(
        mut control: Box<dyn Engine>,
        libraries: &Libraries,
        ordinal: Option<usize>,
        deadline: Duration,
    ) -> Result<Self> {
        let local = local_rank(&mut *control)?;
        let ordinal = libraries.0.num_devices().and_then(|devices| match (ordinal, devices) {
            (Some(ordinal), _) => Ok(ordinal),
            (None, 1) => Ok(0),
            _ if local < devices => Ok(local),
            _ => Err(format!(
                "rank {} is number {local} of its machine, counted from 0, but there are {devices} GPUs: start as many ranks as \
                 there are GPUs",
                control.rank()
            )),
        });
        match ordinal {
            Ok(ordinal) => Self::on(control, libraries, ordinal, deadline),
            Err(reason) => Err(refuse(&mut *control, reason)),
        }
    }

    /// Meets the other ranks on this GPU.
    fn on(
        mut control: Box<dyn Engine>,
        libraries: &Libraries,
        ordinal: usize,
        deadline: Duration,
    ) -> Result<Self> {
        let (rank, size) = (control.rank(), control.size());
        let begun = Gpu::open(&libraries.0, ordinal).and_then(|gpu| {
            let id = if rank == 0 { unique_id(&libraries.0)? } else { UniqueId([0; 128]) };
            Ok((Staging::new(&gpu)?, gpu, id))
        });
        let (staging, gpu, mut id) = begun.map_err(|reason| refuse(&mut *control, reason))?;
        let call = Call::whole(Operation::Broadcast { root: 0 }, ElementKind::U8, id.0.len());
        control.broadcast(call, 0, &mut id.0)?;
        let communicator = Communicator::begin(&gpu, id, rank, size)
            .map_err(|reason| refuse(&mut *control, format!("GPU {ordinal}: {reason}")))?;
        let mut state = State {
            communicator: Some(communicator),
            in_flight: InFlight::new(&gpu),
            staging,
            control,
            libraries: libraries.clone(),
            gpu,
            deadline,
            num_noted: 0,
            together: None,
            shows_after: SHOW,
            members: (0..size).collect(),
            has_failed: false,
            failure: SharedFailure::default(),
        };
        state.await_ready(&"meeting of the GPUs")?;
        Self::watched(state)
    }

    /// Starts the thread that looks after operations in streams.
    fn watched(mut state: State) -> Result<Self> {
        let (rank, size) = (state.control.rank(), state.control.size());
        let (ordinal, is_one_process) = (state.gpu.ordinal, state.control.is_one_process());
        let (watch, woken) = sync_channel::<()>(1);
        let mut failed = None;
        let state = Arc::new_cyclic(|this: &Weak<Mutex<State>>| {
            let this = this.clone();
            let look = move || {
                // Sleeps while nothing is in a stream.
                while woken.recv().is_ok() {
                    loop {
                        std::thread::sleep(LOOK);
                        if woken.try_recv() == Err(TryRecvError::Disconnected) {
                            return;
                        }
                        let Some(state) = this.upgrade() else { return };
                        if !lock(&state).look_after() {
                            break;
                        }
                    }
                }
            };
            let spawned = std::thread::Builder::new().name(format!("rank {rank} NCCL")).spawn(look);
            if let Err(error) = spawned {
                failed = Some(refuse(&mut *state.control, format!("starting a thread for NCCL: {error}")));
            }
            Mutex::new(state)
        });
        let this = Self { state, rank, size, ordinal, is_one_process, watch };
        failed.map_or(Ok(this), Err)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Divides the group over a divided control.
    fn divided(
        &mut self,
        call: Call,
        color: usize,
        control: Result<Box<dyn Engine>>,
    ) -> Result<Box<dyn Engine>> {
        let mut state = self.lock();
        let control = control.inspect_err(|_| state.give_up())?;
        match state.child(call, color, control).and_then(Self::watched) {
            Ok(child) => Ok(Box::new(child)),
            Err(error) => {
                let error = give_up(&mut *state.control, format!("{call}: {error}"));
                state.give_up();
                Err(error)
            }
        }
    }
}

impl State {
    /// Begins a call. The control compares it now or soon.
    fn begin(&mut self, call: Call) -> Result<()> {
        self.check_streams()?;
        self.num_noted += 1;
        if self.num_noted >= COMPARED_CALLS {
            return self.barrier(call);
        }
        self.control.note(call).inspect_err(|_| self.give_up())
    }

    fn barrier(&mut self, call: Call) -> Result<()> {
        self.num_noted = 0;
        self.control.barrier(call).inspect_err(|_| self.give_up())
    }

    /// Fails if an operation in a stream has failed, of this group or another one of the rank.
    fn check_streams(&mut self) -> Result<()> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(failure) = failure else { return Ok(()) };
        if self.has_failed {
            self.control.check()?;
        }
        // Another group of this rank failed: the ranks that wait in this one are told.
        self.control.abort(&failure.to_string());
        self.give_up();
        Err(failure)
    }

    /// Runs a collective: does `work` unless there are no numbers.
    fn collective(
        &mut self,
        call: Call,
        data: &mut [u8],
        work: impl FnOnce(&mut Self, Place, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.begin(call)?;
        if data.is_empty() {
            return Ok(());
        }
        let start = self.gpu.enter().and_then(|()| self.staging.room(data.len()));
        let start = start.map_err(|reason| self.fail(&call, &reason))?;
        let place = Place { start, stream: self.staging.stream() };
        work(self, place, data)
    }

    /// Puts a call on GPU memory into its stream, or keeps it for one operation with others.
    fn put(&mut self, call: Call, range: StreamRange, counts: &[usize]) -> Result<()> {
        if matches!(call.operation, Operation::Send { .. } | Operation::Recv { .. }) {
            // Ranks make different calls.
            self.check_streams()?;
            self.check()?;
        } else {
            self.begin(call)?;
        }
        if call.len == 0 {
            return Ok(());
        }
        let place = Place { start: range.address, stream: range.stream as RawStream };
        let queued = Queued { call, place, counts: counts.to_vec() };
        match &mut self.together {
            Some(together) => {
                together.push(queued);
                Ok(())
            }
            None => self.enqueue(&[queued]),
        }
    }

    /// Puts calls into their stream as one operation. Returns when it is there: nobody waits for the GPU.
    fn enqueue(&mut self, calls: &[Queued]) -> Result<()> {
        let Some(Queued { call, place: Place { stream, .. }, .. }) = calls.first() else { return Ok(()) };
        let (call, stream) = (*call, *stream);
        let begun = self.gpu.enter().and_then(|()| {
            // Events of what is done meanwhile are used again.
            self.in_flight.oldest()?;
            let before = self.in_flight.mark(stream)?;
            let nccl = self.communicator();
            match calls {
                [Queued { call, place, counts }] => nccl.start(call, *place, counts)?,
                calls => nccl.start_all(calls.iter().map(|one| (&one.call, one.place, &one.counts[..])))?,
            }
            Ok(before)
        });
        let before = begun.map_err(|reason| self.fail(&call, &reason))?;
        self.wait(&call, |this| this.communicator().is_ready())?;
        let after = self.in_flight.mark(stream).map_err(|reason| self.fail(&call, &reason))?;
        self.in_flight.push(call, before, after);
        Ok(())
    }

    /// Looks after operations in streams; returns whether there are any.
    fn look_after(&mut self) -> bool {
        if self.communicator.is_none() {
            return false;
        }
        let oldest = self.gpu.enter().and_then(|()| self.in_flight.oldest());
        let outcome = match oldest {
            Ok(None) => {
                self.shows_after = SHOW;
                self.control.end_noted();
                return false;
            }
            // What is new has not been shown.
            Ok(Some((call, waited))) => {
                if waited < LOOK {
                    self.shows_after = SHOW;
                }
                match self.communicator().is_ready() {
                    Ok(_) => {
                        let mut shows_after = self.shows_after.min(self.deadline / 4);
                        let seen = self.check_others(&call, waited, &mut shows_after);
                        self.shows_after = shows_after;
                        seen
                    }
                    Err(reason) => Err(self.fail(&call, &reason)),
                }
            }
            Err(reason) => Err(self.fail(&"work of a GPU", &reason)),
        };
        let Err(error) = outcome else { return true };
        self.note_failure(error);
        false
    }

    /// Keeps a failure for the next call of any group: whoever waits for the stream meanwhile finds it
    /// empty, and numbers that are not the result.
    fn note_failure(&mut self, error: CommError) {
        self.has_failed = true;
        let error = in_parent(error, &self.members);
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    /// Starts an operation and waits until it is done.
    fn operate(
        &mut self,
        call: Call,
        operation: impl FnOnce(&Self, &Communicator) -> std::result::Result<(), String>,
    ) -> Result<()> {
        operation(self, self.communicator()).map_err(|reason| self.fail(&call, &reason))?;
        self.await_ready(&call)
    }

    /// Waits until NCCL and the engine's own stream are idle.
    fn await_ready(&mut self, what: &dyn Display) -> Result<()> {
        // In this order: a stream is also idle before an operation is in it.
        self.wait(what, |this| Ok(this.communicator().is_ready()? && this.staging.is_idle()?))
    }

    /// Waits until `is_done`, at most the deadline and while the other ranks live.
    fn wait(
        &mut self,
        what: &dyn Display,
        is_done: impl Fn(&mut Self) -> std::result::Result<bool, String>,
    ) -> Result<()> {
        let began = Instant::now();
        let (mut looked, mut shows_after) = (began, SHOW.min(self.deadline / 4));
        loop {
            match is_done(self) {
                Ok(true) => break,
                Ok(false) => {}
                Err(reason) => return Err(self.fail(what, &reason)),
            }
            let now = Instant::now();
            let waited = now - began;
            if now - looked >= LOOK || waited >= self.deadline {
                looked = now;
                self.check_others(what, waited, &mut shows_after)?;
            }
            if waited < BUSY { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
        }
        self.control.end_noted();
        Ok(())
    }

    /// Fails if another rank has failed or makes another call, or at the deadline.
    fn check_others(
        &mut self,
        what: &dyn Display,
        waited: Duration,
        shows_after: &mut Duration,
    ) -> Result<()> {
        self.check()?;
        if waited >= *shows_after {
            *shows_after = 2 * waited;
            self.control.look_around(what).inspect_err(|_| self.give_up())?;
        }
        if waited < self.deadline {
            return Ok(());
        }
        self.control.at_deadline(what).inspect_err(|_| self.give_up())?;
        let reason = format!(
            "NCCL did not finish within {} s, and no rank is known to be missing: a GPU or the network between them hangs, or is \
             slower than the deadline allows",
            self.deadline.as_secs_f64()
        );
        Err(self.fail(what, &reason))
    }

    fn check(&mut self) -> Result<()> {
        self.control.check().inspect_err(|_| self.give_up())
    }

    fn communicator(&self) -> &Communicator {
        self.communicator.as_ref().expect("the control fails where NCCL has been given up")
    }

    /// Fails the group, here and through the control for all. If NCCL failed because a rank is
    /// gone or made another call, all ranks report that.
    fn fail(&mut self, what: &dyn Display, reason: &str) -> CommError {
        let until = Instant::now() + GRACE.min(self.deadline);
        let error = loop {
            match self.control.look_around(what) {
                Err(known) => break known,
                Ok(()) if Instant::now() < until => std::thread::sleep(ASK),
                Ok(()) => break give_up(&mut *self.control, format!("{what}: {reason}")),
            }
        };
        self.give_up();
        error
    }

    /// Aborts NCCL's operations. The control has failed already: ranks that find NCCL aborted look
    /// there.
    fn give_up(&mut self) {
        if self.communicator.is_none() {
            return;
        }
        // Before a stream goes on without the operation.
        if let Err(error) = self.control.check()
            && self.in_flight.oldest().is_ok_and(|oldest| oldest.is_some())
        {
            self.note_failure(error);
        }
        self.staging.give_up();
        self.communicator = None;
        self.in_flight.clear();
        self.together = None;
    }

    /// Creates this rank's part of a divided group.
    fn child(&mut self, call: Call, color: usize, mut control: Box<dyn Engine>) -> Result<Self> {
        let members = self.members_of(&mut *control)?;
        // NCCL divides a communicator in which nothing is under way.
        self.wait(&call, |this| Ok(this.in_flight.oldest()?.is_none()))?;
        let begun = i32::try_from(color).map_err(|_| format!("NCCL has no colour {color}"));
        let begun = begun.and_then(|color| {
            self.gpu.enter()?;
            Ok((Staging::new(&self.gpu)?, self.communicator().divide(color)?))
        });
        let (staging, division) = begun.map_err(|reason| self.fail(&call, &reason))?;
        self.await_ready(&call)?;
        let divided = self.communicator().divided(division, control.rank());
        let communicator = divided.map_err(|reason| self.fail(&call, &reason))?;
        let mut child = Self {
            communicator: Some(communicator),
            in_flight: InFlight::new(&self.gpu),
            staging,
            control,
            libraries: self.libraries.clone(),
            gpu: self.gpu.clone(),
            deadline: self.deadline,
            num_noted: 0,
            together: None,
            shows_after: SHOW,
            members,
            has_failed: false,
            failure: self.failure.clone(),
        };
        child.await_ready(&call)?;
        Ok(child)
    }

    /// Returns the members of a part of this group as ranks of the first one.
    fn members_of(&self, control: &mut dyn Engine) -> Result<Arc<[usize]>> {
        const EACH: usize = size_of::<u64>();
        let (rank, counts) = (control.rank(), vec![EACH; control.size()]);
        let mut members = vec![0; EACH * counts.len()];
        let own = self.members[self.control.rank()] as u64;
        members[EACH * rank..][..EACH].copy_from_slice(&own.to_le_bytes());
        control.all_gather(
            Call::parted(Operation::AllGather, ElementKind::U8, &counts),
            &mut members,
            &counts,
        )?;
        Ok(members.as_chunks().0.iter().map(|rank| u64::from_le_bytes(*rank) as usize).collect())
    }

    /// Ends the communicator together with the other ranks; returns whether they did, too.
    fn farewell(&mut self) -> std::result::Result<bool, String> {
        if self.communicator.is_none() {
            return Ok(false);
        }
        self.gpu.enter()?;
        let began = Instant::now();
        while self.in_flight.oldest()?.is_some() {
            if began.elapsed() >= SETTLE || self.control.check().is_err() {
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
        self.communicator().finalize()?;
        let began = Instant::now();
        while !self.communicator().is_ready()? {
            if began.elapsed() >= FAREWELL {
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
        if let Some(communicator) = self.communicator.take() {
            communicator.destroy();
        }
        Ok(true)
    }

    /// Copies the result back. The stream is idle.
    fn download(&mut self, call: Call, data: &mut [u8], bytes: Range<usize>) -> Result<()> {
        self.staging.download(data, bytes).map_err(|reason| self.fail(&call, &reason))
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of ranks before this one on its machine.
fn local_rank(control: &mut dyn Engine) -> Result<usize> {
    let (rank, counts) = (control.rank(), vec![8; control.size()]);
    let mut hosts = vec![0; 8 * control.size()];
    let system = rustix::system::uname();
    let host = fnv1a(system.nodename().to_bytes().iter().map(|&byte| u64::from(byte)));
    hosts[8 * rank..8 * rank + 8].copy_from_slice(&host.to_le_bytes());
    let call = Call::parted(Operation::AllGather, ElementKind::U8, &counts);
    control.all_gather(call, &mut hosts, &counts)?;
    Ok(hosts.chunks_exact(8).take(rank).filter(|other| **other == host.to_le_bytes()).count())
}

/// Fails the group for all ranks and returns their common error.
fn give_up(control: &mut dyn Engine, reason: String) -> CommError {
    control.abort(&reason);
    control.check().err().unwrap_or(CommError::Aborted { rank: control.rank(), reason })
}

/// Refuses a group for all ranks; the cause is this rank's machine.
fn refuse(control: &mut dyn Engine, reason: String) -> CommError {
    control.abort(&reason);
    CommError::Engine { reason }
}

impl Engine for Nccl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn is_one_process(&self) -> bool {
        self.is_one_process
    }

    fn all_reduce(&mut self, call: Call, data: &mut [u8]) -> Result<()> {
        self.lock().collective(call, data, |this, place, data| {
            this.operate(call, |this, nccl| {
                this.staging.upload(data, 0..data.len())?;
                nccl.start(&call, place, &[])
            })?;
            this.download(call, data, 0..data.len())
        })
    }

    fn reduce_scatter(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let mine = call.places(counts).nth(self.rank).expect("a part for each rank");
        self.lock().collective(call, data, |this, place, data| {
            this.operate(call, |this, nccl| {
                this.staging.upload(data, 0..data.len())?;
                nccl.start(&call, place, counts)
            })?;
            this.download(call, data, mine)
        })
    }

    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let mine = call.places(counts).nth(self.rank).expect("a part for each rank");
        self.lock().collective(call, data, |this, place, data| {
            this.operate(call, |this, nccl| {
                this.staging.upload(data, mine.clone())?;
                nccl.start(&call, place, counts)
            })?;
            this.download(call, data, 0..mine.start)?;
            this.download(call, data, mine.end..data.len())
        })
    }

    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()> {
        let is_root = root == self.rank;
        self.lock().collective(call, data, |this, place, data| {
            this.operate(call, |this, nccl| {
                this.staging.upload(data, if is_root { 0..data.len() } else { 0..0 })?;
                nccl.start(&call, place, &[])
            })?;
            this.download(call, data, if is_root { 0..0 } else { 0..data.len() })
        })
    }

    fn barrier(&mut self, call: Call) -> Result<()> {
        let mut state = self.lock();
        state.check_streams()?;
        state.barrier(call)
    }

    /// Messages of host memory use the control, which does not wait for the receiver.
    fn send(&mut self, to: usize, data: &[u8]) -> Result<()> {
        let mut state = self.lock();
        state.check_streams()?;
        state.control.send(to, data).inspect_err(|_| state.give_up())
    }

    fn recv(&mut self, from: usize, data: &mut [u8]) -> Result<()> {
        let mut state = self.lock();
        state.check_streams()?;
        state.control.recv(from, data).inspect_err(|_| state.give_up())
    }

    fn split(&mut self, call: Call, color: usize) -> Result<Box<dyn Engine>> {
        let control = self.lock().control.split(call, color);
        self.divided(call, color, control)
    }

    fn split_by(&mut self, call: Call, colors: &[usize]) -> Result<Box<dyn Engine>> {
        let control = self.lock().control.split_by(call, colors);
        self.divided(call, colors[self.rank], control)
    }

    fn abort(&mut self, reason: &str) {
        let mut state = self.lock();
        state.control.abort(reason);
        state.give_up();
    }

    fn check(&mut self) -> Result<()> {
        let mut state = self.lock();
        state.check_streams()?;
        state.check()
    }

    fn takes_device(&self, ordinal: usize) -> bool {
        ordinal == self.ordinal
    }

    fn put(&mut self, call: Call, range: StreamRange, counts: &[usize]) -> Result<()> {
        self.lock().put(call, range, counts)?;
        // A full channel wakes the thread as well.
        let _ = self.watch.try_send(());
        Ok(())
    }

    fn begin_together(&mut self) {
        self.lock().together = Some(Vec::new());
    }

    fn end_together(&mut self) -> Result<()> {
        let mut state = self.lock();
        let Some(calls) = state.together.take() else { return Ok(()) };
        state.enqueue(&calls)?;
        drop(state);
        let _ = self.watch.try_send(());
        Ok(())
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let mut state = self.lock();
        // A rank that panics, or of which another group failed, does not wait for the others.
        let has_failed = state.failure.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let ended = if std::thread::panicking() || has_failed { Ok(false) } else { state.farewell() };
        // On an error the others continue without this rank; they are told at their next call.
        if ended != Ok(true) {
            state.give_up();
        }
    }
}
