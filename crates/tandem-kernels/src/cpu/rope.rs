//! Rotary position embedding.

use super::Cpu;
use super::rows::RowsMut;
use super::vector::{for_lanes, vector_kernel};
use crate::ops::{RopePairs, RopeTable};
use crate::{Element, ViewMut, with_element};

pub(crate) fn rope(cpu: &Cpu, x: ViewMut, head_dim: usize, rows: &[u32], table: &RopeTable, inverse: bool) {
    let half = table.rotary() / 2;
    let sign = if inverse { -1.0 } else { 1.0 };
    let shape = (rows.len(), x.cols());
    with_element!(x.dtype(), E => {
        let x = RowsMut::<E>::new(x);
        cpu.for_rows(shape, |t| {
            let start = rows[t] as usize * half;
            let (cos, sin) = (&table.cos()[start..start + half], &table.sin()[start..start + half]);
            // SAFETY: row `t` belongs to this call alone; a head is no shorter than its rotated
            // part.
            unsafe {
                for head in x.row(t).chunks_exact_mut(head_dim) {
                    match table.pairs() {
                        RopePairs::Halves => rotate::<E>(cpu.isa(), head, cos, sin, sign),
                        RopePairs::Interleaved => rotate_neighbours(head, cos, sin, sign),
                    }
                }
            }
        });
    });
}

/// Rotates dimensions `2i` and `2i + 1` of a head, by the same operations as [`rotate`].
fn rotate_neighbours<E: Element>(head: &mut [E], cos: &[f32], sin: &[f32], sign: f32) {
    for ((pair, cos), sin) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
        let (a, b, sin) = (pair[0].to_f32(), pair[1].to_f32(), sin * sign);
        pair[0] = E::from_f32(a * cos - b * sin);
        pair[1] = E::from_f32(b * cos + a * sin);
    }
}

vector_kernel! {
    /// Rotates a head. `cos` and `sin` have one length; `head` has at least twice as many elements.
    unsafe fn rotate<V: Vector, E: Element>(head: &mut [E], cos: &[f32], sin: &[f32], sign: f32) {
        let (low, high) = head.split_at_mut(cos.len());
        for_lanes!(V, cos.len(), |i, n| {
            // SAFETY: inside the halves.
            unsafe {
                let (low, high) = (low.as_mut_ptr().add(i), high.as_mut_ptr().add(i));
                let (a, b) = (V::get(low, n), V::get(high, n));
                let cos = V::load(cos.as_ptr().add(i), n);
                let sin = V::load(sin.as_ptr().add(i), n).mul(V::splat(sign));
                a.mul(cos).sub(b.mul(sin)).put(low, n);
                b.mul(cos).add(a.mul(sin)).put(high, n);
            }
        });
    }
}
