//! Which rows of the residual stream are whose, where a decoder is split over ranks.
//!
//! Between the split regions a rank holds its share of the tokens: neighbours, as many as any other's, but for one. Of the
//! rows that the last block goes on with it holds those of its tokens, so nothing has to travel for that; it may hold none.

use std::ops::Range;

use tandem_kernels::{Extent, View};

use super::Walk;
use crate::layout::Slice;

/// For how much of a batch memory is taken where one has less: so that batches of every size take the same memory, at the same
/// places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Tokens.
    pub tokens: usize,
    /// Rows that the head scores.
    pub scored: usize,
}

/// How the rows of a matrix are divided: one rank's after another's.
pub(crate) struct Shares {
    all: Extent,
    own: Range<usize>,
    /// Rows that this rank may have to have room for.
    own_room: usize,
    /// By rank; of no length if nothing is split.
    counts: Vec<usize>,
}

impl Shares {
    /// Rows of the whole matrix.
    pub(super) fn all(&self) -> Extent {
        self.all
    }

    /// This rank's.
    pub(super) fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// How many these are.
    pub(super) fn own_extent(&self) -> Extent {
        Extent::new(self.own.len(), self.own_room)
    }

    /// How many each rank has.
    pub(super) fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// This rank's rows of the whole matrix.
    pub(super) fn own_of<'x>(&self, whole: View<'x>) -> View<'x> {
        whole.row_range(self.own())
    }
}

/// The rows that a block works on.
pub(crate) struct BlockRows {
    /// All tokens, which attention reads.
    pub(super) tokens: Shares,
    picked: Option<Picks>,
}

/// Those that go on after attention, if not all.
struct Picks {
    /// As rows of the token axis.
    all: Vec<u32>,
    /// This rank's, counted from its first token; absent if it has all tokens.
    own: Option<Vec<u32>>,
    shares: Shares,
}

/// Some rows of a matrix.
#[derive(Clone, Copy)]
pub(super) struct SomeRows<'r> {
    /// Which.
    pub(super) rows: &'r [u32],
    /// How many.
    pub(super) extent: Extent,
}

impl BlockRows {
    /// What goes on after attention.
    pub(super) fn after(&self) -> &Shares {
        self.picked.as_ref().map_or(&self.tokens, |picked| &picked.shares)
    }

    /// The rows that go on, if not all.
    pub(super) fn picked(&self) -> Option<SomeRows<'_>> {
        let picked = self.picked.as_ref()?;
        Some(SomeRows { rows: &picked.all, extent: picked.shares.all() })
    }

    /// The same among this rank's tokens.
    pub(super) fn own_picked(&self) -> Option<SomeRows<'_>> {
        let picked = self.picked.as_ref()?;
        let rows = picked.own.as_deref().unwrap_or(&picked.all);
        Some(SomeRows { rows, extent: picked.shares.own_extent() })
    }
}

impl Walk<'_> {
    /// How tokens are divided.
    pub(super) fn shares(&self, num_tokens: usize) -> Shares {
        self.divide(num_tokens, self.room.tokens, |end| end)
    }

    /// How rows of the token axis are divided, which ascend if anything is split: as their tokens are.
    pub(super) fn shares_of(&self, rows: &[u32], num_tokens: usize) -> Shares {
        debug_assert!(self.split.is_none() || rows.is_sorted(), "rows of one rank follow one another");
        let room = self.room.scored;
        if self.split.is_none() {
            return self.divide(rows.len(), room, |end| end);
        }
        self.divide(num_tokens, room, |end| rows.partition_point(|&row| (row as usize) < end))
    }

    /// Each rank's rows end where `end` puts the end of its tokens. There is to be room for `room` of all ranks'.
    fn divide(&self, num_tokens: usize, room: usize, end: impl Fn(usize) -> usize) -> Shares {
        let Slice { index, count } = self.decoder.slice();
        let tokens = |index| Slice { index, count }.of(num_tokens);
        let own = end(tokens(index).start)..end(tokens(index).end);
        let counts = if count == 1 {
            Vec::new()
        } else {
            (0..count).map(tokens).map(|tokens| end(tokens.end) - end(tokens.start)).collect()
        };
        // All that are scored may be of one rank's tokens.
        let own_room = if count == 1 { room } else { room.min(self.room.tokens.div_ceil(count)) };
        Shares { all: Extent::new(end(num_tokens), room), own, own_room, counts }
    }

    /// The rows of a block over `num_tokens` tokens, of which `rows` go on after attention, or all.
    pub(super) fn block_rows(&self, num_tokens: usize, rows: Option<&[u32]>) -> BlockRows {
        let tokens = self.shares(num_tokens);
        let picked = rows.map(|rows| {
            let shares = self.shares_of(rows, num_tokens);
            let first = tokens.own.start as u32;
            let own =
                self.split.is_some().then(|| rows[shares.own()].iter().map(|row| row - first).collect());
            Picks { all: rows.to_vec(), own, shares }
        });
        BlockRows { tokens, picked }
    }
}
