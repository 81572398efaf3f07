//! The backward pass: probabilities are computed again from the kept log-sum-exp, strip by strip.
//!
//! `dP = dO Vᵀ`, `dS = P ∘ (dP − rowsum(dO ∘ O))`, `dQ = dS K`, `dK = dSᵀ Q`, `dV = Pᵀ dO` (FlashAttention-2, arXiv
//! 2307.08691, algorithm 2). A task goes through the blocks of one group of trees and one key/value head in order and
//! adds to its own f32 sums of dK and dV; a few long trees are dealt out in several parts, summed in order at the end.

use std::ops::Range;

use super::block::{Block, KEYS, Layout, blocks, pack, take};
use super::forward::soften;
use crate::cpu::elementary::exp;
use crate::cpu::rows::RowsMut;
use crate::cpu::tile::{Strided, transpose};
use crate::cpu::vector::{Vector, for_lanes, vector_kernel};
use crate::cpu::{Cpu, block_rows, scratch};
use crate::ops::AttentionShape;
use crate::{Element, Forest, View, ViewMut, with_element};

struct Backward<'a, E> {
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    out: View<'a>,
    log_sum_exp: View<'a>,
    d_out: View<'a>,
    forest: &'a Forest,
    shape: &'a AttentionShape,
    layout: Layout,
    dq: RowsMut<'a, E>,
    /// `[parts · T, K·d]` each.
    dk: RowsMut<'a, f32>,
    dv: RowsMut<'a, f32>,
}

/// The memory of a task.
struct Tiles<'a> {
    q: &'a mut [f32],
    q_transposed: &'a mut [f32],
    d_out: &'a mut [f32],
    d_out_transposed: &'a mut [f32],
    dq: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    d_key: &'a mut [f32],
    /// Scores, then probabilities `[keys, rows]`.
    p: &'a mut [f32],
    /// Their gradient.
    ds: &'a mut [f32],
    log_sum_exp: &'a mut [f32],
    mean: &'a mut [f32],
}

impl<'a> Tiles<'a> {
    fn len(layout: &Layout) -> usize {
        5 * layout.max_rows * layout.width + 3 * KEYS * layout.width + (2 * KEYS + 2) * layout.max_rows
    }

    fn new(layout: &Layout, mut memory: &'a mut [f32]) -> Self {
        let (rows, width) = (layout.max_rows, layout.width);
        let mut take = |len: usize| take(&mut memory, len);
        Self {
            q: take(rows * width),
            q_transposed: take(rows * width),
            d_out: take(rows * width),
            d_out_transposed: take(rows * width),
            dq: take(rows * width),
            k: take(KEYS * width),
            v: take(KEYS * width),
            d_key: take(KEYS * width),
            p: take(KEYS * rows),
            ds: take(KEYS * rows),
            log_sum_exp: take(rows),
            mean: take(rows),
        }
    }
}

/// `sums` is `[parts · T, 2·K·d]` f32.
pub(crate) fn backward(
    cpu: &Cpu,
    q: View,
    k: View,
    v: View,
    out: View,
    log_sum_exp: View,
    d_out: View,
    forest: &Forest,
    shape: &AttentionShape,
    dq: ViewMut,
    dk: ViewMut,
    dv: ViewMut,
    mut sums: ViewMut,
) {
    let layout = Layout::new(shape);
    let tokens = forest.num_tokens();
    let parts = sums.rows() / tokens.max(1);
    let (mut groups, kv_heads, width) = (forest.groups(), shape.kv_heads, k.cols());
    // The largest come first, so that none of them is left for the end.
    groups.sort_by_key(|group| {
        std::cmp::Reverse(forest.segments[group.clone()].iter().map(|s| s.range.len()).sum::<usize>())
    });
    with_element!(q.dtype(), E => {
        let [sum_k, sum_v] = sums.reborrow().split_cols([width, width]);
        let call = Backward {
            q, k, v, out, log_sum_exp, d_out, forest, shape, layout,
            dq: RowsMut::<E>::new(dq),
            dk: RowsMut::new(sum_k),
            dv: RowsMut::new(sum_v),
        };
        cpu.parallel_for(groups.len() * parts * kv_heads, |task| {
            let (group, part, kv_head) =
                (task / (parts * kv_heads), task / kv_heads % parts, task % kv_heads);
            scratch::with_f32(Tiles::len(&layout), |memory| {
                let mut tiles = Tiles::new(&layout, memory);
                call.clear(&groups[group], part, kv_head);
                let own = blocks(forest, groups[group].clone(), shape).skip(part).step_by(parts);
                for block in own {
                    // SAFETY: this part's sums and this block's rows of these heads belong to this task alone.
                    unsafe { backward_block(cpu.isa(), &call, block, kv_head, part * tokens, &mut tiles) };
                }
            });
        });
        let (dk, dv) = (RowsMut::<E>::new(dk), RowsMut::<E>::new(dv));
        cpu.parallel_ranges(tokens, block_rows(width), |_, range| {
            for t in range {
                // SAFETY: row `t` of each part belongs to this block alone.
                unsafe {
                    for (sum, to) in [(&call.dk, &dk), (&call.dv, &dv)] {
                        let total = sum.row(t);
                        for part in 1..parts {
                            total.iter_mut().zip(&*sum.row(part * tokens + t)).for_each(|(a, b)| *a += b);
                        }
                        to.row(t).iter_mut().zip(total).for_each(|(to, sum)| *to = E::from_f32(*sum));
                    }
                }
            }
        });
    });
}

