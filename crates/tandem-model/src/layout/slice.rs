//! Shard of a decoder under tensor parallelism.
//!
//! A rank holds whole heads: their rows of the projection to q, k and v, and their columns of the
//! one back. Of the feed-forward it holds some of the F channels: their rows of gate and up, and
//! their columns of down. Of the vocabulary it holds some tokens: their rows of the table and of
//! the head. Norms, position tables, and the biases of row-parallel products are whole on each
//! rank. So a shard is a decoder of fewer heads, channels and tokens, with a layout of its own.

use std::ops::Range;

use crate::layout::{LayerLayout, ParamKind, ParamSpec};
use crate::spec::DecoderSpec;
use crate::{ModelError, Result};

/// Tensor-parallel shard of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorParallelShard {
    /// Rank in the tensor-parallel group.
    pub index: usize,
    /// Size of the group.
    pub count: usize,
}

impl TensorParallelShard {
    /// The whole decoder.
    pub const WHOLE: Self = Self { index: 0, count: 1 };

    /// Returns this shard's range of `len` items. Ranges differ in length by one at most.
    pub fn range(self, len: usize) -> Range<usize> {
        len * self.index / self.count..len * (self.index + 1) / self.count
    }

    /// Returns whether the ranks of the group hold blocks of a model's sums, so that the group computes
    /// the bits of one rank.
    pub fn keeps_bits(self) -> bool {
        matches!(self.count, 1 | 2 | 4 | 8)
    }

    /// Returns which part of the tokens this rank holds between sharded regions. Ranks that keep bits
    /// hold parts in bit-reversed order: a sum by pairs of ranks, neighbours first, then halves a
    /// contiguous range of tokens at each level.
    pub fn token_part(self) -> usize {
        if self.keeps_bits() && self.count > 1 {
            self.index.reverse_bits() >> (usize::BITS - self.count.ilog2())
        } else {
            self.index
        }
    }

    /// Returns the shard's spec: fewer heads, channels and tokens.
    ///
    /// # Errors
    /// If key/value heads cannot be divided evenly, or there are fewer channels or tokens than ranks.
    pub fn spec(self, whole: &DecoderSpec) -> Result<DecoderSpec> {
        let count = self.count;
        let (heads, kv_heads) = (whole.attention.heads, whole.attention.kv_heads);
        let linear_heads = whole.linear_attention.as_ref().map(|linear| linear.shape.key_heads);
        let divides = |n: usize| {
            kv_heads.is_multiple_of(n)
                && linear_heads.is_none_or(|linear_heads| linear_heads.is_multiple_of(n))
        };
        if !divides(count) {
            let sizes: Vec<_> = (1..=kv_heads).filter(|&n| divides(n)).map(|n| n.to_string()).collect();
            let linear = linear_heads
                .map_or(String::new(), |heads| format!(", and {heads} key heads of linear attention,"));
            return Err(ModelError::Invalid(format!(
                "{heads} attention heads with {kv_heads} key/value heads{linear} cannot be divided evenly among {count} ranks; \
                 numbers that divide them: {}",
                sizes.join(", ")
            )));
        }
        let mut spec = whole.clone();
        if let Some(linear) = &mut spec.linear_attention {
            let shape = &mut linear.shape;
            (shape.key_heads, shape.value_heads) = (shape.key_heads / count, shape.value_heads / count);
        }
        spec.attention.heads = heads / count;
        spec.attention.kv_heads = kv_heads / count;
        spec.mlp.width = self.range(whole.mlp.width).len();
        spec.vocab_size = self.range(whole.vocab_size).len();
        if whole.mlp.width.min(whole.vocab_size) < count {
            return Err(ModelError::Invalid(format!(
                "a feed-forward of {} channels and a vocabulary of {} tokens cannot be divided among {count} ranks",
                whole.mlp.width, whole.vocab_size
            )));
        }
        Ok(spec)
    }

    /// Returns whether ranks hold different parts of a parameter, rather than all of it each.
    pub fn splits(self, part: ParamKind) -> bool {
        // Of a matrix that is divided by rows `B` is divided, of one by columns and of the token table `A`.
        let is_whole_factor = matches!(
            part,
            ParamKind::QkvLoraA
                | ParamKind::OutLoraB
                | ParamKind::UpLoraA
                | ParamKind::DownLoraB
                | ParamKind::TokenLoraB
                | ParamKind::HeadLoraA
                | ParamKind::DeltaInLoraA
                | ParamKind::DeltaOutLoraB
        );
        self.count > 1
            && !is_whole_factor
            && (part.is_matrix()
                || matches!(
                    part,
                    ParamKind::QkvBias
                        | ParamKind::UpBias
                        | ParamKind::HeadBias
                        | ParamKind::QkvMagnitude
                        | ParamKind::UpMagnitude
                        | ParamKind::DeltaInMagnitude
                        | ParamKind::DeltaConvWeight
                        | ParamKind::DeltaDecayLog
                        | ParamKind::DeltaDecayBias
                ))
    }

