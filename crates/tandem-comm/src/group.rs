//! Process groups, from the view of one rank.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::collective::call::{Call, Operation};
use crate::collective::element::{CollectiveBuffer, Element, ElementKind, Memory, Reduction};
use crate::collective::engine::{Engine, StreamRange};
use crate::collective::observer::CollectiveObserver;
use crate::collective::volume::Volume;
use crate::error::{CommError, Result};
use crate::health::progress::Progress;

/// Bytes of a device's buffer that a collective reads and writes.
enum Parts {
    All,
    /// Reads all bytes, writes this range.
    Scatter(Range<usize>),
    /// Reads this range of bytes, writes all.
    Gather(Range<usize>),
    /// Reads all, writes none.
    Send,
    /// Writes all, reads none.
    Recv,
}

/// Location of the numbers, for an engine.
enum Data<'a> {
    Host(&'a mut [u8]),
    Device(StreamRange),
}

/// One rank's membership of a process group. All members make the same calls in the same order.
///
/// *Parts*: of a buffer divided over the ranks, rank `r` owns `counts[r]` elements, in rank order.
/// A count may be 0.
pub struct ProcessGroup {
    engine: Box<dyn Engine>,
    volume: Volume,
    progress: Progress,
    watch: Option<Arc<dyn CollectiveObserver>>,
    /// Host bounce buffer for device memory.
    bounce: Vec<u64>,
}

impl ProcessGroup {
    /// Creates a group on an engine.
    pub fn new(engine: Box<dyn Engine>) -> Self {
        let (volume, progress) = (Volume::default(), Progress::default());
        Self { engine, volume, progress, watch: None, bounce: Vec::new() }
    }

    /// Replaces the engine by one made from it.
    pub(crate) fn carried_by(
        self,
        make: impl FnOnce(Box<dyn Engine>) -> Result<Box<dyn Engine>>,
    ) -> Result<Self> {
        let Self { engine, volume, progress, watch, bounce } = self;
        Ok(Self { engine: make(engine)?, volume, progress, watch, bounce })
    }

