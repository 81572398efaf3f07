//! Communicator: safe calls of MPI. Requests own the memory that MPI reads and writes.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::raw::{Handle, SUCCESS};
use super::segments::Segment;
use super::world::World;

/// Number type of a reduction that MPI does itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    I64,
    U64,
}

/// Reduction that MPI does itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fold {
    Sum,
    Max,
}

/// Message of MPI's error.
pub(super) type Failed = String;

/// Ranks that communicate. It is never freed: that is a collective call, and ranks drop their
/// groups at different times. A job has few.
#[derive(Clone)]
pub(super) struct Communicator {
    pub(super) world: Arc<World>,
    handle: Handle,
    pub(super) rank: usize,
    pub(super) size: usize,
}

/// A transfer or collective in progress, with its memory. If it is dropped before its end, the
/// memory is leaked.
pub(super) struct Request {
    handle: Handle,
    /// `None` once the request is done.
    memory: Option<InUse>,
}

struct InUse {
    segment: Segment,
    /// Arrays of counts, which MPI may read until the end.
    _counts: Vec<c_int>,
}

impl Drop for Request {
    fn drop(&mut self) {
        // Where the segment is still there, MPI has not said that it is done with it.
        std::mem::forget(self.memory.take());
    }
}

/// Tag of the notice that a group has failed.
const NOTICE: c_int = 1;

impl Communicator {
    /// Wraps a communicator whose errors are returned.
    pub(super) fn new(world: Arc<World>, handle: Handle) -> Result<Self, Failed> {
        let functions = &world.library.functions;
        // SAFETY: MPI is initialised and the communicator is one of its.
        let outcome = unsafe { (functions.set_error_handler)(handle, world.library.constants.errors_return) };
        world.outcome("MPI_Comm_set_errhandler", outcome)?;
        let (mut rank, mut size) = (0, 0);
        // SAFETY: as above; both numbers are written to valid addresses.
        let outcome = unsafe { (functions.rank)(handle, &raw mut rank) };
        world.outcome("MPI_Comm_rank", outcome)?;
        // SAFETY: as above.
        let outcome = unsafe { (functions.size)(handle, &raw mut size) };
        world.outcome("MPI_Comm_size", outcome)?;
        let number = |n: c_int| usize::try_from(n).map_err(|_| format!("MPI counts {n} ranks"));
        Ok(Self { handle, rank: number(rank)?, size: number(size)?, world })
    }

    pub(super) fn handle(&self) -> Handle {
        self.handle
    }

    /// Divides the ranks, which must all call this; blocks until they do. `color` counts from 0.
    pub(super) fn split(&self, color: usize) -> Result<Self, Failed> {
        let number = |n: usize| c_int::try_from(n).map_err(|_| format!("{n} is too large for MPI"));
        let (color, key, mut part) = (number(color)?, number(self.rank)?, Handle::default());
        // SAFETY: the handle is written to a valid address.
        let outcome = unsafe { (self.world.library.functions.split)(self.handle, color, key, &raw mut part) };
        self.world.outcome("MPI_Comm_split", outcome)?;
        Self::new(self.world.clone(), part)
    }

    /// Returns whether a request is done.
    pub(super) fn is_done(&self, request: &mut Request) -> Result<bool, Failed> {
        if request.memory.is_none() {
            return Ok(true);
        }
        let mut is_done = 0;
        // SAFETY: the request has not been done before, and nobody needs its status.
        let outcome = unsafe {
            (self.world.library.functions.test)(&raw mut request.handle, &raw mut is_done, self.ignored())
        };
        self.world.outcome("a transfer", outcome)?;
        Ok(is_done != 0)
    }

    /// Returns the memory of a request that is done.
    ///
    /// # Panics
    /// If it is taken twice.
    pub(super) fn memory(&self, request: &mut Request) -> Segment {
        request.memory.take().expect("a segment is taken once").segment
    }

    /// Sends the first `len` bytes of a segment.
    pub(super) fn send(
        &self,
        mut segment: Segment,
        len: usize,
        to: usize,
        tag: c_int,
    ) -> Result<Request, Failed> {
        let (at, count) = (start(&mut segment, len), count(len));
        self.begin("MPI_Isend", segment, Vec::new(), |constants, functions, request| {
            // SAFETY: the request owns the segment, which is at least this long, until it is done.
            unsafe { (functions.send)(at, count, constants.byte, rank(to), tag, self.handle, request) }
        })
    }

    /// Receives exactly `len` bytes into a segment.
    pub(super) fn recv(
        &self,
        mut segment: Segment,
        len: usize,
        from: usize,
        tag: c_int,
    ) -> Result<Request, Failed> {
        let (at, count) = (start(&mut segment, len), count(len));
        self.begin("MPI_Irecv", segment, Vec::new(), |constants, functions, request| {
            // SAFETY: as for a send.
            unsafe { (functions.recv)(at, count, constants.byte, rank(from), tag, self.handle, request) }
        })
    }

    /// Sends the first `len` bytes of the root's segment to all.
    pub(super) fn broadcast(&self, mut segment: Segment, len: usize, root: usize) -> Result<Request, Failed> {
        let (at, count) = (start(&mut segment, len), count(len));
        self.begin("MPI_Ibcast", segment, Vec::new(), |constants, functions, request| {
            // SAFETY: as for a send.
            unsafe { (functions.broadcast)(at, count, constants.byte, rank(root), self.handle, request) }
        })
    }