    /// Returns the shard's ranges of the divided dimension of a part of the model itself; `None` if every
    /// rank holds all of it.
    pub(crate) fn ranges(self, whole: &DecoderSpec, part: ParamKind) -> Option<Vec<Range<usize>>> {
        let attention = &whole.attention;
        let heads_of = |heads: usize, width: usize| {
            let share = self.range(heads);
            share.start * width..share.end * width
        };
        let heads = |heads: usize| heads_of(heads, attention.head_dim);
        let after = |start: usize, range: Range<usize>| start + range.start..start + range.end;
        let (query, kv) = (attention.projected_query_width(), attention.kv_width());
        let shape = whole.linear_attention.as_ref().map(|linear| &linear.shape);
        // Heads of linear attention and their widths, in the order of rows.
        let delta = |parts: usize| {
            let shape = shape.expect("a part of linear attention");
            let keys = (shape.key_heads, shape.key_dim);
            let (values, gates) = ((shape.value_heads, shape.value_dim), (shape.value_heads, 1));
            let mut start = 0;
            let own =
                [keys, keys, values, values, gates, gates].into_iter().take(parts).map(|(heads, width)| {
                    start += heads * width;
                    after(start - heads * width, heads_of(heads, width))
                });
            own.collect()
        };
        match part {
            _ if self.count == 1 => None,
            ParamKind::QkvWeight | ParamKind::QkvBias => Some(vec![
                heads_of(attention.heads, query / attention.heads),
                after(query, heads(attention.kv_heads)),
                after(query + kv, heads(attention.kv_heads)),
            ]),
            ParamKind::OutWeight => Some(vec![heads(attention.heads)]),
            ParamKind::UpWeight | ParamKind::UpBias => {
                let width = whole.mlp.width;
                let gates = if whole.mlp.gated { 2 } else { 1 };
                Some((0..gates).map(|gate| after(gate * width, self.range(width))).collect())
            }
            ParamKind::DownWeight => Some(vec![self.range(whole.mlp.width)]),
            ParamKind::DeltaInWeight => Some(delta(6)),
            ParamKind::DeltaConvWeight => Some(delta(3)),
            ParamKind::DeltaOutWeight => {
                Some(shape.map(|shape| heads_of(shape.value_heads, shape.value_dim)).into_iter().collect())
            }
            ParamKind::DeltaDecayLog | ParamKind::DeltaDecayBias => {
                Some(shape.map(|shape| self.range(shape.value_heads)).into_iter().collect())
            }
            ParamKind::TokenTable | ParamKind::HeadWeight | ParamKind::HeadBias => {
                Some(vec![self.range(whole.vocab_size)])
            }
            _ => None,
        }
    }

    /// Returns the shard's rows and columns of a whole parameter.
    pub(crate) fn block(self, whole: &DecoderSpec, param: &ParamSpec) -> Block {
        let own = self.ranges(whole, param.part);
        let whole = Block::all(param);
        let Some(own) = own else { return whole };
        // A bias is one row; the projections back are divided by the columns that they read.
        match param.part {
            ParamKind::OutWeight | ParamKind::DownWeight | ParamKind::DeltaOutWeight => {
                Block { cols: own, ..whole }
            }
            _ if param.rows == 1 => Block { cols: own, ..whole },
            _ => Block { rows: own, ..whole },
        }
    }
}

/// Part of a matrix: ranges of columns of ranges of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    pub(crate) rows: Vec<Range<usize>>,
    pub(crate) cols: Vec<Range<usize>>,
}

impl Block {
    /// All of a parameter.
    pub(crate) fn all(param: &ParamSpec) -> Self {
        let (rows, cols) = (0..param.rows, 0..param.cols);
        Self { rows: vec![rows], cols: vec![cols] }
    }

