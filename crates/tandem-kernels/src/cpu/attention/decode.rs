//! Single new tokens over a key/value cache: one task a query and key/value head, bound by reading the cache once.

use crate::cpu::elementary::{exp, softcap as capped};
use crate::cpu::rows::RowsMut;
use crate::cpu::vector::{Vector, for_lanes, vector_kernel};
use crate::cpu::{Cpu, scratch};
use crate::ops::{AttentionShape, Visible};
use crate::{Element, View, ViewMut, with_element};

struct Decode<'a, E> {
    q: View<'a>,
    k: View<'a>,
    v: View<'a>,
    visible: &'a Visible,
    shape: &'a AttentionShape,
    out: RowsMut<'a, E>,
}

pub(crate) fn decode(
    cpu: &Cpu,
    q: View,
    k: View,
    v: View,
    visible: &Visible,
    shape: &AttentionShape,
    out: ViewMut,
) {
    let group = shape.heads / shape.kv_heads;
    with_element!(q.dtype(), E => {
        let call = Decode { q, k, v, visible, shape, out: RowsMut::<E>::new(out) };
        cpu.parallel_for(q.rows() * shape.kv_heads, |task| {
            let (query, kv_head) = (task / shape.kv_heads, task % shape.kv_heads);
            let keys = visible.of(query).iter().map(ExactSizeIterator::len).sum::<usize>();
            scratch::with_f32(group * (keys + 1) + shape.head_dim, |memory| {
                // SAFETY: this query's part of these heads belongs to this task alone.
                unsafe { decode_group(cpu.isa(), &call, query, kv_head, keys, memory) };
            });
        });
    });
}

vector_kernel! {
    /// No other task writes this query's part of these heads.
    unsafe fn decode_group<V: Vector, E: Element>(
        call: &Decode<'_, E>,
        query: usize,
        kv_head: usize,
        keys: usize,
        memory: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe { call.group::<V>(query, kv_head, keys, memory) }
    }
}

impl<E: Element> Decode<'_, E> {
    /// The cache rows that a query sees, at most `window` of them from the end.
    fn rows(&self, query: usize, keys: usize) -> impl Iterator<Item = usize> {
        let hidden = self.shape.window.map_or(0, |window| keys.saturating_sub(window as usize));
        self.visible.of(query).iter().cloned().flatten().skip(hidden).map(|row| row as usize)
    }

    #[inline(always)]
    unsafe fn group<V: Vector>(&self, query: usize, kv_head: usize, keys: usize, memory: &mut [f32]) {
        let head_dim = self.shape.head_dim;
        let group = self.shape.heads / self.shape.kv_heads;
        let seen = self.shape.window.map_or(keys, |window| keys.min(window as usize));
        let columns = kv_head * head_dim..(kv_head + 1) * head_dim;
        let (weights, memory) = memory.split_at_mut(group * keys);
        let (sums, out) = memory.split_at_mut(group);
        let own = |head: usize| (kv_head * group + head) * head_dim;
        for (key, row) in self.rows(query, keys).enumerate() {
            let k = &self.k.row::<E>(row)[columns.clone()];
            for head in 0..group {
                let q = &self.q.row::<E>(query)[own(head)..own(head) + head_dim];
                // SAFETY: both hold `head_dim` elements; the caller has V.
                weights[head * keys + key] = unsafe { dot::<V, E>(q, k) };
            }
        }
        for head in 0..group {
            let weights = &mut weights[head * keys..head * keys + seen];
            // SAFETY: the caller has V.
            sums[head] = unsafe { softmax::<V>(weights, self.shape.scale, self.shape.softcap) };
        }
        for head in 0..group {
            out.fill(0.0);
            for (row, weight) in self.rows(query, keys).zip(&weights[head * keys..]) {
                let v = &self.v.row::<E>(row)[columns.clone()];
                // SAFETY: both hold `head_dim` elements; the caller has V.
                unsafe { add_scaled::<V, E>(*weight, v, out) };
            }
            // SAFETY: this part belongs to this task alone; the caller has V.
            unsafe {
                let to = self.out.part(query, own(head), head_dim);
                for_lanes!(V, head_dim, |c, n| {
                    V::load(out.as_ptr().add(c), n)
                        .mul(V::splat(1.0 / sums[head]))
                        .put(to.as_mut_ptr().add(c), n);
                });
            }
        }
    }
}

#[inline(always)]
unsafe fn dot<V: Vector, E: Element>(a: &[E], b: &[E]) -> f32 {
    // SAFETY: the slices are of one length; the caller has V.
    unsafe {
        let mut sum = V::splat(0.0);
        for_lanes!(V, a.len(), |i, n| {
            sum = V::get(a.as_ptr().add(i), n).mul_add(V::get(b.as_ptr().add(i), n), sum);
        });
        sum.sum()
    }
}

/// `sum += weight · x`.
#[inline(always)]
unsafe fn add_scaled<V: Vector, E: Element>(weight: f32, x: &[E], sum: &mut [f32]) {
    for_lanes!(V, x.len(), |i, n| {
        // SAFETY: the slices are of one length; the caller has V.
        unsafe {
            let sum = sum.as_mut_ptr().add(i);
            V::get(x.as_ptr().add(i), n).mul_add(V::splat(weight), V::load(sum, n)).store(sum, n);
        }
    });
}

/// Turns products into exponentials below the largest score; returns their sum.
#[inline(always)]
unsafe fn softmax<V: Vector>(weights: &mut [f32], scale: f32, softcap: Option<f32>) -> f32 {
    // SAFETY: `for_lanes` stays inside the slice; the caller has V.
    unsafe {
        let mut largest = f32::NEG_INFINITY;
        for_lanes!(V, weights.len(), |i, n| {
            let at = weights.as_mut_ptr().add(i);
            let mut score = V::load(at, n).mul(V::splat(scale));
            if let Some(cap) = softcap {
                score = capped(score, cap);
            }
            score.store(at, n);
        });
        for weight in weights.iter() {
            largest = largest.max(*weight);
        }
        let mut sum = 0.0;
        for_lanes!(V, weights.len(), |i, n| {
            let at = weights.as_mut_ptr().add(i);
            exp(V::load(at, n).sub(V::splat(largest))).store(at, n);
        });
        for weight in weights.iter() {
            sum += weight;
        }
        sum
    }
}
