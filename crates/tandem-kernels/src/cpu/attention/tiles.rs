//! bf16 passes on tile registers: the same strips. Probabilities and their gradients are rounded to
//! bf16 before they meet values, keys, queries and output gradients, as on GPUs. Scores, sums and
//! the softmax are f32.
//!
//! One factor of a GEMM has its rows along k, the other has pairs of neighbours along k side by
//! side. Other layouts are made strip by strip: pairs by interleaving two rows, rows across by
//! transposing pairs. Outputs and dQ are summed transposed, `[width, rows]`, so scores `[keys,
//! rows]` enter as pairs and are never transposed.

use std::arch::x86_64::*;

use super::backward::{Backward, differentiate};
use super::block::{Block, KEYS, Layout, Scores, take};
use super::decode::Decode;
use super::forward::{Forward, LOWEST, normalize};
use crate::cpu::amx::{self, SQUARE};
use crate::cpu::tile::transpose;
use crate::cpu::vector::{Avx512, Vector};
use crate::ops::AttentionShape;
use crate::{Element, View, bf16};

/// Returns the keys of a strip, padded to whole tiles.
fn padded(keys: usize) -> usize {
    keys.next_multiple_of(SQUARE)
}

/// Returns the words that [`Pass`] needs.
fn pass_len(rows: usize, width: usize) -> usize {
    2 * rows * width / 2 + 4 * KEYS * width / 2 + KEYS * rows + KEYS / 2 * rows + 2 * width * rows + 3 * rows
}

/// Rows of queries with a running maximum and sum over their strips.
struct Pass<'a> {
    layout: &'a Layout,
    factor: Scores,
    /// Rows with padding.
    rows: usize,
    /// Queries across.
    q: &'a mut [f32],
    /// A strip's keys and values; values as pairs of rows, and across.
    strip: [&'a mut [f32]; 4],
    /// `[keys, rows]`.
    scores: &'a mut [f32],
    /// The same rounded, pairs of keys.
    p: &'a mut [f32],
    /// Outputs across, before the division by `sum`.
    sums: &'a mut [f32],
    out: &'a mut [f32],
    largest: &'a mut [f32],
    sum: &'a mut [f32],
    shrink: &'a mut [f32],
}

