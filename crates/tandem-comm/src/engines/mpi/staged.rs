//! Collectives of MPI itself, cut into segments: exact sums, gathers and broadcasts.
//!
//! Several segments are under way at a time, begun in the same order on all ranks. Counts of
//! segments are short, so a buffer may have more than 2³¹ elements.

use std::ops::Range;

use super::communicator::{Communicator, Failed, Fold, Number, Request};
use super::segments::{SEGMENT, Segment, Segments};
use super::wait::{Fault, Wait};
use crate::collective::element::Reduction;

/// Number of segments under way.
pub(super) const DEPTH: usize = 3;
/// Fewest bytes of a part in a segment, where there are many parts.
pub(super) const MIN_PART: usize = 16 << 10;

/// A collective in rounds of a segment each.
pub(super) trait Staged {
    fn num_rounds(&self) -> usize;
    /// Fills a segment and starts a round.
    fn begin(
        &mut self,
        round: usize,
        communicator: &Communicator,
        pool: &Segments,
    ) -> Result<Request, Failed>;
    /// Reads the result of a round.
    fn end(&mut self, round: usize, segment: &Segment);
}

/// Runs all rounds.
pub(super) fn run(
    collective: &mut dyn Staged,
    communicator: &Communicator,
    segments: &Segments,
    wait: &mut Wait,
) -> Result<(), Fault> {
    let num_rounds = collective.num_rounds();
    let mut under_way = std::collections::VecDeque::with_capacity(DEPTH);
    let mut begun = 0;
    for round in 0..num_rounds {
        while begun < num_rounds.min(round + DEPTH) {
            under_way.push_back(collective.begin(begun, communicator, segments)?);
            begun += 1;
        }
        let mut request = under_way.pop_front().expect("a round is begun before it is awaited");
        wait.until_done(&mut request)?;
        let segment = communicator.memory(&mut request);
        collective.end(round, &segment);
        segments.put(segment);
    }
    Ok(())
}

/// Reduction of 64-bit integers, which is exact in any order.
pub(super) struct IntegerAllReduce<'a> {
    pub(super) data: &'a mut [u8],
    pub(super) reduction: Reduction,
}

/// Returns MPI's name of a reduction of 64-bit integers. Sums wrap: unsigned numbers do so by the
/// rules of C, with the same bits.
fn integers(reduction: Reduction) -> (Number, Fold) {
    match reduction {
        Reduction::Sum => (Number::U64, Fold::Sum),
        Reduction::Max => (Number::I64, Fold::Max),
    }
}

/// Returns the bytes of round `round` in `whole`, of `chunk` bytes each.
fn piece(whole: &Range<usize>, round: usize, chunk: usize) -> Range<usize> {
    let start = (whole.start + round * chunk).min(whole.end);
    start..(start + chunk).min(whole.end)
}

impl Staged for IntegerAllReduce<'_> {
    fn num_rounds(&self) -> usize {
        self.data.len().div_ceil(SEGMENT)
    }

    fn begin(&mut self, round: usize, to: &Communicator, pool: &Segments) -> Result<Request, Failed> {
        let own = &self.data[piece(&(0..self.data.len()), round, SEGMENT)];
        let mut segment = pool.take(own.len());
        segment.bytes_mut()[..own.len()].copy_from_slice(own);
        let (number, fold) = integers(self.reduction);
        to.all_reduce(segment, own.len() / 8, number, fold)
    }

    fn end(&mut self, round: usize, segment: &Segment) {
        let range = piece(&(0..self.data.len()), round, SEGMENT);
        let len = range.len();
        self.data[range].copy_from_slice(&segment.bytes()[..len]);
    }
}

/// Broadcast.
pub(super) struct Broadcast<'a> {
    pub(super) data: &'a mut [u8],
    pub(super) root: usize,
    pub(super) is_root: bool,
}

