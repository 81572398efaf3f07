//! Symmetric matrices of which one half is computed.

use super::Cpu;
use super::rows::RowsMut;
use crate::ViewMut;

/// Rows and columns of a square that is copied at once: both its lines stay in the first-level cache.
const SQUARE: usize = 32;

impl Cpu {
    /// Copies the elements below the diagonal of a square f32 matrix to their places above.
    pub(crate) fn mirror(&self, matrix: ViewMut) {
        let (side, matrix) = (matrix.rows(), RowsMut::<f32>::new(matrix));
        self.parallel_ranges(side, SQUARE, |_, rows| {
            for first in (rows.start..side).step_by(SQUARE) {
                for row in rows.clone() {
                    for col in first.max(row + 1)..side.min(first + SQUARE) {
                        // SAFETY: both are inside the matrix; one task writes an element above the diagonal,
                        // and none one below.
                        unsafe { *matrix.address(row, col).0 = *matrix.address(col, row).0 };
                    }
                }
            }
        });
    }
}