impl<'a> Pass<'a> {
    /// Reads the queries: token row and first column of each.
    ///
    /// # Safety
    /// E is bf16; `memory` has [`pass_len`] words; the CPU has [`crate::Isa::Amx`].
    #[inline(always)]
    unsafe fn new<E: Element>(
        queries: View,
        query_rows: impl Iterator<Item = (usize, usize)>,
        (layout, shape): (&'a Layout, &AttentionShape),
        rows: usize,
        mut memory: &'a mut [f32],
    ) -> Self {
        let (width, half) = (layout.width, layout.width / 2);
        let mut take = |len: usize| take(&mut memory, len);
        let (q_rows, q) = (take(rows * half), take(rows * half));
        let strip = [(); 4].map(|()| take(KEYS * half));
        let (scores, p) = (take(KEYS * rows), take(KEYS / 2 * rows));
        let (sums, out) = (take(width * rows), take(width * rows));
        let [largest, sum, shrink] = [(); 3].map(|()| take(rows));
        largest.fill(LOWEST);
        sum.fill(0.0);
        sums.fill(0.0);
        // SAFETY: the sizes are those just taken; the caller's promise.
        unsafe {
            gather::<E>(queries, query_rows, layout, rows, q_rows);
            transpose::<Avx512>(rows, half, q_rows.as_ptr(), q.as_mut_ptr());
        }
        Self {
            layout,
            factor: Scores::new(shape),
            rows,
            q,
            strip,
            scores,
            p,
            sums,
            out,
            largest,
            sum,
            shrink,
        }
    }

    /// Goes over a strip of at most [`KEYS`] keys, at these rows of `keys_values`. Rows before `first`, whole
    /// squares, see none of them; `mask` hides scores `[keys, rows]` of the others.
    ///
    /// # Safety
    /// As [`Self::new`], between [`amx::begin`] and [`amx::end`].
    #[inline(always)]
    unsafe fn add<E: Element>(
        &mut self,
        keys_values: [View; 2],
        tokens: &[u32],
        kv_head: usize,
        first: usize,
        mask: impl FnOnce(&mut [f32]),
    ) {
        let Self { layout, rows, .. } = *self;
        let (width, half, keys) = (layout.width, layout.width / 2, padded(tokens.len()));
        let [k, v, v_pairs, v_across] = &mut self.strip;
        let (scores, p) = (&mut *self.scores, &mut *self.p);
        // SAFETY: the buffers hold a strip; the caller's promise.
        unsafe {
            for (from, to) in keys_values.into_iter().zip([&mut *k, &mut *v]) {
                gather::<E>(from, layout.key_rows(tokens, kv_head), layout, keys, to);
            }
            turn(keys, half, v, v_pairs, v_across);
            let to = (scores.as_mut_ptr().add(first), rows);
            amx::product(
                [keys, rows - first, width],
                (k.as_ptr(), half),
                (self.q.as_ptr().add(first), rows),
                to,
                false,
            );
            self.factor.soften::<Avx512>(&mut scores[..tokens.len() * rows]);
            mask(scores);
            let mut shrinks = false;
            for row in (first..rows).step_by(Avx512::LANES) {
                let scores = scores.as_mut_ptr().add(row);
                let (largest, sum) = (self.largest.as_mut_ptr().add(row), self.sum.as_mut_ptr().add(row));
                normalize::<Avx512>(tokens.len(), rows, scores, self.factor.scale, largest, sum)
                    .store(self.shrink.as_mut_ptr().add(row), Avx512::LANES);
                shrinks |= self.shrink[row..row + Avx512::LANES].iter().any(|shrink| *shrink != 1.0);
            }
            if shrinks {
                for sums in self.sums.chunks_exact_mut(rows) {
                    let all = sums[first..].iter_mut().zip(&self.shrink[first..]);
                    all.for_each(|(sum, shrink)| *sum *= shrink);
                }
            }
            round_pairs(tokens.len(), first, rows, scores, p);
            let (values, weights) = ((v_across.as_ptr(), keys / 2), (p.as_ptr().add(first), rows));
            let to = (self.sums.as_mut_ptr().add(first), rows);
            amx::product([width, rows - first, keys], values, weights, to, true);
        }
    }

    /// Returns the outputs `[rows, width]` before the division by the sums, the maxima and the sums.
    ///
    /// # Safety
    /// As [`Self::new`].
    #[inline(always)]
    unsafe fn end(self) -> [&'a [f32]; 3] {
        // SAFETY: both hold all rows.
        unsafe {
            transpose::<Avx512>(self.layout.width, self.rows, self.sums.as_ptr(), self.out.as_mut_ptr());
        }
        [self.out, self.largest, self.sum]
    }
}

/// Returns the words that [`forward_block`] needs.
pub(super) fn forward_len(layout: &Layout) -> usize {
    pass_len(layout.max_rows, layout.width)
}

/// Computes a block as the forward pass's function of that name, on tiles.
///
/// # Safety
/// As there; the CPU has [`crate::Isa::Amx`], E is bf16, and the layout is one for tiles.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn forward_block<E: Element>(
    call: &Forward<'_, E>,
    block: Block,
    kv_head: usize,
    memory: &mut [f32],
) {
    let (layout, shape) = (&call.layout, call.shape);
    let (num_rows, rows) = layout.rows(block);
    // SAFETY: the caller's promise.
    unsafe {
        let queries = block.query_rows(kv_head, layout);
        let mut pass = Pass::new::<E>(call.q, queries, (layout, shape), rows, memory);
        amx::begin();
        let mut tokens = [0; KEYS];
        for strip in block.strips(shape, layout) {
            let tokens = &mut tokens[..strip.keys];
            call.forest.path_rows(block.segment, strip.positions(), tokens);
            pass.add::<E>([call.k, call.v], tokens, kv_head, strip.first_row, |scores| {
                block.mask(&strip, shape, layout, scores);
            });
        }
        amx::end();
        let [out, largest, sum] = pass.end();
        call.finish::<Avx512>(block, kv_head, out, &largest[..num_rows], sum);
    }
}