impl Staged for Broadcast<'_> {
    fn num_rounds(&self) -> usize {
        self.data.len().div_ceil(SEGMENT)
    }

    fn begin(&mut self, round: usize, to: &Communicator, pool: &Segments) -> Result<Request, Failed> {
        let own = &self.data[piece(&(0..self.data.len()), round, SEGMENT)];
        let mut segment = pool.take(own.len());
        if self.is_root {
            segment.bytes_mut()[..own.len()].copy_from_slice(own);
        }
        to.broadcast(segment, own.len(), self.root)
    }

    fn end(&mut self, round: usize, segment: &Segment) {
        let range = piece(&(0..self.data.len()), round, SEGMENT);
        let len = range.len();
        if !self.is_root {
            self.data[range].copy_from_slice(&segment.bytes()[..len]);
        }
    }
}

/// A collective over all ranks' parts, of which a segment has a piece of each.
pub(super) struct Parts<'a> {
    pub(super) data: &'a mut [u8],
    /// Byte ranges of the parts.
    pub(super) parts: &'a [Range<usize>],
    pub(super) rank: usize,
}

impl Parts<'_> {
    fn chunk(&self) -> usize {
        (SEGMENT / self.parts.len()).max(MIN_PART) / 8 * 8
    }

    fn num_rounds(&self) -> usize {
        let chunk = self.chunk();
        self.parts.iter().map(|part| part.len().div_ceil(chunk)).max().unwrap_or(0)
    }

    fn pieces(&self, round: usize) -> Vec<Range<usize>> {
        let chunk = self.chunk();
        self.parts.iter().map(|part| piece(part, round, chunk)).collect()
    }
}

/// Gather of every rank's part.
pub(super) struct AllGather<'a>(pub(super) Parts<'a>);

impl Staged for AllGather<'_> {
    fn num_rounds(&self) -> usize {
        self.0.num_rounds()
    }

    fn begin(&mut self, round: usize, to: &Communicator, pool: &Segments) -> Result<Request, Failed> {
        let Parts { data, rank, .. } = &self.0;
        let pieces = self.0.pieces(round);
        let lens: Vec<usize> = pieces.iter().map(Range::len).collect();
        let mut segment = pool.take(lens.iter().sum());
        let start = lens[..*rank].iter().sum::<usize>();
        segment.bytes_mut()[start..start + lens[*rank]].copy_from_slice(&data[pieces[*rank].clone()]);
        to.all_gather(segment, &lens)
    }

    fn end(&mut self, round: usize, segment: &Segment) {
        let mut start = 0;
        for (owner, piece) in self.0.pieces(round).into_iter().enumerate() {
            let end = start + piece.len();
            if owner != self.0.rank {
                self.0.data[piece].copy_from_slice(&segment.bytes()[start..end]);
            }
            start = end;
        }
    }
}

/// Reduction of 64-bit integers, for every rank its part.
pub(super) struct IntegerReduceScatter<'a> {
    pub(super) parts: Parts<'a>,
    pub(super) reduction: Reduction,
}

impl Staged for IntegerReduceScatter<'_> {
    fn num_rounds(&self) -> usize {
        self.parts.num_rounds()
    }

    fn begin(&mut self, round: usize, to: &Communicator, pool: &Segments) -> Result<Request, Failed> {
        let pieces = self.parts.pieces(round);
        let mut segment = pool.take(pieces.iter().map(Range::len).sum());
        let mut start = 0;
        for piece in &pieces {
            let end = start + piece.len();
            segment.bytes_mut()[start..end].copy_from_slice(&self.parts.data[piece.clone()]);
            start = end;
        }
        let counts: Vec<usize> = pieces.iter().map(|piece| piece.len() / 8).collect();
        let (number, fold) = integers(self.reduction);
        to.reduce_scatter(segment, &counts, number, fold)
    }

    fn end(&mut self, round: usize, segment: &Segment) {
        let own = self.parts.pieces(round).swap_remove(self.parts.rank);
        let len = own.len();
        self.parts.data[own].copy_from_slice(&segment.bytes()[..len]);
    }
}
