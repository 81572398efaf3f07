//! Ring collectives: every rank receives from its predecessor and sends to its successor.
//!
//! Buffers travel in segments. A received and reduced segment is forwarded while the next ones
//! arrive, so connections and cores work at the same time. In a reduce-scatter and an all-gather
//! each rank sends `(N−1)/N` of the buffer, the minimum. Part `p` is summed in the order of ranks
//! `p+1, p+2, …, p`, by one rank after another, and the result is copied: all ranks get the same
//! bits.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::mesh::{Fault, FullMesh, Slot};
use crate::collective::element::{ElementKind, Reduction, reduce};

/// Bytes of a segment: small enough for the cache, large for a TCP connection, and a multiple of
/// every element's size.
const SEGMENT: usize = 1 << 20;
/// Number of segments that a rank is ready to receive at once.
const WINDOW: usize = 3;

/// One rank's position in the ring.
pub(super) struct Ring<'a> {
    pub(super) mesh: &'a Arc<FullMesh>,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Deadline of one segment.
    pub(super) deadline: Duration,
}

/// An incoming segment, and whether it is forwarded.
struct Incoming {
    bytes: Range<usize>,
    forward: bool,
}

impl Ring<'_> {
    /// Reduces this rank's part of `data`; other parts may be partially reduced afterwards.
    pub(super) fn reduce_scatter(
        &self,
        kind: ElementKind,
        reduction: Reduction,
        data: &mut [u8],
        parts: &[Range<usize>],
        scratch: &mut Vec<u64>,
    ) -> Result<(), Fault> {
        let first = (self.rank + self.size - 1) % self.size;
        let (own, incoming) = self.rotation(first, parts);
        self.relay(data, &own, &incoming, Some((kind, reduction, scratch)))
    }

    /// Replaces every part of `data` by its owner's.
    pub(super) fn all_gather(&self, data: &mut [u8], parts: &[Range<usize>]) -> Result<(), Fault> {
        let (own, incoming) = self.rotation(self.rank, parts);
        self.relay(data, &own, &incoming, None)
    }

    /// Replaces all of `data` by the root's.
    pub(super) fn broadcast(&self, root: usize, data: &mut [u8]) -> Result<(), Fault> {
        let (hops, whole) = ((self.rank + self.size - root) % self.size, 0..data.len());
        let last = hops + 1 == self.size;
        if hops == 0 {
            let own = if last { Vec::new() } else { segments(&whole).collect() };
            return self.relay(data, &own, &[], None);
        }
        let incoming = segments(&whole).map(|bytes| Incoming { bytes, forward: !last });
        self.relay(data, &[], &incoming.collect::<Vec<_>>(), None)
    }

    /// Schedules a rotation: step `s` sends part `first − s` and receives part `first − s − 1`,
    /// which the next step sends.
    fn rotation(&self, first: usize, parts: &[Range<usize>]) -> (Vec<Range<usize>>, Vec<Incoming>) {
        let part = |steps: usize| &parts[(first + self.size - steps) % self.size];
        if self.size == 1 {
            return (Vec::new(), Vec::new());
        }
        let incoming = (1..self.size).flat_map(|step| {
            let forward = step + 1 < self.size;
            segments(part(step)).map(move |bytes| Incoming { bytes, forward })
        });
        (segments(part(0)).collect(), incoming.collect())
    }

    /// Sends `own` and receives `incoming`, in order. Each incoming segment is reduced into its
    /// place, or copied.
    fn relay(
        &self,
        data: &mut [u8],
        own: &[Range<usize>],
        incoming: &[Incoming],
        mut reducing: Option<(ElementKind, Reduction, &mut Vec<u64>)>,
    ) -> Result<(), Fault> {
        let (next, before) = ((self.rank + 1) % self.size, (self.rank + self.size - 1) % self.size);
        let len = data.len();
        let place = data.as_mut_ptr();
        if let Some((_, _, scratch)) = &mut reducing {
            scratch.resize(WINDOW * SEGMENT / 8, 0);
        }
        let room = reducing.as_mut().map(|(_, _, scratch)| scratch.as_mut_ptr().cast::<u8>());
        let send = |bytes: &Range<usize>| {
            assert!(bytes.end <= len, "a segment outside of its buffer");
            // SAFETY: within `data`. A segment is sent after its last write in this call, and all
            // transfers are dropped before it returns.
            unsafe { self.mesh.send(next, Slot::Data, place.add(bytes.start), bytes.len()) }
        };
        let scratch_of = |i: usize, room: *mut u8| room.wrapping_add(i % WINDOW * SEGMENT);
        let recv = |i: usize| {
            let bytes = &incoming[i].bytes;
            assert!(bytes.end <= len && bytes.len() <= SEGMENT, "a segment outside of its buffer");
            // SAFETY: a scratch segment, free since segment `i − WINDOW` was reduced; or the place
            // in `data`, which is received once and not used before.
            unsafe {
                let to = room.map_or(place.add(bytes.start), |room| scratch_of(i, room));
                self.mesh.recv(before, Slot::Data, to, bytes.len())
            }
        };
        let mut sending = own.iter().map(send).collect::<Result<Vec<_>, _>>()?;
        let mut receiving = (0..incoming.len().min(WINDOW)).map(recv).collect::<Result<VecDeque<_>, _>>()?;
        for (i, Incoming { bytes, forward }) in incoming.iter().enumerate() {
            let transfer = receiving.pop_front().expect("one is under way for each that is to come");
            transfer.wait(self.deadline)?;
            if let (Some((kind, reduction, _)), Some(room)) = (&reducing, room) {
                // SAFETY: both lie within their buffers, and no transfer uses either: this segment
                // has arrived and is forwarded below.
                let (into, from) = unsafe {
                    let into = std::slice::from_raw_parts_mut(place.add(bytes.start), bytes.len());
                    (into, std::slice::from_raw_parts(scratch_of(i, room), bytes.len()))
                };
                reduce(*kind, *reduction, into, from);
            }
            if *forward {
                sending.push(send(bytes)?);
            }
            if i + WINDOW < incoming.len() {
                receiving.push_back(recv(i + WINDOW)?);
            }
        }
        sending.into_iter().try_for_each(|transfer| transfer.wait(self.deadline))
    }
}

fn segments(part: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = part.end;
    part.clone().step_by(SEGMENT).map(move |start| start..end.min(start + SEGMENT))
}