/// Returns the rows of a query's heads that share a key/value head, with padding.
fn decoded_rows(layout: &Layout) -> usize {
    layout.group.next_multiple_of(SQUARE)
}

/// Returns the words that [`decode_group`] needs.
pub(super) fn decode_len(layout: &Layout) -> usize {
    pass_len(decoded_rows(layout), layout.width)
}

/// Computes a task of one query as decoding's function of that name, on tiles: each row
/// meets the same keys in the same squares as in [`forward_block`], so the bits are the same.
///
/// # Safety
/// As there; the CPU has [`crate::Isa::Amx`], E is bf16, and the layout is one for tiles.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn decode_group<E: Element>(call: &Decode<'_, E>, task: usize, memory: &mut [f32]) {
    let (queries, kv_head) = call.of_task(task);
    let query = queries.start;
    let (layout, rows) = (&call.layout, decoded_rows(&call.layout));
    let hidden = call.hidden(query);
    // SAFETY: the caller's promise.
    unsafe {
        let heads = call.heads(query, kv_head);
        let mut pass = Pass::new::<E>(call.q, heads, (layout, call.shape), rows, memory);
        amx::begin();
        let mut tokens = [0; KEYS];
        let mut strips = call.strips(query).peekable();
        while let Some(strip) = strips.next() {
            call.prefetch_after(task, query, strips.peek());
            let tokens = &mut tokens[..strip.len()];
            call.cache_rows(query, &strip, tokens);
            pass.add::<E>([call.k, call.v], tokens, kv_head, 0, |scores| {
                let hidden = hidden.saturating_sub(strip.start).min(strip.len());
                scores[..hidden * rows].fill(f32::NEG_INFINITY);
            });
        }
        amx::end();
        let [out, _, sum] = pass.end();
        call.finish::<Avx512>(query, kv_head, out, sum);
    }
}

/// Returns the words that [`backward_block`] needs.
pub(super) fn backward_len(layout: &Layout) -> usize {
    let (rows, width) = (layout.max_rows, layout.width);
    5 * rows * width / 2
        + 2 * width * rows
        + 4 * KEYS * width / 2
        + KEYS * width
        + 2 * KEYS * rows
        + 2 * KEYS * rows / 2
        + 2 * rows
}