    /// Returns this rank, from 0.
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.engine.size()
    }

    /// Returns whether all ranks are threads of one process.
    pub fn is_one_process(&self) -> bool {
        self.engine.is_one_process()
    }

    /// Returns the bytes that this rank has sent.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Returns this rank's progress, which subgroups share.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Reports this group's and its subgroups' calls to `watch` from now on.
    pub fn watched_by(&mut self, watch: Arc<dyn CollectiveObserver>) {
        self.watch = Some(watch);
    }

    /// Replaces every rank's `data` by the reduction over all ranks, with the same bits everywhere.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], reduction: Reduction) -> Result<()> {
        self.all_reduce_numbers(data.into(), reduction)
    }

    /// [`ProcessGroup::all_reduce`], also for devices and dry runs.
    pub fn all_reduce_numbers(&mut self, numbers: CollectiveBuffer, reduction: Reduction) -> Result<()> {
        let call = Call::whole(Operation::AllReduce(reduction), numbers.kind, numbers.len);
        self.make_on(call, numbers.memory, Parts::All, |engine, data| match data {
            Data::Host(bytes) => engine.all_reduce(call, bytes),
            Data::Device(range) => engine.put(call, range, &[]),
        })
    }

    /// Reduces over all ranks into this rank's part of `data`; the rest is unspecified afterwards.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        data: &mut [T],
        counts: &[usize],
        reduction: Reduction,
    ) -> Result<()> {
        self.reduce_scatter_numbers(data.into(), counts, reduction)
    }

    /// [`ProcessGroup::reduce_scatter`], also for devices and dry runs.
    pub fn reduce_scatter_numbers(
        &mut self,
        numbers: CollectiveBuffer,
        counts: &[usize],
        reduction: Reduction,
    ) -> Result<()> {
        let call = Call::parted(Operation::ReduceScatter(reduction), numbers.kind, counts);
        self.check_parts(&call, counts, numbers.len)?;
        let parts = Parts::Scatter(self.own(&call, counts));
        self.make_on(call, numbers.memory, parts, |engine, data| match data {
            Data::Host(bytes) => engine.reduce_scatter(call, bytes, counts),
            Data::Device(range) => engine.put(call, range, counts),
        })
    }

    /// Replaces every part of `data` by its owner's.
    pub fn all_gather<T: Element>(&mut self, data: &mut [T], counts: &[usize]) -> Result<()> {
        self.all_gather_numbers(data.into(), counts)
    }

    /// [`ProcessGroup::all_gather`], also for devices and dry runs.
    pub fn all_gather_numbers(&mut self, numbers: CollectiveBuffer, counts: &[usize]) -> Result<()> {
        let call = Call::parted(Operation::AllGather, numbers.kind, counts);
        self.check_parts(&call, counts, numbers.len)?;
        let parts = Parts::Gather(self.own(&call, counts));
        self.make_on(call, numbers.memory, parts, |engine, data| match data {
            Data::Host(bytes) => engine.all_gather(call, bytes, counts),
            Data::Device(range) => engine.put(call, range, counts),
        })
    }

    /// Makes calls on device memory, whose order does not matter, as one operation where the engine can. No
    /// result is there before the end.
    pub fn together<T>(&mut self, calls: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.watch.is_some() {
            // An observer measures each.
            return calls(self);
        }
        self.engine.begin_together();
        let made = calls(self);
        let ended = self.engine.end_together();
        made.and_then(|made| ended.map(|()| made))
    }

    /// Returns all ranks' elements in rank order; `counts` has the number of each rank.
    ///
    /// # Panics
    /// If `own` is not as long as this rank's count.
    pub fn gather<T: Element>(&mut self, own: &[T], counts: &[usize]) -> Result<Vec<T>> {
        let mut all = vec![T::zeroed(); counts.iter().sum()];
        let start: usize = counts[..self.rank()].iter().sum();
        all[start..start + counts[self.rank()]].copy_from_slice(own);
        self.all_gather(&mut all, counts)?;
        Ok(all)
    }

    /// Replaces every rank's `data` by `root`'s.
    pub fn broadcast<T: Element>(&mut self, data: &mut [T], root: usize) -> Result<()> {
        let call = Call::whole(Operation::Broadcast { root }, T::KIND, data.len());
        self.check_rank(&call, root)?;
        self.make(call, |engine| engine.broadcast(call, root, bytemuck::cast_slice_mut(data)))
    }

    /// Waits for all ranks.
    pub fn barrier(&mut self) -> Result<()> {
        let call = Call::whole(Operation::Barrier, ElementKind::U8, 0);
        self.make(call, |engine| engine.barrier(call))
    }

    /// Sends to one rank, which must receive as many elements. Messages between two ranks keep
    /// their order.
    ///
    /// Sending blocks only when 64 messages, or more than 64 MiB together with this one, of this
    /// rank are in flight; then it waits for the oldest to be received.
    pub fn send<T: Element>(&mut self, to: usize, data: &[T]) -> Result<()> {
        self.check_peer("send", to)?;
        let call = Call::whole(Operation::Send { to }, T::KIND, data.len());
        self.make(call, |engine| engine.send(to, bytemuck::cast_slice(data)))
    }

    /// [`ProcessGroup::send`], also for devices and dry runs. Where the engine takes memory of the device, the
    /// message waits in the device's stream until it is received.
    pub fn send_numbers(&mut self, to: usize, numbers: CollectiveBuffer) -> Result<()> {
        self.check_peer("send", to)?;
        let call = Call::whole(Operation::Send { to }, numbers.kind, numbers.len);
        self.make_on(call, numbers.memory, Parts::Send, |engine, data| match data {
            Data::Host(bytes) => engine.send(to, bytes),
            Data::Device(range) => engine.put(call, range, &[]),
        })
    }

    /// [`ProcessGroup::recv`], also for devices and dry runs. The sender calls [`ProcessGroup::send_numbers`].
    pub fn recv_numbers(&mut self, from: usize, numbers: CollectiveBuffer) -> Result<()> {
        self.check_peer("recv", from)?;
        let call = Call::whole(Operation::Recv { from }, numbers.kind, numbers.len);
        self.make_on(call, numbers.memory, Parts::Recv, |engine, data| match data {
            Data::Host(bytes) => engine.recv(from, bytes),
            Data::Device(range) => engine.put(call, range, &[]),
        })
    }

    /// [`ProcessGroup::send`] in a dry run.
    pub fn dry_send(&mut self, to: usize, kind: ElementKind, len: usize) -> Result<()> {
        self.check_peer("send", to)?;
        let call = Call::whole(Operation::Send { to }, kind, len);
        self.make(call, |engine| engine.dry(call))
    }

    /// [`ProcessGroup::recv`] in a dry run.
    pub fn dry_recv(&mut self, from: usize, kind: ElementKind, len: usize) -> Result<()> {
        self.check_peer("recv", from)?;
        self.engine.dry(Call::whole(Operation::Recv { from }, kind, len))
    }

    /// Receives from one rank, which must send as many elements.
    pub fn recv<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<()> {
        self.check_peer("recv", from)?;
        let call = Call::whole(Operation::Recv { from }, T::KIND, data.len());
        self.make(call, |engine| engine.recv(from, bytemuck::cast_slice_mut(data)))
    }

    /// Divides the group: ranks of the same colour form a new one, in rank order.
    pub fn split(&mut self, color: usize) -> Result<Self> {
        let call = Call::whole(Operation::Split, ElementKind::U8, 0);
        let engine = self.engine.split(call, color)?;
        Ok(self.part(engine))
    }

    /// [`ProcessGroup::split`] by a function of the rank, which also divides a group of which only one
    /// rank exists.
    pub fn split_by(&mut self, color: impl Fn(usize) -> usize) -> Result<Self> {
        let call = Call::whole(Operation::Split, ElementKind::U8, 0);
        let colors: Vec<usize> = (0..self.size()).map(color).collect();
        let engine = self.engine.split_by(call, &colors)?;
        Ok(self.part(engine))
    }

    fn part(&self, engine: Box<dyn Engine>) -> Self {
        Self { progress: self.progress.clone(), watch: self.watch.clone(), ..Self::new(engine) }
    }

    /// Counts a call, makes it, and reports it to the observer.
    fn make(&mut self, call: Call, made: impl FnOnce(&mut dyn Engine) -> Result<()>) -> Result<()> {
        self.volume.count(&call, self.engine.size());
        let Some(watch) = &self.watch else { return made(&mut *self.engine) };
        let began = Instant::now();
        let outcome = made(&mut *self.engine);
        watch.called(&call, self.engine.size(), began);
        outcome
    }

    /// Returns this rank's part of a buffer, in bytes.
    fn own(&self, call: &Call, counts: &[usize]) -> Range<usize> {
        call.places(counts).nth(self.rank()).expect("a part for each rank")
    }

    /// [`ProcessGroup::make`] for any memory. Device memory goes through the bounce buffer unless the
    /// engine accepts it.
    fn make_on(
        &mut self,
        call: Call,
        memory: Memory,
        parts: Parts,
        made: impl FnOnce(&mut dyn Engine, Data) -> Result<()>,
    ) -> Result<()> {
        let failed = |reason| CommError::Device { call: call.to_string(), reason };
        match memory {
            Memory::Nowhere => self.make(call, |engine| engine.dry(call)),
            Memory::Host(bytes) => self.make(call, |engine| made(engine, Data::Host(bytes))),
            Memory::Device(mut numbers) => {
                let (ordinal, address) = numbers.address();
                if self.engine.takes_device(ordinal) {
                    let range = StreamRange { address, stream: numbers.stream().map_err(failed)? };
                    // An observer measures the call alone; others do not wait for the device.
                    let waits = self.watch.is_some();
                    if waits {
                        numbers.synchronize().map_err(failed)?;
                    }
                    return self.make(call, |engine| {
                        made(engine, Data::Device(range))?;
                        if waits { numbers.synchronize().map_err(failed) } else { Ok(()) }
                    });
                }
                let len = call.len * call.kind.size();
                let mut words = std::mem::take(&mut self.bounce);
                words.resize(words.len().max(len.div_ceil(8)), 0);
                let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..len];
                let (read, written) = match parts {
                    Parts::All => (0..len, 0..len),
                    Parts::Scatter(own) => (0..len, own),
                    Parts::Gather(own) => (own, 0..len),
                    Parts::Send => (0..len, 0..0),
                    Parts::Recv => (0..0, 0..len),
                };
                numbers.read(read.clone(), &mut bytes[read]).map_err(failed)?;
                self.make(call, |engine| made(engine, Data::Host(&mut *bytes)))?;
                numbers.write(written.clone(), &bytes[written]).map_err(failed)?;
                self.bounce = words;
                Ok(())
            }
        }
    }

    /// Aborts: the other ranks' calls fail with the reason.
    pub fn abort(&mut self, reason: &str) {
        self.engine.abort(reason);
    }

    fn check_parts(&self, call: &Call, counts: &[usize], len: usize) -> Result<()> {
        let size = self.size();
        let reason = if counts.len() != size {
            format!("{} parts for {size} ranks", counts.len())
        } else if call.len != len {
            format!("parts of {} elements in total, in a buffer of {len}", call.len)
        } else {
            return Ok(());
        };
        Err(CommError::Invalid { call: call.to_string(), reason })
    }

    fn check_rank(&self, call: &Call, rank: usize) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        let reason = format!("there is no rank {rank} in a group of {}", self.size());
        Err(CommError::Invalid { call: call.to_string(), reason })
    }

    fn check_peer(&self, what: &str, peer: usize) -> Result<()> {
        let reason = if peer >= self.size() {
            format!("there is no rank {peer} in a group of {}", self.size())
        } else if peer == self.rank() {
            "a rank cannot be its own peer".to_owned()
        } else {
            return Ok(());
        };
        Err(CommError::Invalid { call: what.to_owned(), reason })
    }
}
