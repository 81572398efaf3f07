//! The ranks that work together, as one of them sees them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::collective::call::{Call, Operation};
use crate::collective::element::{Element, ElementKind, Memory, Numbers, Reduction};
use crate::collective::engine::Engine;
use crate::collective::observer::Watch;
use crate::collective::volume::Volume;
use crate::error::{CommError, Result};
use crate::health::progress::Progress;

/// What of a buffer a collective reads and writes.
enum Parts {
    All,
    /// Reads all, writes this range of bytes.
    Scatter(Range<usize>),
    /// Reads this range of bytes, writes all.
    Gather(Range<usize>),
}

/// Where an engine finds the numbers.
enum Data<'a> {
    Host(&'a mut [u8]),
    Device(u64),
}

/// One rank's membership of a group. All members make the same calls in the same order.
///
/// *Parts*: where a buffer is divided over the ranks, rank `r` owns `counts[r]` elements, one rank's after another's. A
/// count may be 0.
pub struct Group {
    engine: Box<dyn Engine>,
    volume: Volume,
    progress: Progress,
    watch: Option<Arc<dyn Watch>>,
    /// Host memory that a device's numbers go through.
    bounce: Vec<u64>,
}

impl Group {
    /// A group on an engine.
    pub fn new(engine: Box<dyn Engine>) -> Self {
        let (volume, progress) = (Volume::default(), Progress::default());
        Self { engine, volume, progress, watch: None, bounce: Vec::new() }
    }