/// Computes a block as the backward pass's function of that name, on tiles.
///
/// # Safety
/// As there; the CPU has [`crate::Isa::Amx`], E is bf16, and the layout is one for tiles.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn backward_block<E: Element>(
    call: &Backward<'_, E>,
    block: Block,
    kv_head: usize,
    first_sum: usize,
    mut memory: &mut [f32],
) {
    let layout = &call.layout;
    let (width, (_, rows)) = (layout.width, layout.rows(block));
    let half = width / 2;
    let mut take = |len: usize| take(&mut memory, len);
    // Queries and output gradients: rows in order, across, and pairs of rows.
    let as_rows = take(rows * half);
    let [q_across, d_out_across, q_pairs, d_out_pairs] = [(); 4].map(|()| take(rows * half));
    let (dq, dq_rows) = (take(width * rows), take(width * rows));
    let [k, v, k_pairs, k_across] = [(); 4].map(|()| take(KEYS * half));
    let d_key = take(KEYS * width);
    let [p, ds] = [(); 2].map(|()| take(KEYS * rows));
    let [rounded, ds_pairs] = [(); 2].map(|()| take(KEYS * rows / 2));
    let [log_sum_exp, mean] = [(); 2].map(|()| take(rows));
    let factor = Scores::new(call.shape);
    dq.fill(0.0);
    // SAFETY: the sizes are those just taken; the caller's promise.
    unsafe {
        for (from, across, pairs) in
            [(call.q, &mut *q_across, &mut *q_pairs), (call.d_out, &mut *d_out_across, &mut *d_out_pairs)]
        {
            gather::<E>(from, block.query_rows(kv_head, layout), layout, rows, as_rows);
            transpose::<Avx512>(rows, half, as_rows.as_ptr(), across.as_mut_ptr());
            interleave(rows, half, as_rows, pairs);
        }
        call.load_row_statistics::<Avx512>(block, kv_head, log_sum_exp, mean);
        amx::begin();
        let mut tokens = [0; KEYS];
        for strip in block.strips(call.shape, layout) {
            let (tokens, keys, first) = (&mut tokens[..strip.keys], padded(strip.keys), strip.first_row);
            call.forest.path_rows(block.segment, strip.positions(), tokens);
            for (from, to) in [(call.k, &mut *k), (call.v, &mut *v)] {
                gather::<E>(from, layout.key_rows(tokens, kv_head), layout, keys, to);
            }
            turn(keys, half, k, k_pairs, k_across);
            for (left, right, to) in [(&*k, &*q_across, &mut *p), (&*v, &*d_out_across, &mut *ds)] {
                let (left, right) = ((left.as_ptr(), half), (right.as_ptr().add(first), rows));
                let to = (to.as_mut_ptr().add(first), rows);
                amx::product([keys, rows - first, width], left, right, to, false);
            }
            factor.soften::<Avx512>(&mut p[..strip.keys * rows]);
            block.mask(&strip, call.shape, layout, p);
            differentiate::<Avx512>(strip.keys, first, rows, &factor, p, ds, log_sum_exp, mean);
            round_pairs(strip.keys, first, rows, ds, ds_pairs);
            let (left, right) = ((k_across.as_ptr(), keys / 2), (ds_pairs.as_ptr().add(first), rows));
            let to = (dq.as_mut_ptr().add(first), rows);
            amx::product([width, rows - first, keys], left, right, to, true);
            for (scores, right, sum, scale) in
                [(&*ds, &*q_pairs, &call.dk, call.shape.scale), (&*p, &*d_out_pairs, &call.dv, 1.0)]
            {
                round_rows(strip.keys, first, rows, scores, rounded);
                let left = (rounded.as_ptr().add(first / 2), rows / 2);
                let right = (right.as_ptr().add(first / 2 * width), width);
                let to = (d_key.as_mut_ptr(), width);
                amx::product([keys, width, rows - first], left, right, to, false);
                call.add_to_keys(sum, first_sum, layout.key_rows(tokens, kv_head), d_key, scale);
            }
        }
        amx::end();
        transpose::<Avx512>(width, rows, dq.as_ptr(), dq_rows.as_mut_ptr());
        call.store_dq::<Avx512>(block, kv_head, dq_rows);
    }
}

/// Copies columns of the given rows, padded with zeros to the layout's width, and zero rows up to
/// `rows`.
#[inline(always)]
unsafe fn gather<E: Element>(
    from: View,
    tokens: impl Iterator<Item = (usize, usize)>,
    layout: &Layout,
    rows: usize,
    to: &mut [f32],
) {
    let half = layout.width / 2;
    let mut count = 0;
    for (token, column) in tokens {
        let from = from.row::<E>(token)[column..column + layout.head_dim].as_ptr().cast::<bf16>();
        let to = to[count * half..(count + 1) * half].as_mut_ptr();
        for c in (0..layout.head_dim).step_by(SQUARE) {
            let mask = u32::MAX >> (SQUARE - SQUARE.min(layout.head_dim - c));
            // SAFETY: the masked elements are the row's; the row at `to` has a multiple of 32
            // elements.
            unsafe {
                let elements = _mm512_maskz_loadu_epi16(mask, from.add(c).cast());
                _mm512_storeu_epi32(to.add(c / 2).cast(), elements);
            }
        }
        count += 1;
    }
    to[count * half..rows * half].fill(0.0);
}

