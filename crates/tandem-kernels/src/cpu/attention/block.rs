//! Blocks of queries, strips of keys, and their packing.

use std::ops::Range;

use crate::cpu::elementary::softcap;
use crate::cpu::vector::{Vector, for_lanes};
use crate::ops::AttentionShape;
use crate::{Element, Forest, View};

/// Approximate rows (queries × heads of a group) per block.
const ROWS: usize = 192;

/// Keys of a strip that all queries of the block see.
pub(super) const KEYS: usize = 96;

/// Padding of packed rows and columns, and keys of a strip on the diagonal, where half of the work
/// is masked. Padding rows are zeros, which keeps their scores finite; padding columns reach no
/// result.
#[derive(Clone, Copy)]
struct Unit {
    padding: usize,
    diagonal_keys: usize,
}

/// For the widest register.
const OF_REGISTERS: Unit = Unit { padding: 16, diagonal_keys: 24 };

/// For the square of tile registers.
const OF_TILES: Unit = Unit { padding: 32, diagonal_keys: 32 };

/// Consecutive queries of one segment.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub segment: usize,
    /// Row of the first query on the token axis.
    pub first_token: usize,
    /// Position of the first query.
    pub first_position: usize,
    pub queries: usize,
}

/// Sizes that every block of a call shares.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Query heads per key/value head.
    pub group: usize,
    pub head_dim: usize,
    /// `head_dim` with padding.
    pub width: usize,
    /// Rows of the largest block, with padding.
    pub max_rows: usize,
    unit: Unit,
}

/// Returns the largest number of queries per block.
pub(crate) fn block_queries(shape: &AttentionShape) -> usize {
    (ROWS * shape.kv_heads / shape.heads).max(1)
}

impl Layout {
    /// Creates the layout for registers or tile registers.
    pub(super) fn new(shape: &AttentionShape, on_tiles: bool) -> Self {
        let group = shape.heads / shape.kv_heads;
        let unit = if on_tiles { OF_TILES } else { OF_REGISTERS };
        Self {
            group,
            head_dim: shape.head_dim,
            width: shape.head_dim.next_multiple_of(unit.padding),
            max_rows: (block_queries(shape) * group).next_multiple_of(unit.padding),
            unit,
        }
    }

    /// Returns the rows of a block, without and with padding.
    pub(super) fn rows(&self, block: Block) -> (usize, usize) {
        let rows = block.queries * self.group;
        (rows, rows.next_multiple_of(self.unit.padding))
    }
}

/// Returns the blocks of a range of segments from the token `first` on, in order.
pub(super) fn blocks(
    forest: &Forest,
    segments: Range<usize>,
    first: usize,
    shape: &AttentionShape,
) -> impl Iterator<Item = Block> {
    let size = block_queries(shape);
    segments.flat_map(move |index| {
        let segment = &forest.segments[index];
        let before = first.saturating_sub(segment.range.start as usize);
        (before..segment.range.len()).step_by(size).map(move |start| Block {
            segment: index,
            first_token: segment.range.start as usize + start,
            first_position: segment.first_position as usize + start,
            queries: size.min(segment.range.len() - start),
        })
    })
}

/// Returns the first position of the block that contains a position of a segment.
pub(super) fn block_start(shape: &AttentionShape, segment_start: usize, position: usize) -> usize {
    let size = block_queries(shape);
    segment_start + (position - segment_start) / size * size
}

/// Lists what a block of queries from position `first` on sees, up to `end`: consecutive positions
/// that are summed at once, ascending.
pub(super) fn strips(
    first: usize,
    end: usize,
    shape: &AttentionShape,
    layout: &Layout,
) -> impl Iterator<Item = Range<usize>> {
    let (diagonal, diagonal_keys) = (first + 1, layout.unit.diagonal_keys);
    let mut next = shape.window.map_or(0, |window| diagonal.saturating_sub(window as usize));
    std::iter::from_fn(move || {
        let start = next;
        if start >= end {
            return None;
        }
        let keys = if start < diagonal { KEYS.min(diagonal - start) } else { diagonal_keys };
        next = end.min(start + keys);
        Some(start..next)
    })
}

/// Consecutive positions on the path to a block, and the rows of the block that need them.
pub(super) struct Strip {
    pub first_position: usize,
    pub keys: usize,
    /// First row that sees one of the positions, rounded down to the padding.
    pub first_row: usize,
}

