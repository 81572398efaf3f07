//! CUDA graphs: work that repeats is put into the stream by one call.
//!
//! Between [`Cuda::begin_repeated`] and [`Cuda::end_repeated`] work is not put into the stream but compared
//! with the work of the last time that had the same key. If all of it is the same, its graph is launched; if
//! not, a new graph is captured. So nothing is assumed of what may change: addresses, sizes, number of layers.
//! Tables change every time. They have fixed addresses in a graph, and their contents are copied when it runs.
//! Whatever needs the stream itself (an event, a read, another library) first puts the work so far into
//! it, one by one.

use std::collections::HashMap;
use std::env::VarError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::driver::{Arg, Driver, Event, Function, Graph, Grid, Matmul, Stream};
use super::memory::{Block, Tables};
use super::{Cuda, failed};
use crate::Result;

/// Tables of a graph in bytes; a repetition with more is not captured.
const ROOM: usize = 1 << 20;

/// Distance of tables in bytes: that of separate allocations.
const BOUNDARY: usize = 256;

/// Most graphs of a stream; the one used least recently makes room.
const MOST: usize = 16;

/// Most keys that are remembered without a graph.
const MOST_SEEN: usize = 1024;

/// A key whose work was interrupted as often in a row is not captured again.
const MOST_INTERRUPTIONS: u32 = 4;

/// Name of work that may repeat: what computes it, and its size.
pub type RepeatKey = (u64, usize);

/// Work for a stream.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Work {
    /// Kernel, whose arguments are beside it.
    Launch {
        function: Function,
        grid: Grid,
        num_args: usize,
    },
    Matmul(Matmul),
    Copy {
        from: u64,
        to: u64,
        bytes: usize,
    },
    CopyRows {
        from: (u64, usize),
        to: (u64, usize),
        rows: usize,
        bytes: usize,
    },
    Clear {
        at: u64,
        bytes: usize,
    },
}

impl Work {
    fn num_args(&self) -> usize {
        if let Self::Launch { num_args, .. } = self { *num_args } else { 0 }
    }

    /// Puts the work into a stream.
    ///
    /// # Safety
    /// The caller promises what the driver's function asks for.
    unsafe fn put(self, args: &[Arg], driver: &dyn Driver, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Launch { function, grid, .. } => driver.launch(stream, function, grid, args),
                Self::Matmul(product) => driver.matmul(stream, &product),
                Self::Copy { from, to, bytes } => driver.copy(stream, from, to, bytes),
                Self::CopyRows { from, to, rows, bytes } => driver.copy_rows(stream, from, to, rows, bytes),
                Self::Clear { at, bytes } => driver.clear(stream, at, bytes),
            }
        }
    }
}

/// A table inside a block.
#[derive(Clone, Copy)]
struct Slot {
    start: usize,
    len: usize,
}

/// End of what this repetition has taken of a sequence.
#[derive(Clone, Copy, Default)]
struct Position {
    works: usize,
    args: usize,
    tables: usize,
    slots: usize,
}

/// Work in order, with its arguments and tables.
struct Sequence {
    works: Vec<Work>,
    args: Vec<Arg>,
    /// Slot of each requested table.
    tables: Vec<usize>,
    /// Slots, in the order of their first table.
    slots: Vec<Slot>,
    block: Block,
    /// Graph of the whole sequence.
    graph: Option<Graph>,
    /// End of the work that last read the block.
    read: Event,
    at: Position,
}

impl Sequence {
    fn new(driver: &dyn Driver, tables: &Tables) -> Result<Self> {
        let block = tables.block(ROOM)?;
        let (works, args, slots) = Default::default();
        Ok(Self {
            works,
            args,
            tables: Vec::new(),
            slots,
            block,
            graph: None,
            read: driver.new_event()?,
            at: Position::default(),
        })
    }

    /// Returns whether all so far was as the last time, and it went on.
    fn follows(&self) -> bool {
        self.graph.is_some() && self.at.works < self.works.len()
    }