    /// Reduces the first `len` numbers of all ranks' segments.
    pub(super) fn all_reduce(
        &self,
        mut segment: Segment,
        len: usize,
        number: Number,
        fold: Fold,
    ) -> Result<Request, Failed> {
        let (at, count) = (start(&mut segment, 8 * len), count(len));
        self.begin("MPI_Iallreduce", segment, Vec::new(), |constants, functions, request| {
            let (kind, fold) = (constants.number(number), constants.fold(fold));
            let in_place = constants.in_place as *const c_void;
            // SAFETY: as for a send; the numbers are 8 bytes wide.
            unsafe { (functions.all_reduce)(in_place, at, count, kind, fold, self.handle, request) }
        })
    }

    /// Reduces the first numbers of all ranks' segments, of which rank `r` gets `counts[r]` at the
    /// start of its segment.
    pub(super) fn reduce_scatter(
        &self,
        mut segment: Segment,
        counts: &[usize],
        number: Number,
        fold: Fold,
    ) -> Result<Request, Failed> {
        let at = start(&mut segment, 8 * counts.iter().sum::<usize>());
        let counts: Vec<c_int> = counts.iter().map(|&len| count(len)).collect();
        let first = counts.as_ptr();
        self.begin("MPI_Ireduce_scatter", segment, counts, |constants, functions, request| {
            let (kind, fold) = (constants.number(number), constants.fold(fold));
            let in_place = constants.in_place as *const c_void;
            // SAFETY: as for a reduction; the request owns the counts, one for each rank, too.
            unsafe { (functions.reduce_scatter)(in_place, at, first, kind, fold, self.handle, request) }
        })
    }

    /// Gathers the first bytes of all ranks' segments, of which rank `r` provides `lens[r]`, one
    /// after another.
    pub(super) fn all_gather(&self, mut segment: Segment, lens: &[usize]) -> Result<Request, Failed> {
        let at = start(&mut segment, lens.iter().sum());
        let starts = lens.iter().scan(0, |end, len| {
            let start = *end;
            *end += len;
            Some(start)
        });
        let counts: Vec<c_int> = lens.iter().copied().chain(starts).map(count).collect();
        let (first, starts) = (counts.as_ptr(), counts[lens.len()..].as_ptr());
        self.begin("MPI_Iallgatherv", segment, counts, |constants, functions, request| {
            let in_place = constants.in_place as *const c_void;
            let byte = constants.byte;
            // SAFETY: as for a send; the request owns counts and starts, one for each rank, too.
            unsafe {
                (functions.all_gather)(in_place, 0, byte, at, first, starts, byte, self.handle, request)
            }
        })
    }

    /// Tells a rank that this group has failed.
    pub(super) fn notify(&self, segment: Segment, to: usize) -> Result<Request, Failed> {
        self.send(segment, 0, to, NOTICE)
    }

    /// Returns whether a rank has told that this group has failed.
    pub(super) fn is_notified(&self) -> Result<bool, Failed> {
        let (world, mut is_there) = (&*self.world, 0);
        let any = world.library.constants.any_source;
        // SAFETY: the flag is written to a valid address, and nobody needs the status.
        let outcome = unsafe {
            (world.library.functions.probe)(any, NOTICE, self.handle, &raw mut is_there, self.ignored())
        };
        world.outcome("MPI_Iprobe", outcome)?;
        Ok(is_there != 0)
    }

    fn ignored(&self) -> *mut c_void {
        self.world.library.constants.status_ignore as *mut c_void
    }

    fn begin(
        &self,
        what: &str,
        segment: Segment,
        counts: Vec<c_int>,
        call: impl FnOnce(&super::abi::Constants, &super::raw::MpiFunctions, *mut Handle) -> c_int,
    ) -> Result<Request, Failed> {
        let library = &self.world.library;
        let memory = Some(InUse { segment, _counts: counts });
        let mut request = Request { handle: Handle::default(), memory };
        let outcome = call(&library.constants, &library.functions, &raw mut request.handle);
        // A request that MPI refused leaks its memory: MPI does not say whether it still uses it.
        self.world.outcome(what, outcome).map(|()| request)
    }
}

impl super::abi::Constants {
    fn number(&self, number: Number) -> Handle {
        match number {
            Number::I64 => self.int64,
            Number::U64 => self.uint64,
        }
    }

    fn fold(&self, fold: Fold) -> Handle {
        match fold {
            Fold::Sum => self.sum,
            Fold::Max => self.max,
        }
    }
}

impl super::world::World {
    /// Converts a result code of MPI into its own text.
    pub(super) fn outcome(&self, what: &str, outcome: c_int) -> Result<(), Failed> {
        if outcome == SUCCESS { Ok(()) } else { Err(format!("{what} failed: {}", self.text(outcome))) }
    }
}

/// Returns the address of a segment's first `len` bytes.
///
/// # Panics
/// If it is shorter.
fn start(segment: &mut Segment, len: usize) -> *mut c_void {
    segment.bytes_mut()[..len].as_mut_ptr().cast()
}

fn count(len: usize) -> c_int {
    c_int::try_from(len).expect("calls are cut into segments, which are short")
}

fn rank(rank: usize) -> c_int {
    c_int::try_from(rank).expect("MPI counts ranks in this type")
}
