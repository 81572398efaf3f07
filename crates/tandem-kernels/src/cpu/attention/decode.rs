//! Decoding: single new tokens over a key/value cache. One task per query and key/value head, bound
//! by reading the cache once. A query's result has the bits that [`super::forward`] gives its token: both
//! cut the keys before it into the same strips.

use std::ops::Range;

use super::block::{KEYS, Layout, Scores, block_start, pack, strips, take};
use super::forward::LOWEST;
use crate::cpu::elementary::exp;
use crate::cpu::prefetch::{LINE, prefetch_far};
use crate::cpu::rows::RowsMut;
use crate::cpu::tile::{Strided, transpose};
use crate::cpu::vector::{Vector, for_lanes, vector_kernel};
use crate::cpu::{Cpu, scratch};
use crate::ops::{AttentionDecode, AttentionShape, Visible};
use crate::{Element, View, with_element};

pub(super) struct Decode<'a, E> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    visible: &'a Visible,
    pub(super) shape: &'a AttentionShape,
    pub(super) layout: Layout,
    out: RowsMut<'a, E>,
    threads: usize,
}

pub(crate) fn decode(cpu: &Cpu, call: AttentionDecode) {
    let AttentionDecode { q, k, v, visible, shape, out } = call;
    let on_tiles = cpu.isa().has_tiles_of(q.dtype());
    let layout = Layout::new(shape, on_tiles);
    let (width, group) = (layout.width, layout.group);
    let len = match on_tiles {
        #[cfg(target_arch = "x86_64")]
        true => super::tiles::decode_len(&layout),
        _ => 2 * group * width + 3 * KEYS * width + (KEYS + 2) * group,
    };
    with_element!(q.dtype(), E => {
        let (out, threads) = (RowsMut::<E>::new(out), cpu.threads());
        let call = Decode { q, k, v, visible, shape, layout, out, threads };
        cpu.parallel_for(q.rows() * shape.kv_heads, |task| {
            let (query, kv_head) = (task / shape.kv_heads, task % shape.kv_heads);
            scratch::with_f32(len, |memory| {
                // SAFETY: this query's part of these heads belongs to this task alone; the memory
                // suffices for the layout.
                unsafe {
                    match on_tiles {
                        #[cfg(target_arch = "x86_64")]
                        true => super::tiles::decode_group(&call, query, kv_head, memory),
                        _ => decode_group(cpu.isa(), &call, query, kv_head, memory),
                    }
                }
            });
        });
    });
}

vector_kernel! {
    /// Computes a query's heads of one key/value head. No other task writes them; `memory` has room
    /// for [`Decode::group`].
    unsafe fn decode_group<V: Vector, E: Element>(
        call: &Decode<'_, E>,
        query: usize,
        kv_head: usize,
        memory: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe { call.group::<V>(query, kv_head, memory) }
    }
}

