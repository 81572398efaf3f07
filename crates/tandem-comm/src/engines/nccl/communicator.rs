//! Non-blocking NCCL communicator: a call starts an operation, and its state is polled until it is
//! done.
//!
//! Buffers are in the memory of the device that was current when the communicator began. An
//! operation is in its stream when the communicator is ready again, and done when the stream is.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::libraries::Functions;
use super::raw::{
    Config, DevicePointer, IN_PROGRESS, RawCommunicator, RawStream, UniqueId, data_type, operation,
};
use crate::collective::element::{ElementKind, Reduction};

/// One rank's communicator. Drop aborts it, the only way to end one without the other ranks.
pub(super) struct Communicator {
    functions: Arc<Functions>,
    raw: RawCommunicator,
    rank: usize,
}

// SAFETY: any thread may use an NCCL communicator, one at a time.
unsafe impl Send for Communicator {}

/// Numbers in device memory, and the stream that orders their accesses.
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

/// Creates the id of a new communicator, for one rank to send to the others.
pub(super) fn unique_id(functions: &Functions) -> Result<UniqueId, String> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: NCCL writes the id to a valid address.
    let outcome = unsafe { (functions.nccl.get_unique_id)(&raw mut id) };
    functions.nccl("making an id for a communicator", outcome, std::ptr::null_mut())?;
    Ok(id)
}

impl Communicator {
    /// Starts joining the other ranks, on the current device.
    pub(super) fn begin(
        functions: &Arc<Functions>,
        id: UniqueId,
        rank: usize,
        size: usize,
    ) -> Result<Self, String> {
        let (mut raw, mut config) = (std::ptr::null_mut(), Config::non_blocking());
        // SAFETY: both are accessed during the call only.
        let outcome = unsafe {
            (functions.nccl.init_rank)(&raw mut raw, size as c_int, id, rank as c_int, &raw mut config)
        };
        let this = Self { functions: functions.clone(), raw, rank };
        this.check("making a communicator", outcome)?;
        Ok(this)
    }

    /// Returns whether the last call is done or, for an operation, is in its stream.
    pub(super) fn is_ready(&self) -> Result<bool, String> {
        let mut state = 0;
        // SAFETY: the communicator lives; NCCL writes its state to a valid address.
        let outcome = unsafe { (self.functions.nccl.async_error)(self.raw, &raw mut state) };
        self.check("asking for the state of a communicator", outcome)?;
        self.check("what was under way", state)?;
        Ok(state != IN_PROGRESS)
    }

    /// Replaces `count` elements by the reduction over all ranks.
    pub(super) fn all_reduce(&self, place: Place, count: usize, reduction: Reduction) -> Result<(), String> {
        let (at, kind) = (place.at(0), data_type(place.kind));
        // SAFETY: the caller of `begin` keeps the memory as long as the communicator.
        let outcome = unsafe {
            let all_reduce = self.functions.nccl.all_reduce;
            all_reduce(at, at, count, kind, operation(reduction), self.raw, place.stream)
        };
        self.check("an all-reduce", outcome)
    }

    /// Reduces this rank's part of parts of `counts` elements.
    pub(super) fn reduce_scatter(
        &self,
        place: Place,
        counts: &[usize],
        reduction: Reduction,
    ) -> Result<(), String> {
        let (kind, reduction) = (data_type(place.kind), operation(reduction));
        if let Some(count) = even(counts) {
            // SAFETY: as in `all_reduce`. The result is at this rank's part, which makes it in
            // place.
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

    /// Replaces every part of `counts` elements by its owner's.
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

    /// Replaces `count` elements by the root's.
    pub(super) fn broadcast(&self, place: Place, count: usize, root: usize) -> Result<(), String> {
        let (at, kind) = (place.at(0), data_type(place.kind));
        // SAFETY: as in `all_reduce`.
        let outcome = unsafe {
            (self.functions.nccl.broadcast)(at, at, count, kind, root as c_int, self.raw, place.stream)
        };
        self.check("a broadcast", outcome)
    }

    /// Starts one operation per non-empty part as a group: (offset, count, owner).
    fn each_part(
        &self,
        place: Place,
        counts: &[usize],
        what: &str,
        begin: impl Fn(*mut c_void, usize, c_int) -> c_int,
    ) -> Result<(), String> {
        // SAFETY: the group is ended below in any case.
        self.check("beginning several operations", unsafe { (self.functions.nccl.group_start)() })?;
        let (mut start, mut begun) = (0, Ok(()));
        for (owner, &count) in counts.iter().enumerate() {
            if count > 0 && begun.is_ok() {
                begun = self.check(what, begin(place.at(start), count, owner as c_int));
            }
            start += count;
        }
        // SAFETY: this thread began the group above.
        let ended = self.check("several operations", unsafe { (self.functions.nccl.group_end)() });
        begun.and(ended)
    }

    /// Starts ending the communicator, together with all ranks. When ready it can be destroyed.
    pub(super) fn finalize(&self) -> Result<(), String> {
        // SAFETY: the communicator lives; the engine finalises it once, at its end.
        self.check("finalising a communicator", unsafe { (self.functions.nccl.finalize)(self.raw) })
    }

    /// Frees a finalised communicator.
    pub(super) fn destroy(mut self) {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        // SAFETY: the communicator lives and is not used afterwards. An error could not be
        // reported.
        unsafe { (self.functions.nccl.destroy)(raw) };
    }

    fn check(&self, what: &str, outcome: c_int) -> Result<(), String> {
        self.functions.nccl(what, outcome, self.raw)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: the communicator lives and is not used afterwards. An error could not be
            // reported.
            unsafe { (self.functions.nccl.abort)(self.raw) };
        }
    }
}

/// Returns the common number of elements of all parts, if they are equal.
fn even(counts: &[usize]) -> Option<usize> {
    counts.iter().all(|count| *count == counts[0]).then_some(counts[0])
}
