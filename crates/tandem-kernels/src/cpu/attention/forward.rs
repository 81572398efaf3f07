//! Forward pass: one task per block, with a running maximum and sum over its strips.

use super::block::{Block, KEYS, Layout, Scores, blocks, pack, take};
use crate::cpu::elementary::exp;
use crate::cpu::rows::RowsMut;
use crate::cpu::tile::{Strided, transpose};
use crate::cpu::vector::{Vector, for_lanes, vector_kernel};
use crate::cpu::{Cpu, scratch};
use crate::ops::{Attention, AttentionShape};
use crate::{Element, Forest, View, with_element};

/// Below every score, and finite, so that no difference is NaN.
pub(super) const LOWEST: f32 = -1e30;

pub(super) struct Forward<'a, E> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) forest: &'a Forest,
    pub(super) shape: &'a AttentionShape,
    pub(super) layout: Layout,
    out: RowsMut<'a, E>,
    log_sum_exp: RowsMut<'a, f32>,
}

pub(crate) fn forward(cpu: &Cpu, call: Attention) {
    let Attention { q, k, v, forest, first_query, shape, out, log_sum_exp } = call;
    let log_sum_exp = RowsMut::new(log_sum_exp);
    let blocks = blocks(forest, 0..forest.segments.len(), first_query, shape);
    // Rows of `q` begin with the first query.
    let mut tasks: Vec<Block> =
        blocks.map(|block| Block { first_token: block.first_token - first_query, ..block }).collect();
    // Blocks that see most keys come first, to balance the threads.
    tasks.sort_by_key(|block| std::cmp::Reverse(block.first_position));
    let on_tiles = cpu.isa().has_tiles_of(q.dtype());
    let layout = Layout::new(shape, on_tiles);
    let len = match on_tiles {
        #[cfg(target_arch = "x86_64")]
        true => super::tiles::forward_len(&layout),
        _ => 2 * layout.max_rows * layout.width + 2 * KEYS * layout.width + (KEYS + 3) * layout.max_rows,
    };
    with_element!(q.dtype(), E => {
        let call = Forward { q, k, v, forest, shape, layout, out: RowsMut::<E>::new(out), log_sum_exp };
        cpu.parallel_for(tasks.len() * shape.kv_heads, |task| scratch::with_f32(len, |memory| {
            let (block, kv_head) = (tasks[task / shape.kv_heads], task % shape.kv_heads);
            // SAFETY: a block's rows of these heads belong to this task alone; the memory suffices
            // for the layout.
            unsafe {
                match on_tiles {
                    #[cfg(target_arch = "x86_64")]
                    true => super::tiles::forward_block(&call, block, kv_head, memory),
                    _ => forward_block(cpu.isa(), &call, block, kv_head, memory),
                }
            }
        }));
    });
}

vector_kernel! {
    /// Computes a block. No other task writes these rows of these heads; `memory` holds the tiles
    /// of the largest block.
    unsafe fn forward_block<V: Vector, E: Element>(
        call: &Forward<'_, E>,
        block: Block,
        kv_head: usize,
        memory: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe { call.block::<V>(block, kv_head, memory) }
    }
}

