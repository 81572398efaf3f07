//! Dropout and noise: masks and draws are hashed from keys and each element's index while rows pass.

use super::rows::RowsMut;
use super::vector::{for_lanes, vector_kernel};
use super::{Cpu, block_rows};
use crate::numerics::random::{STEP, mix};
use crate::ops::{Mask, NoiseRow};
use crate::{Element, View, ViewMut, with_element};

/// Elements per piece of the mask.
const RUN: usize = 256;

/// Computes `y = x ⊙ mask / (1 − p)`, or `+=` if `add`.
pub(crate) fn dropout(cpu: &Cpu, x: View, y: ViewMut, mask: Mask, add: bool) {
    let (shape, width) = (x.shape(), x.cols());
    with_element!(x.dtype(), X => with_element!(y.dtype(), Y => {
        let y = RowsMut::<Y>::new(y);
        cpu.for_parts(shape, |row, cols| {
            let first = row as u64 * width as u64 + cols.start as u64;
            let x = &x.row::<X>(row)[cols.clone()];
            // SAFETY: parts are disjoint; the slices have one length.
            unsafe { drop_row(cpu.isa(), x, first, mask, add, y.part(row, cols.start, cols.len())) };
        });
    }));
}

vector_kernel! {
    /// Applies the mask to a row. The slices have one length; `first` is the index of their first
    /// element.
    unsafe fn drop_row<V: Vector, X: Element, Y: Element>(x: &[X], first: u64, mask: Mask, add: bool, y: &mut [Y]) {
        let mut factors = [0.0f32; RUN + 2];
        for start in (0..x.len()).step_by(RUN) {
            let (index, count) = (first + start as u64, RUN.min(x.len() - start));
            // 64 random bits serve two neighbours, the first of which has an even index.
            for (pair, factors) in factors.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let bits = mask.bits(index / 2 + pair as u64);
                for (factor, bits) in factors.iter_mut().zip([bits as u32, (bits >> 32) as u32]) {
                    *factor = if bits < mask.bound { 0.0 } else { mask.factor };
                }
            }
            // SAFETY: the lanes lie inside the slices, and `RUN` and one factors are enough.
            unsafe {
                let factors = factors.as_ptr().add((index % 2) as usize);
                let (x, y) = (x.as_ptr().add(start), y.as_mut_ptr().add(start));
                for_lanes!(V, count, |i, n| {
                    let mut value = V::get(x.add(i), n).mul(V::load(factors.add(i), n));
                    if add {
                        // Not fused, so that levels without such an instruction give the same bits.
                        value = V::get(y.add(i), n).add(value);
                    }
                    value.put(y.add(i), n);
                });
            }
        }
    }
}

impl Cpu {
    /// Adds uniform noise to each row.
    pub(crate) fn add_noise(&self, x: ViewMut, rows: &[NoiseRow]) {
        let per_block = block_rows(x.cols());
        let x = RowsMut::<f32>::new(x);
        self.parallel_ranges(rows.len(), per_block, |_, range| {
            for row in range {
                let NoiseRow { key, scale } = rows[row];
                // SAFETY: rows belong to one block each.
                let x = unsafe { x.row(row) };
                for (pair, x) in x.chunks_mut(2).enumerate() {
                    let bits = mix(key.wrapping_add((pair as u64).wrapping_mul(STEP)));
                    for (x, bits) in x.iter_mut().zip([bits as u32, (bits >> 32) as u32]) {
                        *x += scale * (bits.cast_signed() as f32 * UNIT);
                    }
                }
            }
        });
    }
}

/// 2⁻³¹, which makes an integer of 32 bits a number in [−1, 1].
const UNIT: f32 = 1.0 / 2_147_483_648.0;