impl<E: Element> Decode<'_, E> {
    /// Returns the number of positions that a query sees or that its window hides.
    fn end(&self, query: usize) -> usize {
        self.visible.ranges(query).iter().map(ExactSizeIterator::len).sum()
    }

    /// Returns the number of positions that a query's window hides.
    pub(super) fn hidden(&self, query: usize) -> usize {
        self.shape.window.map_or(0, |window| self.end(query).saturating_sub(window as usize))
    }

    /// Lists the strips that a query sees.
    pub(super) fn strips(&self, query: usize) -> impl Iterator<Item = Range<usize>> {
        let (visible, end) = (self.visible.ranges(query), self.end(query));
        let own = visible.iter().rfind(|range| !range.is_empty()).map_or(0, ExactSizeIterator::len);
        strips(block_start(self.shape, end - own, end - 1), end, self.shape, &self.layout)
    }

    /// Writes the cache rows of some positions among those that a query sees.
    pub(super) fn cache_rows(&self, query: usize, positions: &Range<usize>, rows: &mut [u32]) {
        let (mut before, mut filled) = (0, 0);
        for range in self.visible.ranges(query) {
            let (start, end) = (positions.start.max(before), positions.end.min(before + range.len()));
            for position in start..end {
                rows[filled] = range.start + (position - before) as u32;
                filled += 1;
            }
            before += range.len();
        }
    }

    /// Prefetches a strip's keys and values: cache rows of a head are too far apart for the hardware.
    fn prefetch(&self, query: usize, kv_head: usize, strip: &Range<usize>) {
        let mut rows = [0; KEYS];
        let rows = &mut rows[..strip.len()];
        self.cache_rows(query, strip, rows);
        for (row, column) in self.layout.key_rows(rows, kv_head) {
            for x in [self.k, self.v] {
                let elements = &x.row::<E>(row)[column..column + self.layout.head_dim];
                let bytes = elements.as_ptr().cast::<u8>();
                (0..size_of_val(elements)).step_by(LINE).for_each(|i| prefetch_far(bytes.wrapping_add(i)));
            }
        }
    }

    /// Prefetches the next strip, or after the last the first one of the task that this thread probably has
    /// next.
    pub(super) fn prefetch_after(&self, query: usize, kv_head: usize, next: Option<&Range<usize>>) {
        if let Some(next) = next {
            return self.prefetch(query, kv_head, next);
        }
        let task = query * self.shape.kv_heads + kv_head + self.threads;
        let (query, kv_head) = (task / self.shape.kv_heads, task % self.shape.kv_heads);
        if query < self.q.rows()
            && let Some(strip) = self.strips(query).next()
        {
            self.prefetch(query, kv_head, &strip);
        }
    }

    #[inline(always)]
    unsafe fn group<V: Vector>(&self, query: usize, kv_head: usize, mut memory: &mut [f32]) {
        let (shape, layout) = (self.shape, &self.layout);
        let Layout { group, head_dim, width, .. } = *layout;
        let q = take(&mut memory, group * width);
        let out = take(&mut memory, group * width);
        let [k, k_across, v] = [(); 3].map(|()| take(&mut memory, KEYS * width));
        let scores = take(&mut memory, KEYS * group);
        let (largest, sum) = (take(&mut memory, group), take(&mut memory, group));
        largest.fill(LOWEST);
        sum.fill(0.0);
        out.fill(0.0);
        let hidden = self.hidden(query);
        let factor = Scores::new(shape);
        let mut rows = [0; KEYS];
        // SAFETY: the sizes are those just taken; the part of the output belongs to this task
        // alone; the caller has V.
        unsafe {
            pack::<V, E>(self.q, self.heads(query, kv_head), layout, q.as_mut_ptr());
            let mut strips = self.strips(query).peekable();
            while let Some(strip) = strips.next() {
                self.prefetch_after(query, kv_head, strips.peek());
                let (keys, rows) = (strip.len(), &mut rows[..strip.len()]);
                let padded = keys.next_multiple_of(V::LANES);
                self.cache_rows(query, &strip, rows);
                pack::<V, E>(self.k, layout.key_rows(rows, kv_head), layout, k.as_mut_ptr());
                pack::<V, E>(self.v, layout.key_rows(rows, kv_head), layout, v.as_mut_ptr());
                transpose::<V>(padded, width, k.as_ptr(), k_across.as_mut_ptr());
                let across = (k_across.as_ptr(), padded);
                let q = Strided { pointer: q.as_ptr(), row: width, col: 1 };
                V::multiply([group, padded, head_dim], q, across, (scores.as_mut_ptr(), padded), false);
                factor.soften::<V>(&mut scores[..group * padded]);
                let hidden = hidden.saturating_sub(strip.start).min(keys);
                for head in 0..group {
                    let scores = &mut scores[head * padded..][..keys];
                    scores[..hidden].fill(f32::NEG_INFINITY);
                    let (largest, sum) = (&mut largest[head], &mut sum[head]);
                    let shrink = normalize_row::<V>(scores, factor.scale, largest, sum);
                    if shrink != 1.0 {
                        out[head * width..][..width].iter_mut().for_each(|x| *x *= shrink);
                    }
                }
                let weights = Strided { pointer: scores.as_ptr(), row: padded, col: 1 };
                V::multiply(
                    [group, width, keys],
                    weights,
                    (v.as_ptr(), width),
                    (out.as_mut_ptr(), width),
                    true,
                );
            }
            self.finish::<V>(query, kv_head, out, sum);
        }
    }

    /// Divides by the sums and writes the results.
    ///
    /// # Safety
    /// No other task writes them; the CPU has V.
    #[inline(always)]
    pub(super) unsafe fn finish<V: Vector>(&self, query: usize, kv_head: usize, out: &[f32], sum: &[f32]) {
        let Layout { head_dim, width, .. } = self.layout;
        for (head, (row, column)) in self.heads(query, kv_head).enumerate() {
            // SAFETY: the caller's promise; rows of `out` hold the width.
            unsafe {
                let (from, to) = (out.as_ptr().add(head * width), self.out.part(row, column, head_dim));
                let factor = V::splat(1.0 / sum[head]);
                for_lanes!(V, head_dim, |c, n| {
                    V::load(from.add(c), n).mul(factor).put(to.as_mut_ptr().add(c), n);
                });
            }
        }
    }

    /// Lists row and first column of a query's heads that share a key/value head.
    pub(super) fn heads(&self, query: usize, kv_head: usize) -> impl Iterator<Item = (usize, usize)> {
        let Layout { group, head_dim, .. } = self.layout;
        (kv_head * group..(kv_head + 1) * group).map(move |head| (query, head * head_dim))
    }
}

/// Normalises the scores of one row as [`super::forward::normalize`].
#[inline(always)]
unsafe fn normalize_row<V: Vector>(scores: &mut [f32], scale: f32, largest: &mut f32, sum: &mut f32) -> f32 {
    // SAFETY: `for_lanes` stays inside the slice; the caller has V.
    unsafe {
        let now = scores.iter().fold(*largest, |now, &score| if score > now { score } else { now });
        let (of_now, of_scale) = (V::splat(now), V::splat(scale));
        let mut shrink = 0.0;
        exp(V::splat(*largest).sub(of_now).mul(of_scale)).store(&mut shrink, 1);
        for_lanes!(V, scores.len(), |i, n| {
            let at = scores.as_mut_ptr().add(i);
            exp(V::load(at, n).sub(of_now).mul(of_scale)).store(at, n);
        });
        *sum = scores.iter().fold(*sum * shrink, |sum, weight| sum + weight);
        *largest = now;
        shrink
    }
}