impl<E: Element> Forward<'_, E> {
    #[inline(always)]
    unsafe fn block<V: Vector>(&self, block: Block, kv_head: usize, mut memory: &mut [f32]) {
        let layout = &self.layout;
        let (width, (num_rows, padded_rows)) = (layout.width, layout.rows(block));
        let q = take(&mut memory, padded_rows * width);
        let out = take(&mut memory, padded_rows * width);
        let k = take(&mut memory, KEYS * width);
        let v = take(&mut memory, KEYS * width);
        let scores = take(&mut memory, KEYS * padded_rows);
        let largest = take(&mut memory, padded_rows);
        let sum = take(&mut memory, padded_rows);
        let shrink = take(&mut memory, padded_rows);
        largest.fill(LOWEST);
        sum.fill(0.0);
        let factor = Scores::new(self.shape);
        // SAFETY: the sizes are those just taken; the caller has V.
        unsafe {
            // The output buffer holds the queries until they are transposed.
            out.fill(0.0);
            pack::<V, E>(self.q, block.query_rows(kv_head, layout), layout, out.as_mut_ptr());
            transpose::<V>(padded_rows, width, out.as_ptr(), q.as_mut_ptr());
            out.fill(0.0);
            let mut tokens = [0; KEYS];
            for strip in block.strips(self.shape, layout) {
                let tokens = &mut tokens[..strip.keys];
                self.forest.path_rows(block.segment, strip.positions(), tokens);
                pack::<V, E>(self.k, layout.key_rows(tokens, kv_head), layout, k.as_mut_ptr());
                pack::<V, E>(self.v, layout.key_rows(tokens, kv_head), layout, v.as_mut_ptr());
                let first = strip.first_row;
                V::multiply(
                    [strip.keys, padded_rows - first, layout.head_dim],
                    Strided { pointer: k.as_ptr(), row: width, col: 1 },
                    (q.as_ptr().add(first), padded_rows),
                    (scores.as_mut_ptr().add(first), padded_rows),
                    false,
                );
                factor.soften::<V>(&mut scores[..strip.keys * padded_rows]);
                block.mask(&strip, self.shape, layout, scores);
                for row in (first..padded_rows).step_by(V::LANES) {
                    let scores = scores.as_mut_ptr().add(row);
                    let (largest, sum) = (largest.as_mut_ptr().add(row), sum.as_mut_ptr().add(row));
                    normalize::<V>(strip.keys, padded_rows, scores, factor.scale, largest, sum)
                        .store(shrink.as_mut_ptr().add(row), V::LANES);
                }
                for row in first..num_rows {
                    if shrink[row] != 1.0 {
                        out[row * width..(row + 1) * width].iter_mut().for_each(|x| *x *= shrink[row]);
                    }
                }
                V::multiply(
                    [num_rows - first, width, strip.keys],
                    Strided { pointer: scores.as_ptr().add(first), row: 1, col: padded_rows },
                    (v.as_ptr(), width),
                    (out.as_mut_ptr().add(first * width), width),
                    true,
                );
            }
            self.finish::<V>(block, kv_head, out, largest, sum);
        }
    }

    /// Divides by the sums and writes the results.
    #[inline(always)]
    pub(super) unsafe fn finish<V: Vector>(
        &self,
        block: Block,
        kv_head: usize,
        out: &[f32],
        largest: &[f32],
        sum: &[f32],
    ) {
        let (layout, scale) = (&self.layout, Scores::new(self.shape).scale);
        for (row, (token, column)) in block.query_rows(kv_head, layout).enumerate() {
            // SAFETY: the element and the part belong to this task alone; the caller has V.
            unsafe {
                self.log_sum_exp.part(token, column / layout.head_dim, 1)[0] =
                    largest[row] * scale + sum[row].ln();
                let to = self.out.part(token, column, layout.head_dim);
                let factor = V::splat(1.0 / sum[row]);
                let from = out.as_ptr().add(row * layout.width);
                for_lanes!(V, layout.head_dim, |c, n| {
                    V::load(from.add(c), n).mul(factor).put(to.as_mut_ptr().add(c), n);
                });
            }
        }
    }
}

/// Normalises one register of rows: replaces scores, once scaled, by exponentials below the new
/// maximum, updates maximum (before the scale) and sum, and returns the factor on earlier sums.
#[inline(always)]
pub(super) unsafe fn normalize<V: Vector>(
    keys: usize,
    stride: usize,
    scores: *mut f32,
    scale: f32,
    largest: *mut f32,
    sum: *mut f32,
) -> V {
    // SAFETY: the caller passes a register of each, and `keys` rows of scores.
    unsafe {
        let (before, scale) = (V::load(largest, V::LANES), V::splat(scale));
        let mut now = before;
        for key in 0..keys {
            now = now.max(V::load(scores.add(key * stride), V::LANES));
        }
        let shrink = exp(before.sub(now).mul(scale));
        let mut total = V::load(sum, V::LANES).mul(shrink);
        for key in 0..keys {
            let at = scores.add(key * stride);
            let weight = exp(V::load(at, V::LANES).sub(now).mul(scale));
            total = total.add(weight);
            weight.store(at, V::LANES);
        }
        now.store(largest, V::LANES);
        total.store(sum, V::LANES);
        shrink
    }
}
