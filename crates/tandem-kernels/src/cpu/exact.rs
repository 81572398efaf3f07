//! Conversion of gradients to fixed point and back.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Cpu;
use super::rows::RowsMut;
use super::vector::vector_kernel;
use crate::View;
use crate::numerics::exact::FRACTION_BITS;

/// Elements per block.
const BLOCK: usize = 1 << 14;

const SCALE: f64 = (1u64 << FRACTION_BITS) as f64;

impl Cpu {
    pub(crate) fn exact_sum(&self, terms: View, sums: &mut [i64], add: bool, limit: f32) -> bool {
        let terms = terms.as_slice::<f32>();
        let sums = RowsMut::from_slice(sums);
        let in_range = AtomicBool::new(true);
        self.parallel_ranges(terms.len(), BLOCK, |_, range| {
            // SAFETY: blocks are disjoint.
            let sums = unsafe { sums.part(0, range.start, range.len()) };
            // SAFETY: both are the length of the block.
            let good = unsafe {
                if add {
                    accumulate(self.isa(), &terms[range], sums, limit)
                } else {
                    store(self.isa(), &terms[range], sums, limit)
                }
            };
            if !good {
                in_range.store(false, Ordering::Relaxed);
            }
        });
        in_range.into_inner()
    }
}

impl Cpu {
    pub(crate) fn exact_merge(&self, other: &[i64], sums: &mut [i64], add: bool) {
        let sums = RowsMut::from_slice(sums);
        self.parallel_ranges(other.len(), BLOCK, |_, range| {
            // SAFETY: blocks are disjoint.
            let sums = unsafe { sums.part(0, range.start, range.len()) };
            let other = &other[range];
            if add {
                sums.iter_mut().zip(other).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
            } else {
                sums.copy_from_slice(other);
            }
        });
    }
}

/// Rounds towards zero; values out of range saturate, and NaN becomes 0.
#[inline(always)]
fn fixed(x: f32) -> i64 {
    (f64::from(x) * SCALE) as i64
}

vector_kernel! {
    /// Runs on slices of one length.
    unsafe fn store<V: Vector>(terms: &[f32], sums: &mut [i64], limit: f32) -> bool {
        let mut good = true;
        for (sum, &term) in sums.iter_mut().zip(terms) {
            // The comparison is false for NaN.
            good &= term.abs() < limit;
            *sum = fixed(term);
        }
        good
    }
}

vector_kernel! {
    /// Runs on slices of one length.
    unsafe fn accumulate<V: Vector>(terms: &[f32], sums: &mut [i64], limit: f32) -> bool {
        let mut good = true;
        for (sum, &term) in sums.iter_mut().zip(terms) {
            good &= term.abs() < limit;
            *sum = sum.wrapping_add(fixed(term));
        }
        good
    }
}

vector_kernel! {
    /// Converts each sum to f32, by way of f64. The slices have one length.
    pub(super) unsafe fn to_f32<V: Vector>(sums: &[i64], values: &mut [f32]) {
        for (value, &sum) in values.iter_mut().zip(sums) {
            *value = (sum as f64 * (1.0 / SCALE)) as f32;
        }
    }
}