    /// Lists the block as contiguous runs of elements, in its order, in a matrix of `width`
    /// columns.
    pub(crate) fn runs(&self, width: usize) -> impl Iterator<Item = Range<usize>> {
        let is_wide = matches!(&self.cols[..], [cols] if *cols == (0..width));
        let whole_rows = self.rows.iter().filter(move |_| is_wide);
        let whole_rows = whole_rows.map(move |rows| rows.start * width..rows.end * width);
        let single_rows = self.rows.iter().filter(move |_| !is_wide).cloned().flatten();
        let parts = single_rows.flat_map(move |row| {
            self.cols.iter().map(move |cols| row * width + cols.start..row * width + cols.end)
        });
        whole_rows.chain(parts)
    }

    /// Returns the block's part within rows `rows` and columns `cols` of the matrix, counted from
    /// their starts.
    pub(crate) fn within(&self, rows: &Range<usize>, cols: &Range<usize>) -> Self {
        let clip = |ranges: &[Range<usize>], to: &Range<usize>| -> Vec<Range<usize>> {
            let clipped = ranges.iter().map(|r| r.start.max(to.start)..r.end.min(to.end));
            clipped.filter(|r| !r.is_empty()).map(|r| r.start - to.start..r.end - to.start).collect()
        };
        Self { rows: clip(&self.rows, rows), cols: clip(&self.cols, cols) }
    }

    pub(crate) fn len(&self) -> usize {
        let count = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).sum::<usize>();
        count(&self.rows) * count(&self.cols)
    }
}

/// Run of elements that are contiguous in a shard's parameter and in the whole one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// First element of the shard's parameter.
    pub start: usize,
    /// The same elements of the whole parameter.
    pub whole: Range<usize>,
}

/// Lists the runs of one shard's parameter, in order: of its block of a parameter of `width` columns.
pub(crate) fn runs(block: &Block, width: usize) -> Vec<Run> {
    let mut start = 0;
    let runs = block.runs(width).map(|whole| {
        start += whole.len();
        Run { start: start - whole.len(), whole }
    });
    runs.collect()
}

/// Copies one shard of a layer's flat buffer out of the whole one; padding becomes zero. `block` returns
/// the shard's block of a whole parameter.
pub(crate) fn copy_out(
    block: impl Fn(&ParamSpec) -> Block,
    (whole_layout, layout): (&LayerLayout, &LayerLayout),
    whole: &[f32],
    part: &mut [f32],
) {
    part.fill(0.0);
    for (param, own) in whole_layout.params.iter().zip(&layout.params) {
        for Run { start, whole: run } in runs(&block(param), param.cols) {
            let to = own.offset + start..own.offset + start + run.len();
            part[to].copy_from_slice(&whole[param.offset + run.start..param.offset + run.end]);
        }
    }
}

/// Copies a shard back into the whole buffer. Of parameters that every rank holds whole, the last
/// copy stays.
pub(crate) fn copy_in(
    block: impl Fn(&ParamSpec) -> Block,
    (whole_layout, layout): (&LayerLayout, &LayerLayout),
    part: &[f32],
    whole: &mut [f32],
) {
    for (param, own) in whole_layout.params.iter().zip(&layout.params) {
        for Run { start, whole: run } in runs(&block(param), param.cols) {
            let from = own.offset + start..own.offset + start + run.len();
            whole[param.offset + run.start..param.offset + run.end].copy_from_slice(&part[from]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::single_range_in_vec_init, reason = "a block of one range of columns")]
    fn a_block_is_cut_into_the_longest_runs() {
        let rows = Block { rows: vec![1..3, 5..6], cols: vec![0..4] };
        assert_eq!(rows.runs(4).collect::<Vec<_>>(), [4..12, 20..24]);
        let cols = Block { rows: vec![0..2, 3..4], cols: vec![1..2, 3..4] };
        assert_eq!(cols.runs(4).collect::<Vec<_>>(), [1..2, 3..4, 5..6, 7..8, 13..14, 15..16]);
        assert_eq!(cols.len(), 6);
        assert_eq!(cols.within(&(1..4), &(0..4)), Block { rows: vec![0..1, 2..3], cols: vec![1..2, 3..4] });
        assert_eq!(cols.within(&(0..4), &(2..4)), Block { rows: vec![0..2, 3..4], cols: vec![1..2] });
    }

    #[test]
    fn shares_cover_everything_and_differ_by_one_at_most() {
        for len in [2, 7, 50_257] {
            for count in [1, 2, 3, 7] {
                let shares: Vec<_> =
                    (0..count).map(|index| TensorParallelShard { index, count }.range(len)).collect();
                assert_eq!((shares[0].start, shares[count - 1].end), (0, len));
                assert!(shares.windows(2).all(|w| w[0].end == w[1].start));
                assert!(shares.iter().all(|s| s.len().abs_diff(len / count) <= 1), "{shares:?}");
            }
        }
    }
}
