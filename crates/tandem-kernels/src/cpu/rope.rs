//! Rotary position embedding.

use super::rows::RowsMut;
use super::vector::{for_lanes, vector_kernel};
use super::{Cpu, block_rows};
use crate::ops::RopeTable;
use crate::{Element, ViewMut, with_element};

pub(crate) fn rope(
    cpu: &Cpu,
    x: ViewMut,
    head_dim: usize,
    positions: &[u32],
    table: &RopeTable,
    inverse: bool,
) {
    let half = table.rotary() / 2;
    let sign = if inverse { -1.0 } else { 1.0 };
    let per_block = block_rows(x.cols());
    with_element!(x.dtype(), E => {
        let x = RowsMut::<E>::new(x);
        cpu.parallel_for(positions.len().div_ceil(per_block), |block| {
            for t in block * per_block..positions.len().min((block + 1) * per_block) {
                let at = positions[t] as usize * half;
                let (cos, sin) = (&table.cos()[at..at + half], &table.sin()[at..at + half]);
                // SAFETY: row `t` belongs to this block alone; a head is no shorter than its
                // rotated part.
                unsafe {
                    for head in x.row(t).chunks_exact_mut(head_dim) {
                        rotate::<E>(cpu.isa(), head, cos, sin, sign);
                    }
                }
            }
        });
    });
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
