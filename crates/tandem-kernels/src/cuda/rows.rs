//! Launch parameters of kernels that sum over rows, for `rows.cuh`.

use super::driver::Grid;
use super::elements::{are_aligned, at_once};
use crate::View;

/// Threads of a block with several short rows.
const THREADS: usize = 256;

/// Fewest threads per row.
const LEAST_LANES: usize = 16;

/// Most threads per row.
pub(super) const MOST_LANES: usize = 512;

/// Most threads per row if a thread needs many registers.
pub(super) const FEWER_LANES: usize = 256;

/// Iteration over rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) rows: usize,
    pub(super) width: i32,
    /// True if all are aligned for vectors of elements.
    pub(super) wide: bool,
    /// Threads per row.
    pub(super) lanes: i32,
    /// Rows per block at a time.
    pub(super) groups: usize,
}

impl Rows {
    /// Iterates over rows of `x` and `y` beside rows of weights. A thread holds 16 elements, or 4
    /// without vectors.
    pub(super) fn forward(x: View, weights: &[View], y: View) -> Self {
        let per_vector = at_once(&[x, y]);
        let wide = are_aligned(per_vector, &[x, y]) && are_aligned(per_vector, weights);
        Self::new(x, wide, if wide { 16 } else { 4 }, MOST_LANES)
    }

    /// Iterates over rows of `x`, `dy` and f32 `dx`. A thread holds 8 elements of each, or 2
    /// without vectors.
    pub(super) fn backward(x: View, w: View, dy: View, dx: View, most_lanes: usize) -> Self {
        let wide = are_aligned(4, &[x, w, dy, dx]);
        Self::new(x, wide, if wide { 8 } else { 2 }, most_lanes)
    }

    fn new(x: View, wide: bool, held: usize, most_lanes: usize) -> Self {
        let lanes = x.cols().div_ceil(held).next_power_of_two().clamp(LEAST_LANES, most_lanes);
        // More than a warp adds through shared memory, which has room for one row's sums.
        let groups = if lanes > 32 { 1 } else { THREADS / lanes };
        let width = i32::try_from(x.cols()).expect("fewer than 2^31 columns");
        Self { rows: x.rows(), width, wide, lanes: lanes as i32, groups }
    }

    /// Returns a grid with `block_rows` rows per block.
    pub(super) fn grid(&self, block_rows: usize) -> Grid {
        Grid::new(self.rows.div_ceil(block_rows), self.lanes as u32 * self.groups as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device, MemoryKind};

    #[test]
    fn longer_rows_have_more_threads() {
        let shape = |cols: usize| {
            let matrix = |dtype| {
                Device::meta().alloc(MemoryKind::Scratch, 70, cols, dtype).expect("a dry run has room")
            };
            let (x, y) = (matrix(DType::Bf16), matrix(DType::Bf16));
            let rows = Rows::forward(x.view(), &[matrix(DType::F32).view().row_range(0..1)], y.view());
            (rows.wide, rows.lanes, rows.groups, rows.grid(rows.groups).blocks[0])
        };
        assert_eq!(shape(128), (true, 16, 16, 5));
        assert_eq!(shape(512), (true, 32, 8, 9));
        assert_eq!(shape(1024), (true, 64, 1, 70));
        assert_eq!(shape(4096), (true, 256, 1, 70));
        assert_eq!(shape(100_000), (true, 512, 1, 70));
        assert_eq!(shape(1023), (false, 256, 1, 70));
        assert_eq!(shape(1), (false, 16, 16, 5));
    }
}