vector_kernel! {
    /// No other task writes this part's sums of this head, nor these rows' part of the group's heads.
    unsafe fn backward_block<V: Vector, E: Element>(
        call: &Backward<'_, E>,
        block: Block,
        kv_head: usize,
        first_sum: usize,
        tiles: &mut Tiles<'_>,
    ) {
        // SAFETY: the caller's promise.
        unsafe { call.block::<V>(block, kv_head, first_sum, tiles) }
    }
}

impl<E: Element> Backward<'_, E> {
    /// Sets one part's sums of these segments to zero.
    fn clear(&self, segments: &Range<usize>, part: usize, kv_head: usize) {
        let (segments, head_dim) = (&self.forest.segments[segments.clone()], self.layout.head_dim);
        let (Some(first), Some(last)) = (segments.first(), segments.last()) else { return };
        for t in first.range.start..last.range.end {
            let row = part * self.forest.num_tokens() + t as usize;
            for sum in [&self.dk, &self.dv] {
                // SAFETY: this part's sums of this head belong to this task alone.
                unsafe { sum.part(row, kv_head * head_dim, head_dim) }.fill(0.0);
            }
        }
    }

    /// Packs the block's queries and output gradients, both ways round, and what its rows need.
    #[inline(always)]
    unsafe fn load_block<V: Vector>(&self, block: Block, kv_head: usize, tiles: &mut Tiles) {
        let layout = &self.layout;
        let (width, (num_rows, padded_rows)) = (layout.width, layout.rows(block));
        // SAFETY: tiles are large enough for any block; the caller has V.
        unsafe {
            for (from, factor, to, transposed) in [
                (self.q, self.shape.scale, &mut *tiles.q, &mut *tiles.q_transposed),
                (self.d_out, 1.0, &mut *tiles.d_out, &mut *tiles.d_out_transposed),
            ] {
                pack::<V, E>(from, block.query_rows(kv_head, layout), layout, factor, to.as_mut_ptr());
                to[num_rows * width..padded_rows * width].fill(0.0);
                transpose::<V>(padded_rows, width, to.as_ptr(), transposed.as_mut_ptr());
            }
            tiles.dq[..num_rows * width].fill(0.0);
            tiles.log_sum_exp[..padded_rows].fill(0.0);
            tiles.mean[..padded_rows].fill(0.0);
            for (row, (token, column)) in block.query_rows(kv_head, layout).enumerate() {
                tiles.log_sum_exp[row] = self.log_sum_exp.row::<f32>(token)[column / layout.head_dim];
                let out = &self.out.row::<E>(token)[column..column + layout.head_dim];
                let d_out = tiles.d_out.as_ptr().add(row * width);
                let mut dot = V::splat(0.0);
                for_lanes!(V, layout.head_dim, |c, n| {
                    dot = V::get(out.as_ptr().add(c), n).mul_add(V::load(d_out.add(c), n), dot);
                });
                tiles.mean[row] = dot.sum();
            }
        }
    }

    #[inline(always)]
    unsafe fn block<V: Vector>(&self, block: Block, kv_head: usize, first_sum: usize, tiles: &mut Tiles) {
        let layout = &self.layout;
        let (width, (num_rows, padded_rows)) = (layout.width, layout.rows(block));
        let mut tokens = [0; KEYS];
        // SAFETY: tiles are large enough for any block; the caller has V.
        unsafe {
            self.load_block::<V>(block, kv_head, tiles);
            for strip in block.strips(self.shape, layout.group) {
                let (keys, first) = (strip.keys, strip.first_row);
                let tokens = &mut tokens[..keys];
                self.forest.path_rows(block.segment, strip.positions(), tokens);
                pack::<V, E>(self.k, layout.key_rows(tokens, kv_head), layout, 1.0, tiles.k.as_mut_ptr());
                pack::<V, E>(self.v, layout.key_rows(tokens, kv_head), layout, 1.0, tiles.v.as_mut_ptr());
                for (left, right, to) in [
                    (&tiles.k, &tiles.q_transposed, &mut tiles.p),
                    (&tiles.v, &tiles.d_out_transposed, &mut tiles.ds),
                ] {
                    V::multiply(
                        [keys, padded_rows - first, layout.head_dim],
                        Strided { pointer: left.as_ptr(), row: width, col: 1 },
                        (right.as_ptr().add(first), padded_rows),
                        (to.as_mut_ptr().add(first), padded_rows),
                        false,
                    );
                }
                if let Some(cap) = self.shape.softcap {
                    soften::<V>(&mut tiles.p[..keys * padded_rows], cap);
                }
                block.mask(&strip, self.shape, layout, tiles.p);
                differentiate::<V>(keys, first, padded_rows, self.shape.softcap, tiles);
                V::multiply(
                    [num_rows - first, width, keys],
                    Strided { pointer: tiles.ds.as_ptr().add(first), row: 1, col: padded_rows },
                    (tiles.k.as_ptr(), width),
                    (tiles.dq.as_mut_ptr().add(first * width), width),
                    true,
                );
                for (left, right, sum) in
                    [(&tiles.ds, &tiles.q, &self.dk), (&tiles.p, &tiles.d_out, &self.dv)]
                {
                    V::multiply(
                        [keys, width, num_rows - first],
                        Strided { pointer: left.as_ptr().add(first), row: padded_rows, col: 1 },
                        (right.as_ptr().add(first * width), width),
                        (tiles.d_key.as_mut_ptr(), width),
                        false,
                    );
                    for (key, (token, column)) in layout.key_rows(tokens, kv_head).enumerate() {
                        let sum = sum.part(first_sum + token, column, layout.head_dim);
                        sum.iter_mut().zip(&tiles.d_key[key * width..]).for_each(|(sum, d)| *sum += d);
                    }
                }
            }
            for (row, (token, column)) in block.query_rows(kv_head, layout).enumerate() {
                let from = tiles.dq.as_ptr().add(row * width);
                let to = self.dq.part(token, column, layout.head_dim);
                for_lanes!(V, layout.head_dim, |c, n| {
                    V::load(from.add(c), n).mul(V::splat(self.shape.scale)).put(to.as_mut_ptr().add(c), n);
                });
            }
        }
    }
}

