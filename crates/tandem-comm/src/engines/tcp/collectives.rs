//! Algorithms of the collectives, by the size of the buffer and the type of the elements.
//!
//! Small reductions gather all buffers in `⌈log₂ N⌉` rounds, and every rank reduces them itself.
//! Large ones go round the ring. Both add part `p` in the order of ranks `p+1, p+2, …, p`, so the
//! bits of a sum of floats do not depend on the length. Sums of integers and maxima have no order:
//! between the two sizes they take `2·⌈log₂ N⌉` rounds on the circulant graph.

use std::ops::Range;

use super::Fault;
use super::engine::{Buffers, Tcp};
use super::flow::Flow;
use super::schedule::{Round, after, append_parts, append_ring, before, rounds};
use crate::collective::call::Call;
use crate::collective::element::{ElementKind, Reduction, reduce};

/// Maximum bytes of all ranks' buffers in a reduction that gathers them.
pub(super) const GATHERED_BYTES: usize = 64 << 10;
/// Mean bytes of a part from which on the ring is faster than fewer, longer rounds.
const RING_PART: usize = 64 << 10;

impl Buffers {
    /// Sets the parts of a buffer with `counts` elements a rank.
    pub(super) fn set_parts(&mut self, call: &Call, counts: &[usize]) {
        self.parts.clear();
        self.parts.extend(call.places(counts));
    }

    /// Sets parts of nearly equal numbers of elements.
    pub(super) fn set_even_parts(&mut self, len: usize, width: usize, size: usize) {
        let end = |rank: usize| len * rank / size * width;
        self.parts.clear();
        self.parts.extend((0..size).map(|rank| end(rank)..end(rank + 1)));
    }
}

/// Whether a reduction gives the same bits in any order.
fn is_exact(kind: ElementKind, reduction: Reduction) -> bool {
    reduction == Reduction::Max || matches!(kind, ElementKind::I64 | ElementKind::U8)
}

impl Tcp {
    /// All-reduce.
    pub(super) fn reduce_to_all(&mut self, call: &Call, data: &mut [u8]) -> Result<(), Fault> {
        let (rank, size) = (self.member().rank, self.member().size());
        self.buffers.set_even_parts(call.len, call.kind.size(), size);
        if size == 1 {
            return Ok(());
        }
        if data.len() * size <= GATHERED_BYTES {
            return self.reduce_gathered(call, data, 0..size);
        }
        if is_exact(call.kind, call.reduction()) && data.len() / size < RING_PART {
            self.reduce_in_rounds(call, data)?;
            return self.gather_in_rounds(call.kind, data);
        }
        let num_steps = 2 * (size - 1);
        self.go_round(call.kind, data, before(rank, 1, size), num_steps, Some((call.reduction(), size - 1)))
    }

    /// Reduce-scatter in the parts of the buffers.
    pub(super) fn reduce_to_parts(&mut self, call: &Call, data: &mut [u8]) -> Result<(), Fault> {
        let (rank, size) = (self.member().rank, self.member().size());
        if size == 1 {
            return Ok(());
        }
        if data.len() * size <= GATHERED_BYTES {
            return self.reduce_gathered(call, data, rank..rank + 1);
        }
        if is_exact(call.kind, call.reduction()) && data.len() / size < RING_PART {
            return self.reduce_in_rounds(call, data);
        }
        self.go_round(call.kind, data, before(rank, 1, size), size - 1, Some((call.reduction(), size - 1)))
    }

    /// All-gather of the parts of the buffers.
    pub(super) fn gather(&mut self, kind: ElementKind, data: &mut [u8]) -> Result<(), Fault> {
        let (rank, size) = (self.member().rank, self.member().size());
        if size == 1 {
            return Ok(());
        }
        if data.len() / size < RING_PART {
            return self.gather_in_rounds(kind, data);
        }
        self.go_round(kind, data, rank, size - 1, None)
    }

    /// Broadcast.
    pub(super) fn send_to_all(
        &mut self,
        kind: ElementKind,
        root: usize,
        data: &mut [u8],
    ) -> Result<(), Fault> {
        let (rank, size) = (self.member().rank, self.member().size());
        let (distance, whole) = (before(rank, root, size), [Range { start: 0, end: data.len() }]);
        let Self { wire, buffers, .. } = self;
        if data.len() >= RING_PART {
            let to = (distance + 1 < size).then_some((after(rank, 1, size), &whole[..]));
            let from = (distance > 0).then_some((before(rank, 1, size), &whole[..]));
            let forwards = (distance > 0).then_some(0);
            return wire.flow(&Flow { kind, to, from, reduces: None, forwards }, data, &mut buffers.room);
        }
        // In each round the ranks that have the buffer send it to those at a distance of the skip.
        for Round { skip, larger } in rounds(size).rev() {
            let to = (distance < larger - skip).then_some((after(rank, skip, size), &whole[..]));
            let receives = (skip..larger).contains(&distance);
            let from = receives.then_some((before(rank, skip, size), &whole[..]));
            if to.is_some() || from.is_some() {
                let flow = Flow { kind, to, from, reduces: None, forwards: None };
                wire.flow(&flow, data, &mut buffers.room)?;
            }
        }
        Ok(())
    }

