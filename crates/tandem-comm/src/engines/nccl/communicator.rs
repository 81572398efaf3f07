//! Non-blocking NCCL communicator: a call starts an operation, and its state is polled until it is
//! done.
//!
//! Buffers are in the memory of the device that was current when the communicator began. An
//! operation is in its stream when the communicator is ready again, and done when the stream is.

use std::ffi::{c_int, c_void};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use super::gpu::Gpu;
use super::libraries::Functions;
use super::raw::{
    Config, DevicePointer, IN_PROGRESS, RawCommunicator, RawStream, UniqueId, data_type, operation,
};
use crate::collective::call::{Call, Operation};

/// Longest wait for an abort, which waits for NCCL's own threads and for the GPU.
const ABORT: Duration = Duration::from_secs(2);

/// One rank's communicator. Drop aborts it, the only way to end one without the other ranks.
pub(super) struct Communicator {
    gpu: Gpu,
    raw: RawCommunicator,
    rank: usize,
}

// SAFETY: any thread may use an NCCL communicator, one at a time.
unsafe impl Send for Communicator {}

/// Numbers in device memory, and the stream that orders their accesses.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) start: DevicePointer,
    pub(super) stream: RawStream,
}

// SAFETY: any thread may put work into a stream.
unsafe impl Send for Place {}

/// Creates the id of a new communicator, for one rank to send to the others.
pub(super) fn unique_id(functions: &Functions) -> Result<UniqueId, String> {
    let mut id = UniqueId([0; 128]);
    // SAFETY: NCCL writes the id to a valid address.
    let outcome = unsafe { (functions.nccl.get_unique_id)(&raw mut id) };
    functions.nccl("making an id for a communicator", outcome, std::ptr::null_mut())?;
    Ok(id)
}

/// A division of a communicator that goes on while its parent is not ready.
pub(super) struct Division {
    /// NCCL writes the new communicator here when it is complete. It is given up, not freed, if that is
    /// not known to have happened.
    place: Option<Box<RawCommunicator>>,
}

impl Communicator {
    /// Starts joining the other ranks, on the current device.
    pub(super) fn begin(gpu: &Gpu, id: UniqueId, rank: usize, size: usize) -> Result<Self, String> {
        let (mut raw, mut config) = (std::ptr::null_mut(), Config::non_blocking());
        // SAFETY: both are accessed during the call only.
        let outcome = unsafe {
            let init = gpu.functions.nccl.init_rank;
            init(&raw mut raw, size as c_int, id, rank as c_int, &raw mut config)
        };
        let this = Self { gpu: gpu.clone(), raw, rank };
        this.check("making a communicator", outcome)?;
        Ok(this)
    }

    /// Starts dividing the communicator, whose operations are done, into one for each colour. All ranks
    /// call this; the order of ranks stays.
    pub(super) fn divide(&self, color: c_int) -> Result<Division, String> {
        let (mut place, mut config) = (Box::new(std::ptr::null_mut()), Config::non_blocking());
        // SAFETY: the communicator lives. The configuration is accessed during the call only, and the
        // place stays until the communicator is ready.
        let outcome = unsafe {
            let split = self.gpu.functions.nccl.split;
            split(self.raw, color, self.rank as c_int, &raw mut *place, &raw mut config)
        };
        let division = Division { place: Some(place) };
        self.check("dividing a communicator", outcome)?;
        Ok(division)
    }

    /// Returns the new communicator of a division. This one is ready again.
    pub(super) fn divided(&self, mut division: Division, rank: usize) -> Result<Self, String> {
        let raw = division.place.take().map_or(std::ptr::null_mut(), |place| *place);
        if raw.is_null() {
            return Err("NCCL divided a communicator, but gave no new one".to_owned());
        }
        Ok(Self { gpu: self.gpu.clone(), raw, rank })
    }

    /// Returns whether the last call is done or, for an operation, is in its stream.
    pub(super) fn is_ready(&self) -> Result<bool, String> {
        let mut state = 0;
        // SAFETY: the communicator lives; NCCL writes its state to a valid address.
        let outcome = unsafe { (self.gpu.functions.nccl.async_error)(self.raw, &raw mut state) };
        self.check("asking for the state of a communicator", outcome)?;
        self.check("what was under way", state)?;
        Ok(state != IN_PROGRESS)
    }

