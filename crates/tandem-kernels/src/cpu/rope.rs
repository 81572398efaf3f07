//! Rotary position embedding.

use super::rows::RowsMut;
use super::vector::{Vector, for_lanes, with_vector};
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
    let half = table.rotary / 2;
    let sign = if inverse { -1.0 } else { 1.0 };
    let per_block = block_rows(x.cols());
    with_element!(x.dtype(), E => {
        let x = RowsMut::<E>::new(x);
        cpu.parallel_for(positions.len().div_ceil(per_block), |block| with_vector!(cpu.isa(), V => {
            for t in block * per_block..positions.len().min((block + 1) * per_block) {
                let at = positions[t] as usize * half;
                let (cos, sin) = (&table.cos[at..at + half], &table.sin[at..at + half]);
                // SAFETY: row `t` belongs to this block alone; the level has V.
                unsafe {
                    for head in x.row(t).chunks_exact_mut(head_dim) {
                        rotate::<V, E>(head, cos, sin, sign);
                    }
                }
            }
        }));
    });
}

#[inline(always)]
unsafe fn rotate<V: Vector, E: Element>(head: &mut [E], cos: &[f32], sin: &[f32], sign: f32) {
    let half = cos.len();
    let (low, high) = head.split_at_mut(half);
    // SAFETY: `for_lanes` stays inside the halves; the caller has V.
    for_lanes::<V>(half, |i, n| unsafe {
        let (low, high) = (low.as_mut_ptr().add(i), high.as_mut_ptr().add(i));
        let (a, b) = (V::get(low, n), V::get(high, n));
        let cos = V::load(cos.as_ptr().add(i), n);
        let sin = V::load(sin.as_ptr().add(i), n).mul(V::splat(sign));
        a.mul(cos).sub(b.mul(sin)).put(low, n);
        b.mul(cos).add(a.mul(sin)).put(high, n);
    });
}