    /// Forgets what follows the position, and the graph.
    fn part(&mut self, driver: &dyn Driver) {
        let Position { works, args, tables, slots } = self.at;
        self.works.truncate(works);
        self.args.truncate(args);
        self.tables.truncate(tables);
        self.slots.truncate(slots);
        if let Some(graph) = self.graph.take() {
            driver.end_graph(graph);
        }
    }

    /// Takes work at the position.
    fn take(&mut self, driver: &dyn Driver, work: Work, args: &[Arg]) {
        let next = self.at.args + args.len();
        let same =
            self.follows() && self.works[self.at.works] == work && self.args[self.at.args..next] == *args;
        if !same {
            self.part(driver);
            self.works.push(work);
            self.args.extend_from_slice(args);
        }
        self.at.works += 1;
        self.at.args = next;
    }

    /// Takes a table at the position, and returns its address; `None` if there is no room.
    fn table(&mut self, driver: &dyn Driver, bytes: &[u8]) -> Option<u64> {
        let expected = self.graph.is_some().then(|| self.tables.get(self.at.tables)).flatten().copied();
        let fits = |this: &Self, slot: usize| {
            let Slot { start, len } = this.slots[slot];
            len == bytes.len() && (slot >= this.at.slots || this.block.contents(start, len) == bytes)
        };
        let mut slot = expected.filter(|&slot| fits(self, slot));
        if slot.is_none() {
            self.part(driver);
            slot = (0..self.at.slots).find(|&slot| fits(self, slot));
        }
        let slot = match slot {
            Some(slot) => slot,
            None => self.new_slot(bytes.len())?,
        };
        if self.at.tables == self.tables.len() {
            self.tables.push(slot);
        }
        self.at.tables += 1;
        let start = self.slots[slot].start;
        if slot == self.at.slots {
            self.block.write(start, bytes);
            self.at.slots += 1;
        }
        Some(self.block.device() + start as u64)
    }

    /// Adds a slot, if there is room.
    fn new_slot(&mut self, len: usize) -> Option<usize> {
        let end = self.slots.last().map_or(0, |slot| slot.start + slot.len);
        let start = end.next_multiple_of(BOUNDARY);
        (start + len <= ROOM).then(|| self.slots.push(Slot { start, len }))?;
        Some(self.slots.len() - 1)
    }

    /// Puts tables and work up to the position into the stream, one by one.
    ///
    /// # Safety
    /// The work fulfils what the driver's functions ask for, as whoever gave it promised.
    unsafe fn put(&self, driver: &dyn Driver, stream: Stream) -> Result<()> {
        let slots = &self.slots[..self.at.slots];
        if let Some(end) = slots.last().map(|slot| slot.start + slot.len) {
            let tables = Work::Copy { from: self.block.host(), to: self.block.device(), bytes: end };
            // SAFETY: the block has as many bytes in both memories.
            unsafe { tables.put(&[], driver, stream)? };
        }
        let mut args = &self.args[..];
        for work in &self.works[..self.at.works] {
            let (own, rest) = args.split_at(work.num_args());
            args = rest;
            // SAFETY: the caller's promise.
            unsafe { work.put(own, driver, stream)? };
        }
        Ok(())
    }

    /// Ends the sequence.
    fn end(mut self, driver: &dyn Driver, tables: &Tables) {
        if let Some(graph) = self.graph.take() {
            driver.end_graph(graph);
        }
        // The block's host memory may still be read; a failed device reads nothing.
        let _ = driver.finish(self.read);
        driver.end_event(self.read);
        tables.release(self.block);
    }
}

/// A key that was seen.
#[derive(Default)]
struct Seen {
    /// Interruptions since the last launch of a graph.
    interruptions: u32,
    /// Clock of the last use.
    used: u64,
    sequence: Option<Sequence>,
}