impl Block {
    /// Lists the strips that some query sees, ascending.
    pub(super) fn strips(self, shape: &AttentionShape, layout: &Layout) -> impl Iterator<Item = Strip> {
        let Layout { group, unit: Unit { padding, .. }, .. } = *layout;
        strips(self.first_position, self.first_position + self.queries, shape, layout).map(move |positions| {
            let first_row = (positions.start.saturating_sub(self.first_position) * group) / padding * padding;
            Strip { first_position: positions.start, keys: positions.len(), first_row }
        })
    }

    /// Lists token row and first column of each row of the block.
    pub(super) fn query_rows(self, kv_head: usize, layout: &Layout) -> impl Iterator<Item = (usize, usize)> {
        let (group, head_dim) = (layout.group, layout.head_dim);
        let columns = (kv_head * group..(kv_head + 1) * group).map(move |head| head * head_dim);
        let tokens = self.first_token..self.first_token + self.queries;
        tokens.flat_map(move |token| columns.clone().map(move |column| (token, column)))
    }

    /// Sets the scores `[keys, rows]` of keys that a row does not see to -∞.
    pub(super) fn mask(self, strip: &Strip, shape: &AttentionShape, layout: &Layout, scores: &mut [f32]) {
        let (num_rows, padded_rows) = layout.rows(self);
        for (key, scores) in scores.chunks_exact_mut(padded_rows).take(strip.keys).enumerate() {
            let position = strip.first_position + key;
            let first = position.saturating_sub(self.first_position) * layout.group;
            scores[strip.first_row..first.max(strip.first_row)].fill(f32::NEG_INFINITY);
            if let Some(window) = shape.window {
                let end = (position + window as usize).saturating_sub(self.first_position) * layout.group;
                scores[end.clamp(strip.first_row, num_rows)..num_rows].fill(f32::NEG_INFINITY);
            }
        }
    }
}

impl Strip {
    pub(super) fn positions(&self) -> Range<u32> {
        self.first_position as u32..(self.first_position + self.keys) as u32
    }
}

impl Layout {
    /// Lists token row and first column of each key.
    pub(super) fn key_rows(&self, tokens: &[u32], kv_head: usize) -> impl Iterator<Item = (usize, usize)> {
        let column = kv_head * self.head_dim;
        tokens.iter().map(move |&token| (token as usize, column))
    }
}

/// Conversion of query-key dot products to scores.
pub(super) struct Scores {
    /// Scale that remains after [`Scores::soften`].
    pub scale: f32,
    /// The scale before a softcap, and the cap.
    softcap: Option<(f32, f32)>,
}

impl Scores {
    pub(super) fn new(shape: &AttentionShape) -> Self {
        let softcap = shape.softcap.map(|cap| (shape.scale, cap));
        Self { scale: if softcap.is_some() { 1.0 } else { shape.scale }, softcap }
    }

    pub(super) fn cap(&self) -> Option<f32> {
        self.softcap.map(|(_, cap)| cap)
    }

    /// Applies `s ← cap · tanh(scale · s / cap)`, if there is a cap; the length is a multiple of
    /// the register's width.
    #[inline(always)]
    pub(super) unsafe fn soften<V: Vector>(&self, scores: &mut [f32]) {
        let Some((scale, cap)) = self.softcap else { return };
        for at in (0..scores.len()).step_by(V::LANES) {
            // SAFETY: inside the slice; the caller has V.
            unsafe {
                let pointer = scores.as_mut_ptr().add(at);
                softcap(V::load(pointer, V::LANES).mul(V::splat(scale)), cap).store(pointer, V::LANES);
            }
        }
    }
}

/// Packs columns `column..` of the given rows, widened, as `[rows, width]`.
///
/// # Safety
/// `to` holds the packed rows; the CPU has V.
#[inline(always)]
pub(super) unsafe fn pack<V: Vector, E: Element>(
    from: View,
    rows: impl Iterator<Item = (usize, usize)>,
    layout: &Layout,
    to: *mut f32,
) {
    for (i, (row, column)) in rows.enumerate() {
        let from = &from.row::<E>(row)[column..column + layout.head_dim];
        for_lanes!(V, layout.head_dim, |c, n| {
            // SAFETY: row `i` of `to` has `width` elements, padding for the last register included.
            unsafe {
                V::get(from.as_ptr().add(c), n).store(to.add(i * layout.width + c), V::LANES);
            }
        });
    }
}

/// Splits the front off a scratch buffer.
pub(super) fn take<'a>(scratch: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (front, rest) = std::mem::take(scratch).split_at_mut(len);
    *scratch = rest;
    front
}
