//! Elementwise operations on f32.

use super::Cpu;
use super::rows::RowsMut;
use crate::ops::lerp_of;

/// Computes `y = a / b`, or `+=`. Rows are as short as a layer is wide, so one thread suffices.
pub(crate) fn divide(a: &[f32], b: &[f32], y: &mut [f32], add: bool) {
    for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
        *y = if add { *y + a / b } else { a / b };
    }
}

/// Elements per task.
const BLOCK: usize = 1 << 15;

impl Cpu {
    /// Computes `y = of_x · x + of_y · y`.
    pub(crate) fn weighted_sum(&self, x: &[f32], of_x: f32, y: &mut [f32], of_y: f32) {
        let y = RowsMut::from_slice(y);
        self.parallel_ranges(x.len(), BLOCK, |_, range| {
            // SAFETY: blocks are disjoint.
            let y = unsafe { y.part(0, range.start, range.len()) };
            for (y, x) in y.iter_mut().zip(&x[range]) {
                *y = of_x * x + of_y * *y;
            }
        });
    }

    /// Computes `y = y + weight · (end − y)`.
    pub(crate) fn lerp(&self, end: &[f32], weight: f32, y: &mut [f32]) {
        let y = RowsMut::from_slice(y);
        self.parallel_ranges(end.len(), BLOCK, |_, range| {
            // SAFETY: blocks are disjoint.
            let y = unsafe { y.part(0, range.start, range.len()) };
            for (y, end) in y.iter_mut().zip(&end[range]) {
                *y = lerp_of(*y, *end, weight);
            }
        });
    }

    /// Exchanges two rows.
    pub(crate) fn swap(&self, a: &mut [f32], b: &mut [f32]) {
        let (len, a, b) = (a.len(), RowsMut::from_slice(a), RowsMut::from_slice(b));
        self.parallel_ranges(len, BLOCK, |_, range| {
            // SAFETY: blocks are disjoint.
            let [a, b] = [&a, &b].map(|rows| unsafe { rows.part(0, range.start, range.len()) });
            a.swap_with_slice(b);
        });
    }
}
