//! Elementwise operations on f32.

use super::Cpu;
use super::rows::RowsMut;

/// Computes `y = a / b`, or `+=`. Rows are as short as a layer is wide, so one thread suffices.
pub(crate) fn divide(a: &[f32], b: &[f32], y: &mut [f32], add: bool) {
    for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
        *y = if add { *y + a / b } else { a / b };
    }
}

/// Elements per task.
const BLOCK: usize = 1 << 15;

impl Cpu {
    /// Computes `y = weight · x + (1 − weight) · y`.
    pub(crate) fn mix(&self, x: &[f32], weight: f32, y: &mut [f32]) {
        let rest = 1.0 - weight;
        let y = RowsMut::from_slice(y);
        self.parallel_ranges(x.len(), BLOCK, |_, range| {
            // SAFETY: blocks are disjoint.
            let y = unsafe { y.part(0, range.start, range.len()) };
            for (y, x) in y.iter_mut().zip(&x[range]) {
                *y = weight * x + rest * *y;
            }
        });
    }
}
