//! Collectives of MPI itself, cut into segments: exact sums, gathers and broadcasts.
//!
//! Several segments are under way at a time, begun in the same order on all ranks. Counts of
//! segments are short, so a buffer may have more than 2³¹ elements. The first round carries marks.

use std::ops::Range;

use super::communicator::{Communicator, Failed, Fold, Number, Request};
use super::mark::{MARK, Mark};
use super::segments::{SEGMENT, Segment, Segments};
use super::wait::{Fault, Wait};
use crate::collective::element::Reduction;

/// Number of segments under way.
pub(super) const DEPTH: usize = 3;
/// Fewest bytes of a part in a segment, where there are many parts.
pub(super) const MIN_PART: usize = 16 << 10;

/// Most bytes of numbers in a segment.
const ROOM: usize = SEGMENT - MARK;

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
    /// Reads the result of a round. Fails if another rank's mark differs.
    fn end(&mut self, round: usize, segment: &Segment) -> Result<(), Fault>;
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
        collective.end(round, &segment)?;
        segments.put(segment);
    }
    Ok(())
}

/// Reduction of 64-bit integers, which is exact in any order.
pub(super) struct IntegerAllReduce<'a> {
    pub(super) data: &'a mut [u8],
    pub(super) reduction: Reduction,
    pub(super) size: usize,
    pub(super) mark: Mark,
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

/// Returns the bytes of a mark in a round.
fn mark_len(round: usize) -> usize {
    if round == 0 { MARK } else { 0 }
}

impl Staged for IntegerAllReduce<'_> {
    fn num_rounds(&self) -> usize {
        self.data.len().div_ceil(ROOM)
    }

    fn begin(&mut self, round: usize, to: &Communicator, pool: &Segments) -> Result<Request, Failed> {
        let own = &self.data[piece(&(0..self.data.len()), round, ROOM)];
        let mut segment = pool.take(own.len() + MARK);
        segment.bytes_mut()[..own.len()].copy_from_slice(own);
        self.mark.write(segment.bytes_mut(), own.len());
        let (number, fold) = integers(self.reduction);
        to.all_reduce(segment, (own.len() + mark_len(round)) / 8, number, fold)
    }

    fn end(&mut self, round: usize, segment: &Segment) -> Result<(), Fault> {
        let range = piece(&(0..self.data.len()), round, ROOM);
        let len = range.len();
        if round == 0 {
            self.mark.check_reduced(segment.bytes(), len, self.reduction, self.size)?;
        }
        self.data[range].copy_from_slice(&segment.bytes()[..len]);
        Ok(())
    }
}

/// Broadcast.
pub(super) struct Broadcast<'a> {
    pub(super) data: &'a mut [u8],
    pub(super) root: usize,
    pub(super) is_root: bool,
    pub(super) mark: Mark,
}

impl Staged for Broadcast<'_> {
    fn num_rounds(&self) -> usize {
        self.data.len().div_ceil(ROOM)
    }

    fn begin(&mut self, round: usize, to: &Communicator, pool: &Segments) -> Result<Request, Failed> {
        let own = &self.data[piece(&(0..self.data.len()), round, ROOM)];
        let mut segment = pool.take(own.len() + MARK);
        if self.is_root {
            segment.bytes_mut()[..own.len()].copy_from_slice(own);
            self.mark.write(segment.bytes_mut(), own.len());
        }
        to.broadcast(segment, own.len() + mark_len(round), self.root)
    }

    fn end(&mut self, round: usize, segment: &Segment) -> Result<(), Fault> {
        let range = piece(&(0..self.data.len()), round, ROOM);
        let len = range.len();
        if self.is_root {
            return Ok(());
        }
        if round == 0 {
            self.mark.check(segment.bytes(), len)?;
        }
        self.data[range].copy_from_slice(&segment.bytes()[..len]);
        Ok(())
    }
}

/// A collective over all ranks' parts, of which a segment has a piece of each.
pub(super) struct Parts<'a> {
    pub(super) data: &'a mut [u8],
    /// Byte ranges of the parts.
    pub(super) parts: &'a [Range<usize>],
    pub(super) rank: usize,
    pub(super) mark: Mark,
}

impl Parts<'_> {
    fn chunk(&self) -> usize {
        (SEGMENT / self.parts.len()).max(MIN_PART) / 8 * 8 - MARK
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
        let Parts { data, rank, mark, .. } = &self.0;
        let pieces = self.0.pieces(round);
        let lens: Vec<usize> = pieces.iter().map(|piece| piece.len() + mark_len(round)).collect();
        let mut segment = pool.take(lens.iter().sum());
        let start = lens[..*rank].iter().sum::<usize>();
        let (own, piece) =
            (&mut segment.bytes_mut()[start..start + lens[*rank]], &data[pieces[*rank].clone()]);
        own[..piece.len()].copy_from_slice(piece);
        if round == 0 {
            mark.write(own, piece.len());
        }
        to.all_gather(segment, &lens)
    }

    fn end(&mut self, round: usize, segment: &Segment) -> Result<(), Fault> {
        let pieces = self.0.pieces(round);
        let mut come = segment.bytes();
        for (owner, piece) in pieces.into_iter().enumerate() {
            let len = piece.len();
            if round == 0 {
                self.0.mark.check(come, len)?;
            }
            if owner != self.0.rank {
                self.0.data[piece].copy_from_slice(&come[..len]);
            }
            come = &come[len + mark_len(round)..];
        }
        Ok(())
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
        let lens: Vec<usize> = pieces.iter().map(|piece| piece.len() + mark_len(round)).collect();
        let mut segment = pool.take(lens.iter().sum());
        let mut room = segment.bytes_mut();
        for (piece, &len) in pieces.iter().zip(&lens) {
            let (own, rest) = room.split_at_mut(len);
            own[..piece.len()].copy_from_slice(&self.parts.data[piece.clone()]);
            if round == 0 {
                self.parts.mark.write(own, piece.len());
            }
            room = rest;
        }
        let counts: Vec<usize> = lens.iter().map(|len| len / 8).collect();
        let (number, fold) = integers(self.reduction);
        to.reduce_scatter(segment, &counts, number, fold)
    }

    fn end(&mut self, round: usize, segment: &Segment) -> Result<(), Fault> {
        let Parts { parts, rank, mark, .. } = self.parts;
        let own = self.parts.pieces(round).swap_remove(rank);
        let len = own.len();
        if round == 0 {
            mark.check_reduced(segment.bytes(), len, self.reduction, parts.len())?;
        }
        self.parts.data[own].copy_from_slice(&segment.bytes()[..len]);
        Ok(())
    }
}