#[derive(Default)]
struct State {
    seen: HashMap<RepeatKey, Seen>,
    clock: u64,
    /// The repetition under way.
    current: Option<(RepeatKey, Sequence)>,
}

/// Environment variable that turns graphs off (`0`).
const VARIABLE: &str = "TANDEM_CUDA_GRAPHS";

/// Graphs of a stream.
pub(crate) struct Graphs {
    state: Mutex<State>,
    /// False if repetitions are put into the stream one by one.
    is_allowed: bool,
    /// True while a repetition is under way.
    is_on: AtomicBool,
    launched: AtomicU64,
}

impl Graphs {
    /// # Errors
    /// If the environment variable `TANDEM_CUDA_GRAPHS` is neither 0 nor 1.
    pub(crate) fn new() -> Result<Self> {
        let is_allowed = match std::env::var(VARIABLE).as_deref() {
            Ok("0") => false,
            Ok("1" | "") | Err(VarError::NotPresent) => true,
            value => {
                let found = value.map_or("no text".to_owned(), |value| format!("{value:?}"));
                return Err(failed(VARIABLE, format!("it is {found}, expected 0 or 1")));
            }
        };
        Ok(Self {
            state: Mutex::default(),
            is_allowed,
            is_on: AtomicBool::new(false),
            launched: AtomicU64::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Ends all graphs.
    pub(crate) fn end(&mut self, driver: &dyn Driver, tables: &Tables) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let current = state.current.take().map(|(_, sequence)| sequence);
        let kept = state.seen.drain().filter_map(|(_, seen)| seen.sequence);
        kept.chain(current).for_each(|sequence| sequence.end(driver, tables));
    }
}

impl Cuda {
    /// Puts work into the stream, or into the repetition under way.
    ///
    /// # Safety
    /// The caller promises what the driver's function asks for.
    pub(crate) unsafe fn put(&self, work: Work) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.put_with(work, &[]) }
    }