/// `p ← exp(p − lse)` and `ds ← p · (ds − mean)`, with the slope of the softcap, from row `first` on.
#[inline(always)]
unsafe fn differentiate<V: Vector>(
    keys: usize,
    first: usize,
    stride: usize,
    softcap: Option<f32>,
    tiles: &mut Tiles,
) {
    // SAFETY: keys × stride elements are in `p` and `ds`, stride elements in the others; the caller has V.
    unsafe {
        for row in (first..stride).step_by(V::LANES) {
            let log_sum_exp = V::load(tiles.log_sum_exp.as_ptr().add(row), V::LANES);
            let mean = V::load(tiles.mean.as_ptr().add(row), V::LANES);
            for key in 0..keys {
                let p = tiles.p.as_mut_ptr().add(key * stride + row);
                let ds = tiles.ds.as_mut_ptr().add(key * stride + row);
                let score = V::load(p, V::LANES);
                let weight = exp(score.sub(log_sum_exp));
                let mut gradient = weight.mul(V::load(ds, V::LANES).sub(mean));
                if let Some(cap) = softcap {
                    // A masked score is -∞, whose weight is 0: bounded, so that the product is no NaN.
                    let ratio = score.mul(V::splat(1.0 / cap)).max(V::splat(-1.0));
                    gradient = gradient.mul(V::splat(1.0).sub(ratio.mul(ratio)));
                }
                weight.store(p, V::LANES);
                gradient.store(ds, V::LANES);
            }
        }
    }
}
