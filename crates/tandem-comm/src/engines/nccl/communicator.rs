//! A communicator of NCCL's, which never blocks: what is called begins, and its state is asked for until it is done.
//!
//! Buffers are places in the memory of the device that was current when the communicator began. An operation is done when its
//! stream is; it has been put there when the communicator is ready again.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::libraries::Functions;
use super::raw::{
    Config, DevicePointer, IN_PROGRESS, RawCommunicator, RawStream, UniqueId, data_type, operation,
};
use crate::collective::element::{ElementKind, Reduction};

/// One rank's end. Dropped, it aborts what is under way: of all that ends a communicator that alone needs no other rank.
pub(super) struct Communicator {
    functions: Arc<Functions>,
    raw: RawCommunicator,
    rank: usize,
}

// SAFETY: NCCL's communicators may be used by any thread, one at a time.
unsafe impl Send for Communicator {}

/// Numbers in a device's memory, and the stream in whose order they are read and written.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) start: DevicePointer,
    pub(super) kind: ElementKind,
    pub(super) stream: RawStream,
}

impl Place {
    fn at(&self, element: usize) -> *mut c_void {
        (self.start + (element * self.kind.size()) as u64) as *mut c_void
    }
}

/// The name of a new communicator, for one rank to tell the others.
pub(super) fn unique_id(functions: &Functions) -> Result<UniqueId, String> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: the id is written to where it is.
    let outcome = unsafe { (functions.nccl.get_unique_id)(&raw mut id) };
    functions.nccl("making an id for a communicator", outcome, std::ptr::null_mut())?;
    Ok(id)
}

impl Communicator {
    /// Begins to meet the other ranks, on the current device.
    pub(super) fn begin(
        functions: &Arc<Functions>,
        id: UniqueId,
        rank: usize,
        size: usize,
    ) -> Result<Self, String> {
        let (mut raw, mut config) = (std::ptr::null_mut(), Config::non_blocking());
        // SAFETY: both are read and written during the call alone.
        let outcome = unsafe {
            (functions.nccl.init_rank)(&raw mut raw, size as c_int, id, rank as c_int, &raw mut config)
        };
        let this = Self { functions: functions.clone(), raw, rank };
        this.check("making a communicator", outcome)?;
        Ok(this)
    }

    /// Whether what was called last has been done, or, for an operation, put into its stream.
    pub(super) fn is_ready(&self) -> Result<bool, String> {
        let mut state = 0;
        // SAFETY: the communicator lives; its state is written to where it is.
        let outcome = unsafe { (self.functions.nccl.async_error)(self.raw, &raw mut state) };
        self.check("asking for the state of a communicator", outcome)?;
        self.check("what was under way", state)?;
        Ok(state != IN_PROGRESS)
    }

    /// `count` elements become the reduction of all ranks'.
    pub(super) fn all_reduce(&self, place: Place, count: usize, reduction: Reduction) -> Result<(), String> {
        let (at, kind) = (place.at(0), data_type(place.kind));
        // SAFETY: the caller of `begin` keeps the memory as long as the communicator.
        let outcome = unsafe {
            let all_reduce = self.functions.nccl.all_reduce;
            all_reduce(at, at, count, kind, operation(reduction), self.raw, place.stream)
        };
        self.check("an all-reduce", outcome)
    }

    /// This rank's part, of parts of `counts` elements, becomes the reduction of all ranks'.
    pub(super) fn reduce_scatter(
        &self,
        place: Place,
        counts: &[usize],
        reduction: Reduction,
    ) -> Result<(), String> {
        let (kind, reduction) = (data_type(place.kind), operation(reduction));
        if let Some(count) = even(counts) {
            // SAFETY: as in `all_reduce`. That the result lies where this rank's part is makes it in place.
            let outcome = unsafe {
                let reduce_scatter = self.functions.nccl.reduce_scatter;
                let mine = place.at(self.rank * count);
                reduce_scatter(place.at(0), mine, count, kind, reduction, self.raw, place.stream)
            };
            return self.check("a reduce-scatter", outcome);
        }
        self.each_part(place, counts, "a reduction of a part", |at, count, owner| {
            // SAFETY: as in `all_reduce`.
            unsafe {
                (self.functions.nccl.reduce)(at, at, count, kind, reduction, owner, self.raw, place.stream)
            }
        })
    }

    /// Every part, of parts of `counts` elements, becomes its owner's.
    pub(super) fn all_gather(&self, place: Place, counts: &[usize]) -> Result<(), String> {
        let kind = data_type(place.kind);
        if let Some(count) = even(counts) {
            // SAFETY: as in `reduce_scatter`.
            let outcome = unsafe {
                let mine = place.at(self.rank * count);
                (self.functions.nccl.all_gather)(mine, place.at(0), count, kind, self.raw, place.stream)
            };
            return self.check("an all-gather", outcome);
        }
        self.each_part(place, counts, "a broadcast of a part", |at, count, owner| {
            // SAFETY: as in `all_reduce`.
            unsafe { (self.functions.nccl.broadcast)(at, at, count, kind, owner, self.raw, place.stream) }
        })
    }

    /// `count` elements become the root's.
    pub(super) fn broadcast(&self, place: Place, count: usize, root: usize) -> Result<(), String> {
        let (at, kind) = (place.at(0), data_type(place.kind));
        // SAFETY: as in `all_reduce`.
        let outcome = unsafe {
            (self.functions.nccl.broadcast)(at, at, count, kind, root as c_int, self.raw, place.stream)
        };
        self.check("a broadcast", outcome)
    }

    /// One operation for each part that has elements, all at once: (where it lies, how many, whose).
    fn each_part(
        &self,
        place: Place,
        counts: &[usize],
        what: &str,
        begin: impl Fn(*mut c_void, usize, c_int) -> c_int,
    ) -> Result<(), String> {
        // SAFETY: it is ended below, whatever happens in between.
        self.check("beginning several operations", unsafe { (self.functions.nccl.group_start)() })?;
        let (mut start, mut begun) = (0, Ok(()));
        for (owner, &count) in counts.iter().enumerate() {
            if count > 0 && begun.is_ok() {
                begun = self.check(what, begin(place.at(start), count, owner as c_int));
            }
            start += count;
        }
        // SAFETY: it was begun above, by this thread.
        let ended = self.check("several operations", unsafe { (self.functions.nccl.group_end)() });
        begun.and(ended)
    }

    /// Begins to end it, in which all ranks take part: when it is ready it can be destroyed.
    pub(super) fn finalize(&self) -> Result<(), String> {
        // SAFETY: the communicator lives, and is finalised once: the engine does so at its end.
        self.check("finalising a communicator", unsafe { (self.functions.nccl.finalize)(self.raw) })
    }

    /// Frees a communicator that is finalised.
    pub(super) fn destroy(mut self) {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        // SAFETY: the communicator lives, and nobody has it afterwards. There is nobody to tell that it could not be freed.
        unsafe { (self.functions.nccl.destroy)(raw) };
    }

    fn check(&self, what: &str, outcome: c_int) -> Result<(), String> {
        self.functions.nccl(what, outcome, self.raw)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the communicator lives, and nobody has it afterwards. There is nobody to tell that it could not be aborted.
            unsafe { (self.functions.nccl.abort)(self.raw) };
        }
    }
}

/// How many elements all parts have, if they have as many.
fn even(counts: &[usize]) -> Option<usize> {
    counts.iter().all(|count| *count == counts[0]).then_some(counts[0])
}
