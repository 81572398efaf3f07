//! NCCL engine: NCCL does the work, and another engine compares the calls.

use std::fmt::Display;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::communicator::{Communicator, Place, unique_id};
use super::libraries::Libraries;
use super::raw::UniqueId;
use super::staging::Staging;
use crate::collective::call::{Call, Operation, fnv1a};
use crate::collective::call_chain::COMPARED_CALLS;
use crate::collective::element::ElementKind;
use crate::collective::engine::{DeviceEngine, Engine};
use crate::error::{CommError, Result};

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

pub(super) struct Nccl {
    // Before the staging, whose memory it uses: fields are dropped in this order. `None` after a
    // failure.
    communicator: Option<Communicator>,
    staging: Staging,
    /// Engine for everything but numbers: the comparison of calls, messages, failures.
    control: Box<dyn Engine>,
    libraries: Libraries,
    ordinal: usize,
    deadline: Duration,
    /// Number of calls that the control has noted since it last compared them.
    num_noted: u64,
}

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
        let begun = Staging::on(&libraries.0, ordinal).and_then(|staging| {
            let id = if rank == 0 { unique_id(&libraries.0)? } else { UniqueId([0; 128]) };
            Ok((staging, id))
        });
        let (staging, mut id) = begun.map_err(|reason| refuse(&mut *control, reason))?;
        let call = Call::whole(Operation::Broadcast { root: 0 }, ElementKind::U8, id.0.len());
        control.broadcast(call, 0, &mut id.0)?;
        let communicator = Communicator::begin(&libraries.0, id, rank, size)
            .map_err(|reason| refuse(&mut *control, format!("GPU {ordinal}: {reason}")))?;
        let libraries = libraries.clone();
        let mut this = Self {
            communicator: Some(communicator),
            staging,
            control,
            libraries,
            ordinal,
            deadline,
            num_noted: 0,
        };
        this.await_ready(&"meeting of the GPUs")?;
        Ok(this)
    }

    /// Begins a call. The control compares it now or soon.
    fn begin(&mut self, call: Call) -> Result<()> {
        self.num_noted += 1;
        if self.num_noted >= COMPARED_CALLS {
            return self.barrier(call);
        }
        self.control.note(call).inspect_err(|_| self.give_up())
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
        let start = self.staging.enter().and_then(|()| self.staging.room(data.len()));
        let start = start.map_err(|reason| self.fail(&call, &reason))?;
        let place = Place { start, kind: call.kind, stream: self.staging.stream() };
        work(self, place, data)
    }

    /// Runs a collective on GPU memory: waits until it is done.
    fn on_numbers(
        &mut self,
        call: Call,
        start: u64,
        operation: impl FnOnce(&Communicator, Place) -> std::result::Result<(), String>,
    ) -> Result<()> {
        self.begin(call)?;
        if call.len == 0 {
            return Ok(());
        }
        self.staging.enter().map_err(|reason| self.fail(&call, &reason))?;
        let place = Place { start, kind: call.kind, stream: self.staging.stream() };
        self.operate(call, |_, nccl| operation(nccl, place))
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

    /// Waits until NCCL and the stream are idle, at most the deadline and while the other ranks
    /// live.
    fn await_ready(&mut self, what: &dyn Display) -> Result<()> {
        let began = Instant::now();
        let (mut looked, mut shows_after) = (began, SHOW.min(self.deadline / 4));
        loop {
            match self.is_done() {
                Ok(true) => break,
                Ok(false) => {}
                Err(reason) => return Err(self.fail(what, &reason)),
            }
            let now = Instant::now();
            let waited = now - began;
            if now - looked >= LOOK {
                looked = now;
                self.check()?;
            }
            if waited >= shows_after {
                shows_after = 2 * waited;
                self.control.look_around(what).inspect_err(|_| self.give_up())?;
            }
            if waited >= self.deadline {
                self.control.at_deadline(what).inspect_err(|_| self.give_up())?;
                let reason = format!(
                    "NCCL did not finish within {} s, and no rank is known to be missing: a GPU or the network between them hangs, or is \
                     slower than the deadline allows",
                    self.deadline.as_secs_f64()
                );
                return Err(self.fail(what, &reason));
            }
            if waited < BUSY { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
        }
        self.control.end_noted();
        Ok(())
    }

    fn is_done(&self) -> std::result::Result<bool, String> {
        // In this order: a stream is also idle before an operation is in it.
        Ok(self.communicator().is_ready()? && self.staging.is_idle()?)
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
        self.staging.give_up();
        self.communicator = None;
    }

    /// Ends the communicator together with the other ranks; returns whether they did, too.
    fn farewell(&mut self) -> std::result::Result<bool, String> {
        let Some(communicator) = &self.communicator else { return Ok(false) };
        self.staging.enter()?;
        communicator.finalize()?;
        let began = Instant::now();
        while !communicator.is_ready()? {
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
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn is_one_process(&self) -> bool {
        self.control.is_one_process()
    }

    fn all_reduce(&mut self, call: Call, data: &mut [u8]) -> Result<()> {
        self.collective(call, data, |this, place, data| {
            this.operate(call, |this, nccl| {
                this.staging.upload(data, 0..data.len())?;
                nccl.all_reduce(place, call.len, call.reduction())
            })?;
            this.download(call, data, 0..data.len())
        })
    }

    fn reduce_scatter(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let mine = call.places(counts).nth(self.rank()).expect("a part for each rank");
        self.collective(call, data, |this, place, data| {
            this.operate(call, |this, nccl| {
                this.staging.upload(data, 0..data.len())?;
                nccl.reduce_scatter(place, counts, call.reduction())
            })?;
            this.download(call, data, mine)
        })
    }

    fn all_gather(&mut self, call: Call, data: &mut [u8], counts: &[usize]) -> Result<()> {
        let mine = call.places(counts).nth(self.rank()).expect("a part for each rank");
        self.collective(call, data, |this, place, data| {
            this.operate(call, |this, nccl| {
                this.staging.upload(data, mine.clone())?;
                nccl.all_gather(place, counts)
            })?;
            this.download(call, data, 0..mine.start)?;
            this.download(call, data, mine.end..data.len())
        })
    }

    fn broadcast(&mut self, call: Call, root: usize, data: &mut [u8]) -> Result<()> {
        let is_root = root == self.rank();
        self.collective(call, data, |this, place, data| {
            this.operate(call, |this, nccl| {
                this.staging.upload(data, if is_root { 0..data.len() } else { 0..0 })?;
                nccl.broadcast(place, call.len, root)
            })?;
            this.download(call, data, if is_root { 0..0 } else { 0..data.len() })
        })
    }

    fn barrier(&mut self, call: Call) -> Result<()> {
        self.num_noted = 0;
        self.control.barrier(call).inspect_err(|_| self.give_up())
    }

    /// NCCL's messages wait for their receiver; the control's do not.
    fn send(&mut self, to: usize, data: &[u8]) -> Result<()> {
        self.control.send(to, data).inspect_err(|_| self.give_up())
    }

    fn recv(&mut self, from: usize, data: &mut [u8]) -> Result<()> {
        self.control.recv(from, data).inspect_err(|_| self.give_up())
    }

    fn split(&mut self, call: Call, color: usize) -> Result<Box<dyn Engine>> {
        let control = self.control.split(call, color).inspect_err(|_| self.give_up())?;
        match Self::on(control, &self.libraries, self.ordinal, self.deadline) {
            Ok(child) => Ok(Box::new(child)),
            Err(error) => {
                let error = give_up(&mut *self.control, format!("{call}: {error}"));
                self.give_up();
                Err(error)
            }
        }
    }

    fn abort(&mut self, reason: &str) {
        self.control.abort(reason);
        self.give_up();
    }

    fn check(&mut self) -> Result<()> {
        self.control.check().inspect_err(|_| self.give_up())
    }

    fn takes_device(&self, ordinal: usize) -> bool {
        ordinal == self.ordinal
    }

    fn on_device(&mut self) -> &mut dyn DeviceEngine {
        self
    }
}

/// Numbers in GPU memory stay there.
impl DeviceEngine for Nccl {
    fn all_reduce(&mut self, call: Call, address: u64) -> Result<()> {
        self.on_numbers(call, address, |nccl, place| nccl.all_reduce(place, call.len, call.reduction()))
    }

    fn reduce_scatter(&mut self, call: Call, address: u64, counts: &[usize]) -> Result<()> {
        self.on_numbers(call, address, |nccl, place| nccl.reduce_scatter(place, counts, call.reduction()))
    }

    fn all_gather(&mut self, call: Call, address: u64, counts: &[usize]) -> Result<()> {
        self.on_numbers(call, address, |nccl, place| nccl.all_gather(place, counts))
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // A rank that panics does not wait for the others.
        let ended = if std::thread::panicking() { Ok(false) } else { self.farewell() };
        // On an error the others continue without this rank; they are told at their next call.
        if ended != Ok(true) {
            self.give_up();
        }
    }
}