    /// Sends part `first` to the next rank, and each part that comes from the rank before, up to
    /// the last.
    fn go_round(
        &mut self,
        kind: ElementKind,
        data: &mut [u8],
        first: usize,
        num_steps: usize,
        reduces: Option<(Reduction, usize)>,
    ) -> Result<(), Fault> {
        let (rank, size) = (self.member().rank, self.member().size());
        let Self { wire, buffers: Buffers { parts, outgoing, incoming, room, .. }, .. } = self;
        incoming.clear();
        append_ring(incoming, parts, first, num_steps);
        outgoing.clear();
        outgoing.push(parts[first].clone());
        outgoing.extend_from_slice(&incoming[..num_steps - 1]);
        let to = Some((after(rank, 1, size), &outgoing[..]));
        let from = Some((before(rank, 1, size), &incoming[..]));
        wire.flow(&Flow { kind, to, from, reduces, forwards: Some(1) }, data, room)
    }

    /// Reduce-scatter on the circulant graph.
    fn reduce_in_rounds(&mut self, call: &Call, data: &mut [u8]) -> Result<(), Fault> {
        let (rank, size) = (self.member().rank, self.member().size());
        let Self { wire, buffers: Buffers { parts, outgoing, incoming, room, .. }, .. } = self;
        for Round { skip, larger } in rounds(size) {
            let (to, from) = (after(rank, skip, size), before(rank, skip, size));
            outgoing.clear();
            append_parts(outgoing, parts, to, larger - skip);
            incoming.clear();
            append_parts(incoming, parts, rank, larger - skip);
            let flow = Flow {
                kind: call.kind,
                to: Some((to, outgoing)),
                from: Some((from, incoming)),
                reduces: Some((call.reduction(), incoming.len())),
                forwards: None,
            };
            wire.flow(&flow, data, room)?;
        }
        Ok(())
    }

    /// All-gather on the circulant graph.
    fn gather_in_rounds(&mut self, kind: ElementKind, data: &mut [u8]) -> Result<(), Fault> {
        let (rank, size) = (self.member().rank, self.member().size());
        let Self { wire, buffers: Buffers { parts, outgoing, incoming, room, .. }, .. } = self;
        for Round { skip, larger } in rounds(size).rev() {
            let (to, from) = (after(rank, skip, size), before(rank, skip, size));
            let count = larger - skip;
            outgoing.clear();
            append_parts(outgoing, parts, before(rank, count - 1, size), count);
            incoming.clear();
            append_parts(incoming, parts, before(from, count - 1, size), count);
            let (to, from) = (Some((to, &outgoing[..])), Some((from, &incoming[..])));
            wire.flow(&Flow { kind, to, from, reduces: None, forwards: None }, data, room)?;
        }
        Ok(())
    }

    /// Gathers the whole buffers and reduces the parts of the ranks `wanted`, each in the order of
    /// the ring.
    fn reduce_gathered(&mut self, call: &Call, data: &mut [u8], wanted: Range<usize>) -> Result<(), Fault> {
        let (rank, size) = (self.member().rank, self.member().size());
        let (spare, mut words) =
            (std::mem::take(&mut self.buffers.spare), std::mem::take(&mut self.buffers.gathered));
        let parts = std::mem::replace(&mut self.buffers.parts, spare);
        // Buffers begin where every element is aligned.
        let len = data.len().next_multiple_of(8);
        words.resize(len * size / 8, 0);
        let gathered: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        gathered[rank * len..][..data.len()].copy_from_slice(data);
        self.buffers.set_even_parts(size, len, size);
        let done = self.gather_in_rounds(ElementKind::U8, gathered);
        if done.is_ok() {
            for part in wanted {
                let place = parts[part].clone();
                for step in 1..=size {
                    let from = after(part, step, size);
                    let theirs = &gathered[from * len..][place.clone()];
                    if step == 1 {
                        data[place.clone()].copy_from_slice(theirs);
                    } else {
                        reduce(call.kind, call.reduction(), &mut data[place.clone()], theirs);
                    }
                }
            }
        }
        self.buffers.gathered = words;
        self.buffers.spare = std::mem::replace(&mut self.buffers.parts, parts);
        done
    }
}