    /// The same group, carried by an engine made of its own.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn carried_by(
        self,
        make: impl FnOnce(Box<dyn Engine>) -> Result<Box<dyn Engine>>,
    ) -> Result<Self> {
        let Self { engine, volume, progress, watch, bounce } = self;
        Ok(Self { engine: make(engine)?, volume, progress, watch, bounce })
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.engine.size()
    }

    /// What this rank has sent and received so far.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    /// How far this rank has come; it says so, and others may look. The groups that this one divides into share it.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Tells `watch` of this group's calls from now on, and of those of groups that it divides into.
    pub fn watched_by(&mut self, watch: Arc<dyn Watch>) {
        self.watch = Some(watch);
    }

    /// Every rank's `data` becomes the reduction of all of them, the same bits everywhere.
    ///
    /// # Errors
    /// If a rank failed, hangs, or called something else.
    pub fn all_reduce<T: Element>(&mut self, data: &mut [T], reduction: Reduction) -> Result<()> {
        self.all_reduce_numbers(data.into(), reduction)
    }

    /// [`Group::all_reduce`], also in a dry run.
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce_numbers(&mut self, numbers: Numbers, reduction: Reduction) -> Result<()> {
        let call = Call::whole(Operation::AllReduce(reduction), numbers.kind, numbers.len);
        self.make_on(call, numbers.memory, Parts::All, |engine, data| match data {
            Data::Host(bytes) => engine.all_reduce(call, reduction, bytes),
            Data::Device(address) => engine.on_device().all_reduce(call, reduction, address),
        })
    }

    /// This rank's part of `data` becomes the reduction of all ranks' buffers there; the rest is unspecified afterwards.
    ///
    /// # Errors
    /// If the length does not fit `counts`; if a rank failed, hangs, or called something else.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        data: &mut [T],
        counts: &[usize],
        reduction: Reduction,
    ) -> Result<()> {
        self.reduce_scatter_numbers(data.into(), counts, reduction)
    }

    /// [`Group::reduce_scatter`], also in a dry run.
    ///
    /// # Errors
    /// As there.
    pub fn reduce_scatter_numbers(
        &mut self,
        numbers: Numbers,
        counts: &[usize],
        reduction: Reduction,
    ) -> Result<()> {
        let call = Call::parted(Operation::ReduceScatter(reduction), numbers.kind, counts);
        self.check_parts(&call, counts, numbers.len)?;
        let parts = Parts::Scatter(self.own(&call, counts));
        self.make_on(call, numbers.memory, parts, |engine, data| match data {
            Data::Host(bytes) => engine.reduce_scatter(call, reduction, bytes, counts),
            Data::Device(address) => engine.on_device().reduce_scatter(call, reduction, address, counts),
        })
    }

    /// Every rank's part of `data` becomes what its owner has there.
    ///
    /// # Errors
    /// As [`Group::reduce_scatter`].
    pub fn all_gather<T: Element>(&mut self, data: &mut [T], counts: &[usize]) -> Result<()> {
        self.all_gather_numbers(data.into(), counts)
    }

    /// [`Group::all_gather`], also in a dry run.
    ///
    /// # Errors
    /// As there.
    pub fn all_gather_numbers(&mut self, numbers: Numbers, counts: &[usize]) -> Result<()> {
        let call = Call::parted(Operation::AllGather, numbers.kind, counts);
        self.check_parts(&call, counts, numbers.len)?;
        let parts = Parts::Gather(self.own(&call, counts));
        self.make_on(call, numbers.memory, parts, |engine, data| match data {
            Data::Host(bytes) => engine.all_gather(call, bytes, counts),
            Data::Device(address) => engine.on_device().all_gather(call, address, counts),
        })
    }

    /// What all ranks have, one's after another's; `counts` says how many each has.
    ///
    /// # Errors
    /// As [`Group::reduce_scatter`].
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

    /// Every rank's `data` becomes `root`'s.
    ///
    /// # Errors
    /// If there is no such rank; if a rank failed, hangs, or called something else.
    pub fn broadcast<T: Element>(&mut self, data: &mut [T], root: usize) -> Result<()> {
        let call = Call::whole(Operation::Broadcast { root }, T::KIND, data.len());
        self.check_rank(&call, root)?;
        self.make(call, |engine| engine.broadcast(call, root, bytemuck::cast_slice_mut(data)))
    }

    /// Waits until all ranks have come here.
    ///
    /// # Errors
    /// If a rank failed, hangs, or called something else.
    pub fn barrier(&mut self) -> Result<()> {
        let call = Call::whole(Operation::Barrier, ElementKind::U8, 0);
        self.make(call, |engine| engine.barrier(call))
    }

    /// Sends to one rank, which must receive as many elements; messages between two ranks keep their order. A message does not
    /// wait for its receiver; but where 64 of them, or with it more than 64 MiB, are under way from this rank, it waits for the
    /// oldest to be received.
    ///
    /// # Errors
    /// If there is no such rank, or it failed.
    pub fn send<T: Element>(&mut self, to: usize, data: &[T]) -> Result<()> {
        self.check_peer("send", to)?;
        let call = Call::whole(Operation::Send { to }, T::KIND, data.len());
        self.make(call, |engine| engine.send(to, bytemuck::cast_slice(data)))
    }

    /// [`Group::send`] in a dry run.
    ///
    /// # Errors
    /// If there is no such rank.
    pub fn dry_send(&mut self, to: usize, kind: ElementKind, len: usize) -> Result<()> {
        self.check_peer("send", to)?;
        let call = Call::whole(Operation::Send { to }, kind, len);
        self.make(call, |engine| engine.dry(call))
    }

    /// [`Group::recv`] in a dry run.
    ///
    /// # Errors
    /// If there is no such rank.
    pub fn dry_recv(&mut self, from: usize, kind: ElementKind, len: usize) -> Result<()> {
        self.check_peer("recv", from)?;
        self.engine.dry(Call::whole(Operation::Recv { from }, kind, len))
    }

    /// Receives from one rank.
    ///
    /// # Errors
    /// If there is no such rank, it failed or hangs, or sent another number of elements.
    pub fn recv<T: Element>(&mut self, from: usize, data: &mut [T]) -> Result<()> {
        self.check_peer("recv", from)?;
        let call = Call::whole(Operation::Recv { from }, T::KIND, data.len());
        self.make(call, |engine| engine.recv(from, bytemuck::cast_slice_mut(data)))
    }

    /// Divides the group: the ranks that give the same colour form a new one, in the order of their ranks.
    ///
    /// # Errors
    /// If a rank failed, hangs, or called something else.
    pub fn split(&mut self, color: usize) -> Result<Self> {
        let call = Call::whole(Operation::Split, ElementKind::U8, 0);
        let engine = self.engine.split(call, color)?;
        Ok(self.part(engine))
    }

    /// As [`Group::split`], by a rule that tells every rank's colour: so that a group of which one rank exists can divide too.
    ///
    /// # Errors
    /// As [`Group::split`].
    pub fn split_by(&mut self, color: impl Fn(usize) -> usize) -> Result<Self> {
        let call = Call::whole(Operation::Split, ElementKind::U8, 0);
        let colors: Vec<usize> = (0..self.size()).map(color).collect();
        let engine = self.engine.split_by(call, &colors)?;
        Ok(self.part(engine))
    }

    fn part(&self, engine: Box<dyn Engine>) -> Self {
        Self { progress: self.progress.clone(), watch: self.watch.clone(), ..Self::new(engine) }
    }

    /// Counts a call, makes it, and tells who watches.
    fn make(&mut self, call: Call, made: impl FnOnce(&mut dyn Engine) -> Result<()>) -> Result<()> {
        self.volume.count(&call, self.engine.size());
        let Some(watch) = &self.watch else { return made(&mut *self.engine) };
        let began = Instant::now();
        let outcome = made(&mut *self.engine);
        watch.called(&call, self.engine.size(), began);
        outcome
    }

    /// This rank's part of a buffer, in bytes.
    fn own(&self, call: &Call, counts: &[usize]) -> Range<usize> {
        call.places(counts).nth(self.rank()).expect("a part for each rank")
    }

    /// [`Group::make`], with numbers wherever they are. Those of a device go through host memory if the engine does not take them
    /// there.
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
                    numbers.settle().map_err(failed)?;
                    return self.make(call, |engine| made(engine, Data::Device(address)));
                }
                let len = call.len * call.kind.size();
                let mut words = std::mem::take(&mut self.bounce);
                words.resize(words.len().max(len.div_ceil(8)), 0);
                let bytes = &mut bytemuck::cast_slice_mut(&mut words)[..len];
                let (read, written) = match parts {
                    Parts::All => (0..len, 0..len),
                    Parts::Scatter(own) => (0..len, own),
                    Parts::Gather(own) => (own, 0..len),
                };
                numbers.read(read.clone(), &mut bytes[read]).map_err(failed)?;
                self.make(call, |engine| made(engine, Data::Host(&mut *bytes)))?;
                numbers.write(written.clone(), &bytes[written]).map_err(failed)?;
                self.bounce = words;
                Ok(())
            }
        }
    }

    /// Gives up: the other ranks' calls fail and tell the reason.
    pub fn abort(&mut self, reason: &str) {
        self.engine.abort(reason);
    }

    fn check_parts(&self, call: &Call, counts: &[usize], len: usize) -> Result<()> {
        let size = self.size();
        let reason = if counts.len() != size {
            format!("{} parts for {size} ranks", counts.len())
        } else if call.len != len {
            format!("parts of {} elements in all, in a buffer of {len}", call.len)
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