    /// Puts a kernel with its arguments into the stream, or other work without any, as [`Self::put`].
    ///
    /// # Safety
    /// The caller promises what the driver's function asks for.
    pub(super) unsafe fn put_with(&self, work: Work, args: &[Arg]) -> Result<()> {
        self.count_launch();
        if self.shared.graphs.is_on()
            && let Some((_, sequence)) = &mut self.shared.graphs.lock().current
        {
            sequence.take(self.driver(), work, args);
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { work.put(args, self.driver(), self.raw_stream()) }
    }

    /// Returns the address of a table in the repetition under way, if there is one. A table that it has no
    /// room for ends it.
    pub(super) fn repeated_table(&self, bytes: &[u8]) -> Result<Option<u64>> {
        if !self.shared.graphs.is_on() {
            return Ok(None);
        }
        let address = match &mut self.shared.graphs.lock().current {
            None => return Ok(None),
            Some((_, sequence)) => sequence.table(self.driver(), bytes),
        };
        if address.is_none() {
            self.settle()?;
        }
        Ok(address)
    }

    /// Returns the number of launched graphs.
    pub(crate) fn num_graph_launches(&self) -> u64 {
        self.shared.graphs.launched.load(Ordering::Relaxed)
    }

    /// Begins a repetition, unless its key comes for the first time or was interrupted too often, or one is under
    /// way. Returns
    /// whether it did.
    pub(crate) fn begin_repeated(&self, key: RepeatKey) -> Result<bool> {
        let graphs = &self.shared.graphs;
        if !graphs.is_allowed {
            return Ok(false);
        }
        let mut state = graphs.lock();
        let State { seen, clock, current } = &mut *state;
        if current.is_some() {
            return Ok(false);
        }
        *clock += 1;
        if !seen.contains_key(&key) {
            if seen.len() >= MOST_SEEN {
                seen.retain(|_, seen| seen.sequence.is_some());
            }
            seen.insert(key, Seen { used: *clock, ..Seen::default() });
            return Ok(false);
        }
        let own = seen.get_mut(&key).expect("it was seen");
        own.used = *clock;
        if own.interruptions >= MOST_INTERRUPTIONS {
            return Ok(false);
        }
        let mut sequence = match own.sequence.take() {
            Some(sequence) => sequence,
            None => {
                let mut with_graph: Vec<&mut Seen> =
                    seen.values_mut().filter(|seen| seen.sequence.is_some()).collect();
                with_graph.sort_by_key(|seen| seen.used);
                if with_graph.len() >= MOST {
                    let oldest = &mut with_graph[0];
                    let sequence = oldest.sequence.take().expect("it has one");
                    sequence.end(self.driver(), &self.shared.tables);
                }
                Sequence::new(self.driver(), &self.shared.tables)?
            }
        };
        self.driver().finish(sequence.read)?;
        sequence.at = Position::default();
        *current = Some((key, sequence));
        graphs.is_on.store(true, Ordering::Relaxed);
        Ok(true)
    }

    /// Takes the repetition out.
    fn take_repeated(&self) -> Option<(RepeatKey, Sequence)> {
        let graphs = &self.shared.graphs;
        let current = graphs.lock().current.take();
        graphs.is_on.store(false, Ordering::Relaxed);
        current
    }

    /// Ends a repetition, if it was not interrupted: launches its graph, which is captured if there is none.
    pub(crate) fn end_repeated(&self) -> Result<()> {
        let Some((key, mut sequence)) = self.take_repeated() else { return Ok(()) };
        let (driver, stream, graphs) = (self.driver(), self.raw_stream(), &self.shared.graphs);
        let Position { works, tables, .. } = sequence.at;
        if works < sequence.works.len() || tables < sequence.tables.len() {
            sequence.part(driver);
        }
        if sequence.graph.is_none() {
            // SAFETY: those who gave the work vouch for it.
            sequence.graph = driver.capture(stream, &mut || unsafe { sequence.put(driver, stream) })?;
        }
        let outcome = match sequence.graph {
            Some(graph) => {
                graphs.launched.fetch_add(1, Ordering::Relaxed);
                // SAFETY: as above; the graph has the same addresses.
                unsafe { driver.launch_graph(stream, graph) }
            }
            // SAFETY: as above.
            None => unsafe { sequence.put(driver, stream) },
        };
        let outcome = outcome.and_then(|()| driver.record(sequence.read, stream));
        let mut state = graphs.lock();
        match state.seen.get_mut(&key) {
            Some(own) if outcome.is_ok() && sequence.graph.is_some() => {
                own.interruptions = 0;
                own.sequence = Some(sequence);
            }
            own => {
                // The driver cannot capture this.
                own.into_iter().for_each(|own| own.interruptions = MOST_INTERRUPTIONS);
                sequence.end(driver, &self.shared.tables);
            }
        }
        outcome
    }

    /// Ends a repetition whose work is not wanted.
    pub(crate) fn drop_repeated(&self) {
        if let Some((_, sequence)) = self.take_repeated() {
            sequence.end(self.driver(), &self.shared.tables);
        }
    }

    /// Puts the work of a repetition under way into the stream and ends it, so that the stream may be used
    /// otherwise.
    pub(crate) fn settle(&self) -> Result<()> {
        if !self.shared.graphs.is_on() {
            return Ok(());
        }
        let Some((key, sequence)) = self.take_repeated() else { return Ok(()) };
        let (driver, stream) = (self.driver(), self.raw_stream());
        // SAFETY: those who gave the work vouch for it.
        let outcome = unsafe { sequence.put(driver, stream) };
        let outcome = outcome.and_then(|()| driver.record(sequence.read, stream));
        if let Some(own) = self.shared.graphs.lock().seen.get_mut(&key) {
            own.interruptions += 1;
        }
        sequence.end(driver, &self.shared.tables);
        outcome
    }
}