    /// Starts several calls as one operation.
    pub(super) fn start_all<'a>(
        &self,
        calls: impl Iterator<Item = (&'a Call, Place, &'a [usize])>,
    ) -> Result<(), String> {
        self.in_group(|| {
            calls.into_iter().try_for_each(|(call, place, counts)| self.start(call, place, counts))
        })
    }

    /// Starts a call in place. A call in parts has `counts` elements for each rank.
    pub(super) fn start(&self, call: &Call, place: Place, counts: &[usize]) -> Result<(), String> {
        let Place { start, stream } = place;
        let (kind, raw, nccl) = (call.kind, self.raw, &self.gpu.functions.nccl);
        let of_type = data_type(kind);
        let at = |element: usize| (start + (element * kind.size()) as u64) as *mut c_void;
        // SAFETY: the callers keep the memory until the stream has come so far. Parts of ranks are in
        // place, as NCCL's in-place operations have them.
        let (what, outcome) = unsafe {
            match call.operation {
                Operation::AllReduce(reduction) => {
                    let op = operation(reduction);
                    ("an all-reduce", (nccl.all_reduce)(at(0), at(0), call.len, of_type, op, raw, stream))
                }
                Operation::ReduceScatter(reduction) => {
                    let op = operation(reduction);
                    return self.parts(counts, |part| match part {
                        Part::OfAll(count) => {
                            let own = at(self.rank * count);
                            let outcome = (nccl.reduce_scatter)(at(0), own, count, of_type, op, raw, stream);
                            ("a reduce-scatter", outcome)
                        }
                        Part::Of { owner, start, count } => {
                            let at = at(start);
                            let outcome = (nccl.reduce)(at, at, count, of_type, op, owner, raw, stream);
                            ("a reduction of a part", outcome)
                        }
                    });
                }
                Operation::AllGather => {
                    return self.parts(counts, |part| match part {
                        Part::OfAll(count) => {
                            let own = at(self.rank * count);
                            ("an all-gather", (nccl.all_gather)(own, at(0), count, of_type, raw, stream))
                        }
                        Part::Of { owner, start, count } => {
                            let at = at(start);
                            let outcome = (nccl.broadcast)(at, at, count, of_type, owner, raw, stream);
                            ("a broadcast of a part", outcome)
                        }
                    });
                }
                Operation::Broadcast { root } => {
                    let (at, root) = (at(0), root as c_int);
                    ("a broadcast", (nccl.broadcast)(at, at, call.len, of_type, root, raw, stream))
                }
                Operation::Send { to } => {
                    ("a message", (nccl.send)(at(0), call.len, of_type, to as c_int, raw, stream))
                }
                Operation::Recv { from } => {
                    ("a message", (nccl.recv)(at(0), call.len, of_type, from as c_int, raw, stream))
                }
                Operation::Barrier | Operation::Split => unreachable!("{call} moves no numbers"),
            }
        };
        self.check(what, outcome)
    }

    /// Starts what moves parts of `counts` elements, several operations as a group.
    fn parts(&self, counts: &[usize], begin: impl Fn(Part) -> (&'static str, c_int)) -> Result<(), String> {
        let start = |part| {
            let (what, outcome) = begin(part);
            self.check(what, outcome)
        };
        let parts = parts(counts);
        match parts[..] {
            [part] => start(part),
            _ => self.in_group(|| parts.iter().copied().try_for_each(start)),
        }
    }

    /// Makes one operation of those that `begin` starts.
    fn in_group(&self, begin: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        let nccl = &self.gpu.functions.nccl;
        // SAFETY: the group is ended below in any case.
        self.check("beginning several operations", unsafe { (nccl.group_start)() })?;
        let begun = begin();
        // SAFETY: this thread began the group above.
        let ended = self.check("several operations", unsafe { (nccl.group_end)() });
        begun.and(ended)
    }

    /// Starts ending the communicator, together with all ranks. When ready it can be destroyed.
    pub(super) fn finalize(&self) -> Result<(), String> {
        // SAFETY: the communicator lives; the engine finalises it once, at its end.
        self.check("finalising a communicator", unsafe { (self.gpu.functions.nccl.finalize)(self.raw) })
    }

    /// Frees a finalised communicator.
    pub(super) fn destroy(mut self) {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        // SAFETY: the communicator lives and is not used afterwards. An error could not be
        // reported.
        unsafe { (self.gpu.functions.nccl.destroy)(raw) };
    }

    fn check(&self, what: &str, outcome: c_int) -> Result<(), String> {
        self.gpu.functions.nccl(what, outcome, self.raw)
    }
}

impl Drop for Communicator {
    /// Aborts on a thread that may go on: what it waits for must not keep this rank from saying why.
    fn drop(&mut self) {
        /// A communicator that another thread ends.
        struct Last(Gpu, RawCommunicator);
        // SAFETY: as for `Communicator`.
        unsafe impl Send for Last {}
        impl Last {
            fn abort(self) {
                let _ = self.0.enter();
                // SAFETY: the communicator lives and is not used afterwards. An error could not be
                // reported.
                unsafe { (self.0.functions.nccl.abort)(self.1) };
            }
        }
        if self.raw.is_null() {
            return;
        }
        let (done, ended) = sync_channel(1);
        let last = || Last(self.gpu.clone(), self.raw);
        let own = last();
        let abort = move || {
            own.abort();
            let _ = done.send(());
        };
        match std::thread::Builder::new().name("abort of NCCL".to_owned()).spawn(abort) {
            // Disconnected is as good as done.
            Ok(_) => drop(ended.recv_timeout(ABORT)),
            Err(_) => last().abort(),
        }
    }
}

impl Drop for Division {
    fn drop(&mut self) {
        // NCCL may still write there.
        self.place.take().map(Box::leak);
    }
}

/// Share of one operation in a buffer that is divided into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// As many elements of each rank, from the start.
    OfAll(usize),
    /// Elements of one rank.
    Of { owner: c_int, start: usize, count: usize },
}

/// Divides parts of `counts` elements into operations: one for equal parts, and another one for what the last
/// rank has beyond; else one for each rank that has any.
fn parts(counts: &[usize]) -> Vec<Part> {
    let (each, last, sum) = (counts[0], counts.len() - 1, counts.iter().sum::<usize>());
    let of = |owner: usize, start, count| Part::Of { owner: owner as c_int, start, count };
    let are_equal = counts[..last].iter().all(|count| *count == each) && counts[last] >= each;
    let parts = if are_equal {
        let even = each * counts.len();
        vec![Part::OfAll(each), of(last, even, sum - even)]
    } else {
        let mut end = 0;
        let part = |(owner, &count): (usize, &usize)| {
            end += count;
            of(owner, end - count, count)
        };
        counts.iter().enumerate().map(part).collect()
    };
    let is_any = |part: &Part| !matches!(part, Part::OfAll(0) | Part::Of { count: 0, .. });
    parts.into_iter().filter(is_any).collect()
}
