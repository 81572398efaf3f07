//! Division of the residual stream's rows over tensor-parallel ranks.
//!
//! Between the sharded regions a rank holds contiguous tokens, as many as any other rank but for
//! one ([`TensorParallelShard::token_part`]). Of the rows that the last block computes after attention it holds those of its tokens, so
//! no row travels; it may hold none.

use std::ops::Range;

use tandem_kernels::{Extent, View};

use super::LayerExecutor;
use crate::layout::TensorParallelShard;

/// Batch capacity that memory is allocated for, so that batches of every size use the same memory
/// at the same addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCapacity {
    /// Largest number of tokens.
    pub tokens: usize,
    /// Largest number of scored rows.
    pub scored: usize,
}

/// Rows of a matrix by rank, contiguous and in the order of the ranks' parts.
pub(crate) struct SequenceParallelRows {
    all: Extent,
    own: Range<usize>,
    /// Capacity of this rank's rows.
    own_room: usize,
    /// Rows of each part of the tokens; empty without tensor parallelism.
    counts: Vec<usize>,
    /// Blocks of this rank's rows, counted from the first of them, over which the gradients of norms are
    /// summed.
    blocks: Vec<Range<usize>>,
}

impl SequenceParallelRows {
    /// Returns the rows of the whole matrix.
    pub(super) fn all(&self) -> Extent {
        self.all
    }

    /// Returns this rank's rows.
    pub(super) fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// Returns the number of this rank's rows.
    pub(super) fn own_extent(&self) -> Extent {
        Extent::new(self.own.len(), self.own_room)
    }

    pub(super) fn counts(&self) -> &[usize] {
        &self.counts
    }

    /// Returns the blocks of this rank's rows.
    pub(super) fn blocks(&self) -> &[Range<usize>] {
        &self.blocks
    }

    /// Views this rank's rows of the whole matrix.
    pub(super) fn own_of<'x>(&self, whole: View<'x>) -> View<'x> {
        whole.row_range(self.own())
    }
}

/// Rows that a block computes.
pub(crate) struct BlockRows {
    /// Tokens, which attention reads.
    pub(super) tokens: SequenceParallelRows,
    picked: Option<Picks>,
}

/// Rows that go on after attention, if not all.
struct Picks {
    /// Rows of the token axis.
    all: Vec<u32>,
    /// This rank's rows, counted from its first token; absent if it has all tokens.
    own: Option<Vec<u32>>,
    shares: SequenceParallelRows,
}

/// Some rows of a matrix.
#[derive(Clone, Copy)]
pub(super) struct SomeRows<'r> {
    pub(super) rows: &'r [u32],
    /// Number.
    pub(super) extent: Extent,
}

impl BlockRows {
    /// Returns the division of the rows that go on after attention.
    pub(super) fn after(&self) -> &SequenceParallelRows {
        self.picked.as_ref().map_or(&self.tokens, |picked| &picked.shares)
    }

    /// Returns the rows that go on, if not all.
    pub(super) fn picked(&self) -> Option<SomeRows<'_>> {
        let picked = self.picked.as_ref()?;
        Some(SomeRows { rows: &picked.all, extent: picked.shares.all() })
    }

    /// Returns the rows that go on among this rank's tokens.
    pub(super) fn own_picked(&self) -> Option<SomeRows<'_>> {
        let picked = self.picked.as_ref()?;
        let rows = picked.own.as_deref().unwrap_or(&picked.all);
        Some(SomeRows { rows, extent: picked.shares.own_extent() })
    }
}

impl LayerExecutor<'_> {
    /// Divides tokens over ranks.
    pub(super) fn shares(&self, num_tokens: usize) -> SequenceParallelRows {
        self.divide(num_tokens, self.room.tokens, |end| end)
    }

    /// Divides rows of the token axis over ranks as their tokens; under tensor parallelism they
    /// ascend.
    pub(super) fn shares_of(&self, rows: &[u32], num_tokens: usize) -> SequenceParallelRows {
        debug_assert!(self.split.is_none() || rows.is_sorted(), "rows of one rank follow one another");
        let room = self.room.scored;
        if !rows.is_sorted() {
            return self.divide(rows.len(), room, |end| end);
        }
        self.divide(num_tokens, room, |end| rows.partition_point(|&row| (row as usize) < end))
    }

    /// Divides rows: a rank's end where `end` maps the end of its tokens. `room` is the capacity of
    /// all ranks together.
    fn divide(&self, num_tokens: usize, room: usize, end: impl Fn(usize) -> usize) -> SequenceParallelRows {
        let (slice, blocks) = (self.decoder.slice(), self.decoder.sum_blocks());
        let (part, count) = (slice.token_part(), slice.count);
        let tokens = |index| TensorParallelShard { index, count }.range(num_tokens);
        let own = end(tokens(part).start)..end(tokens(part).end);
        let rows = |tokens: Range<usize>| end(tokens.start) - own.start..end(tokens.end) - own.start;
        let blocks = match blocks.of_tokens(part, num_tokens) {
            Some(blocks) => blocks.into_iter().map(rows).collect(),
            None => std::iter::once(0..own.len()).collect(),
        };
        let counts = if count == 1 {
            Vec::new()
        } else {
            (0..count).map(tokens).map(|tokens| end(tokens.end) - end(tokens.start)).collect()
        };
        // All scored rows may be of one rank's tokens.
        let own_room = if count == 1 { room } else { room.min(self.room.tokens.div_ceil(count)) };
        SequenceParallelRows { all: Extent::new(end(num_tokens), room), own, own_room, counts, blocks }
    }

    /// Returns the rows of a block over `num_tokens` tokens, of which `rows`, or all, go on after
    /// attention.
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
