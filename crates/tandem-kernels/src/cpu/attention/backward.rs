//! Backward pass: probabilities are recomputed from the saved log-sum-exp, strip by strip.

use std::ops::Range;

use super::block::{Block, KEYS, Layout, Scores, blocks, pack, take};
use crate::cpu::elementary::exp;
use crate::cpu::rows::RowsMut;
use crate::cpu::tile::{Strided, transpose};
use crate::cpu::vector::{Vector, for_lanes, vector_kernel};
use crate::cpu::{Cpu, block_rows, scratch};
use crate::ops::{AttentionBackward, AttentionShape};
use crate::{Element, Forest, View, ViewMut, with_element};

pub(super) struct Backward<'a, E> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    out: View<'a>,
    log_sum_exp: View<'a>,
    pub(super) d_out: View<'a>,
    pub(super) forest: &'a Forest,
    pub(super) shape: &'a AttentionShape,
    pub(super) layout: Layout,
    dq: RowsMut<'a, E>,
    /// `[parts · T, K·d]` each.
    pub(super) dk: RowsMut<'a, f32>,
    pub(super) dv: RowsMut<'a, f32>,
}

/// Buffers of a task.
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
    /// Gradient of the scores.
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

/// Computes the gradients; `sums` is `[parts · T, 2·K·d]` f32.
pub(crate) fn backward(cpu: &Cpu, call: AttentionBackward, mut sums: ViewMut) {
    let AttentionBackward { q, k, v, out, log_sum_exp, d_out, forest, shape, dq, dk, dv, .. } = call;
    let on_tiles = cpu.isa().has_tiles_of(q.dtype());
    let layout = Layout::new(shape, on_tiles);
    let len = match on_tiles {
        #[cfg(target_arch = "x86_64")]
        true => super::tiles::backward_len(&layout),
        _ => Tiles::len(&layout),
    };
    let tokens = forest.num_tokens();
    let parts = sums.rows() / tokens.max(1);
    let (mut groups, kv_heads, width) = (forest.groups(), shape.kv_heads, k.cols());
    // The largest groups come first, to balance the threads.
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
            scratch::with_f32(len, |memory| {
                call.clear(&groups[group], part, kv_head);
                let own = blocks(forest, groups[group].clone(), 0, shape).skip(part).step_by(parts);
                for block in own {
                    // SAFETY: this part's sums and this block's rows of these heads belong to this
                    // task alone.
                    unsafe {
                        match on_tiles {
                            #[cfg(target_arch = "x86_64")]
                            true => super::tiles::backward_block(&call, block, kv_head, part * tokens, memory),
                            _ => backward_block(cpu.isa(), &call, block, kv_head, part * tokens, memory),
                        }
                    }
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
    /// Adds the gradients of a block. No other task writes this part's sums of this head, nor these
    /// rows of the group's heads.
    unsafe fn backward_block<V: Vector, E: Element>(
        call: &Backward<'_, E>,
        block: Block,
        kv_head: usize,
        first_sum: usize,
        memory: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe { call.block::<V>(block, kv_head, first_sum, &mut Tiles::new(&call.layout, memory)) }
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

    /// Packs the block's queries and output gradients, both ways round, and loads its row
    /// statistics.
    #[inline(always)]
    unsafe fn load_block<V: Vector>(&self, block: Block, kv_head: usize, tiles: &mut Tiles) {
        let layout = &self.layout;
        let (width, (num_rows, padded_rows)) = (layout.width, layout.rows(block));
        // SAFETY: tiles are large enough for any block; the caller has V.
        unsafe {
            for (from, to, transposed) in [
                (self.q, &mut *tiles.q, &mut *tiles.q_transposed),
                (self.d_out, &mut *tiles.d_out, &mut *tiles.d_out_transposed),
            ] {
                pack::<V, E>(from, block.query_rows(kv_head, layout), layout, to.as_mut_ptr());
                to[num_rows * width..padded_rows * width].fill(0.0);
                transpose::<V>(padded_rows, width, to.as_ptr(), transposed.as_mut_ptr());
            }
            tiles.dq[..num_rows * width].fill(0.0);
            let (log_sum_exp, mean) = (&mut tiles.log_sum_exp[..padded_rows], &mut tiles.mean[..padded_rows]);
            self.load_row_statistics::<V>(block, kv_head, log_sum_exp, mean);
        }
    }

    /// Loads each row's log-sum-exp and `rowsum(dO ∘ O)`; zeros for padding.
    #[inline(always)]
    pub(super) unsafe fn load_row_statistics<V: Vector>(
        &self,
        block: Block,
        kv_head: usize,
        log_sum_exp: &mut [f32],
        mean: &mut [f32],
    ) {
        let layout = &self.layout;
        log_sum_exp.fill(0.0);
        mean.fill(0.0);
        for (row, (token, column)) in block.query_rows(kv_head, layout).enumerate() {
            log_sum_exp[row] = self.log_sum_exp.row::<f32>(token)[column / layout.head_dim];
            let [out, d_out] =
                [self.out, self.d_out].map(|x| x.row::<E>(token)[column..column + layout.head_dim].as_ptr());
            // SAFETY: rows of that many elements; the caller has V.
            unsafe {
                let mut dot = V::splat(0.0);
                for_lanes!(V, layout.head_dim, |c, n| {
                    dot = V::get(out.add(c), n).mul_add(V::get(d_out.add(c), n), dot);
                });
                mean[row] = dot.sum();
            }
        }
    }

    /// Adds a strip's gradient of its keys or values, times `scale`, to its sums.
    ///
    /// # Safety
    /// These sums belong to the calling task alone.
    #[inline(always)]
    pub(super) unsafe fn add_to_keys(
        &self,
        sum: &RowsMut<'_, f32>,
        first_sum: usize,
        keys: impl Iterator<Item = (usize, usize)>,
        gradient: &[f32],
        scale: f32,
    ) {
        for ((token, column), gradient) in keys.zip(gradient.chunks_exact(self.layout.width)) {
            // SAFETY: the caller's promise.
            let sum = unsafe { sum.part(first_sum + token, column, self.layout.head_dim) };
            sum.iter_mut().zip(gradient).for_each(|(sum, d)| *sum += d * scale);
        }
    }

    /// Writes the block's dQ `[rows, width]`, times the scale.
    ///
    /// # Safety
    /// The block's rows of these heads belong to the calling task alone; the CPU has V.
    #[inline(always)]
    pub(super) unsafe fn store_dq<V: Vector>(&self, block: Block, kv_head: usize, dq: &[f32]) {
        let layout = &self.layout;
        for (row, (token, column)) in block.query_rows(kv_head, layout).enumerate() {
            let from = dq[row * layout.width..][..layout.width].as_ptr();
            // SAFETY: the caller's promise.
            unsafe {
                let to = self.dq.part(token, column, layout.head_dim);
                for_lanes!(V, layout.head_dim, |c, n| {
                    V::load(from.add(c), n).mul(V::splat(self.shape.scale)).put(to.as_mut_ptr().add(c), n);
                });
            }
        }
    }

    #[inline(always)]
    unsafe fn block<V: Vector>(&self, block: Block, kv_head: usize, first_sum: usize, tiles: &mut Tiles) {
        let layout = &self.layout;
        let (width, (num_rows, padded_rows)) = (layout.width, layout.rows(block));
        let mut tokens = [0; KEYS];
        let factor = Scores::new(self.shape);
        // SAFETY: tiles are large enough for any block; the caller has V.
        unsafe {
            self.load_block::<V>(block, kv_head, tiles);
            for strip in block.strips(self.shape, layout) {
                let (keys, first) = (strip.keys, strip.first_row);
                let tokens = &mut tokens[..keys];
                self.forest.path_rows(block.segment, strip.positions(), tokens);
                pack::<V, E>(self.k, layout.key_rows(tokens, kv_head), layout, tiles.k.as_mut_ptr());
                pack::<V, E>(self.v, layout.key_rows(tokens, kv_head), layout, tiles.v.as_mut_ptr());
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
                factor.soften::<V>(&mut tiles.p[..keys * padded_rows]);
                block.mask(&strip, self.shape, layout, tiles.p);
                let Tiles { p, ds, log_sum_exp, mean, .. } = &mut *tiles;
                differentiate::<V>(keys, first, padded_rows, &factor, p, ds, log_sum_exp, mean);
                V::multiply(
                    [num_rows - first, width, keys],
                    Strided { pointer: tiles.ds.as_ptr().add(first), row: 1, col: padded_rows },
                    (tiles.k.as_ptr(), width),
                    (tiles.dq.as_mut_ptr().add(first * width), width),
                    true,
                );
                for (left, right, sum, scale) in [
                    (&tiles.ds, &tiles.q, &self.dk, self.shape.scale),
                    (&tiles.p, &tiles.d_out, &self.dv, 1.0),
                ] {
                    V::multiply(
                        [keys, width, num_rows - first],
                        Strided { pointer: left.as_ptr().add(first), row: padded_rows, col: 1 },
                        (right.as_ptr().add(first * width), width),
                        (tiles.d_key.as_mut_ptr(), width),
                        false,
                    );
                    self.add_to_keys(sum, first_sum, layout.key_rows(tokens, kv_head), tiles.d_key, scale);
                }
            }
            self.store_dq::<V>(block, kv_head, tiles.dq);
        }
    }
}

/// Computes `p ← exp(p − lse)` and `ds ← p · (ds − mean)`, with scale and the slope of the softcap,
/// from row `first` on.
#[inline(always)]
pub(super) unsafe fn differentiate<V: Vector>(
    keys: usize,
    first: usize,
    stride: usize,
    factor: &Scores,
    p: &mut [f32],
    ds: &mut [f32],
    log_sum_exp: &[f32],
    mean: &[f32],
) {
    // SAFETY: keys × stride elements are in `p` and `ds`, stride elements in the others; the caller
    // has V.
    unsafe {
        for row in (first..stride).step_by(V::LANES) {
            let log_sum_exp = V::load(log_sum_exp.as_ptr().add(row), V::LANES);
            let mean = V::load(mean.as_ptr().add(row), V::LANES);
            for key in 0..keys {
                let p = p.as_mut_ptr().add(key * stride + row);
                let ds = ds.as_mut_ptr().add(key * stride + row);
                let score = V::load(p, V::LANES).mul(V::splat(factor.scale));
                let weight = exp(score.sub(log_sum_exp));
                let mut gradient = weight.mul(V::load(ds, V::LANES).sub(mean));
                if let Some(cap) = factor.cap() {
                    // A masked score is -∞ with weight 0; the bound avoids a NaN product.
                    let ratio = score.mul(V::splat(1.0 / cap)).max(V::splat(-1.0));
                    gradient = gradient.mul(V::splat(1.0).sub(ratio.mul(ratio)));
                }
                weight.store(p, V::LANES);
                gradient.store(ds, V::LANES);
            }
        }
    }
}