/// Interleaves rows of bf16 `[rows, 2 · half]` to words `[rows / 2, 2 · half]` of neighbours.
#[inline(always)]
unsafe fn interleave(rows: usize, half: usize, from: &[f32], to: &mut [f32]) {
    for (from, to) in from[..rows * half].chunks_exact(2 * half).zip(to.chunks_exact_mut(2 * half)) {
        let (first, second) = from.split_at(half);
        for word in (0..half).step_by(16) {
            // SAFETY: rows are a multiple of 16 words.
            unsafe {
                let first = _mm512_loadu_epi32(first.as_ptr().add(word).cast());
                let second = _mm512_loadu_epi32(second.as_ptr().add(word).cast());
                for (i, words) in amx::pairs(first, second).into_iter().enumerate() {
                    _mm512_storeu_epi32(to.as_mut_ptr().add(2 * word + 16 * i).cast(), words);
                }
            }
        }
    }
}

/// Transposes rows of bf16 `[rows, 2 · half]`, by way of pairs, to `[2 · half, rows]`.
#[inline(always)]
unsafe fn turn(rows: usize, half: usize, from: &[f32], pairs: &mut [f32], across: &mut [f32]) {
    // SAFETY: rows and columns are multiples of 32; the caller's promise.
    unsafe {
        interleave(rows, half, from, pairs);
        transpose::<Avx512>(rows / 2, 2 * half, pairs.as_ptr(), across.as_mut_ptr());
    }
}

/// Rounds 32 numbers to bf16.
#[inline(always)]
unsafe fn round(from: *const f32) -> __m512i {
    // SAFETY: the caller's promise: 32 numbers at `from`, and the level.
    unsafe { amx::round([_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))]) }
}

/// Rounds `[keys, rows]` f32 to rows of bf16, from row `first` on.
#[inline(always)]
unsafe fn round_rows(keys: usize, first: usize, rows: usize, from: &[f32], to: &mut [f32]) {
    for key in 0..keys {
        let (from, to) = (&from[key * rows..][..rows], &mut to[key * rows / 2..][..rows / 2]);
        for row in (first..rows).step_by(SQUARE) {
            // SAFETY: rows are a multiple of 32.
            unsafe {
                _mm512_storeu_epi32(to.as_mut_ptr().add(row / 2).cast(), round(from.as_ptr().add(row)));
            };
        }
    }
}

/// Rounds `[keys, rows]` f32 to words `[padded keys / 2, rows]` of neighbouring keys, from row
/// `first` on; padding keys are zeros.
#[inline(always)]
unsafe fn round_pairs(keys: usize, first: usize, rows: usize, from: &[f32], to: &mut [f32]) {
    for (pair, to) in to.chunks_exact_mut(rows).take(padded(keys) / 2).enumerate() {
        let row_of = |key: usize| from[key * rows..][..rows].as_ptr();
        if 2 * pair >= keys {
            to[first..].fill(0.0);
            continue;
        }
        for row in (first..rows).step_by(SQUARE) {
            // SAFETY: rows are a multiple of 32.
            unsafe {
                let one = round(row_of(2 * pair).add(row));
                let other = if 2 * pair + 1 < keys {
                    round(row_of(2 * pair + 1).add(row))
                } else {
                    _mm512_setzero_si512()
                };
                for (i, words) in amx::pairs(one, other).into_iter().enumerate() {
                    _mm512_storeu_epi32(to.as_mut_ptr().add(row + 16 * i).cast(), words);
                }
            }
        }
    }
}
