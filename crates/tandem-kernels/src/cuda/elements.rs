//! Launch parameters of element-wise kernels, for `elements.cuh`.

use super::driver::Grid;
use crate::{DType, View};

/// Threads of a block, as in `elements.cuh`.
const THREADS: u32 = 256;

/// Returns the vectors per thread.
fn depth(per_vector: usize) -> usize {
    if per_vector == 8 { 2 } else { 4 }
}

/// Iteration over matrices of one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Elements {
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// True if all are aligned for vectors of elements.
    pub(super) wide: bool,
    per_vector: usize,
}

impl Elements {
    /// Iterates over matrices of one shape, as one long row if all are contiguous.
    pub(super) fn new(operands: &[View]) -> Self {
        let (rows, cols) = operands[0].shape();
        if operands.iter().all(View::is_contiguous) {
            return Self::over(1, rows * cols, operands, |_| true);
        }
        Self::by_rows(rows, cols, operands)
    }

    /// Iterates over `rows × cols` where a table selects the row of an operand.
    pub(super) fn by_rows(rows: usize, cols: usize, operands: &[View]) -> Self {
        let per_vector = at_once(operands);
        Self::over(rows, cols, operands, |view| has_aligned_rows(view, per_vector))
    }

    fn over(rows: usize, cols: usize, operands: &[View], fits: impl Fn(&View) -> bool) -> Self {
        let per_vector = at_once(operands);
        let is_aligned = |view: &View| is_aligned(view, per_vector) && fits(view);
        let wide = cols.is_multiple_of(per_vector) && operands.iter().all(is_aligned);
        Self { rows, cols, wide, per_vector: if wide { per_vector } else { 1 } }
    }

    /// Keeps to vectors only if they divide these numbers of columns.
    pub(super) fn wide_if_divides(self, columns: &[usize]) -> Self {
        let wide = self.wide && columns.iter().all(|n| n.is_multiple_of(self.per_vector));
        Self { wide, per_vector: if wide { self.per_vector } else { 1 }, ..self }
    }

    /// Returns the grid.
    pub(super) fn grid(&self) -> Grid {
        let vectors = self.rows * (self.cols / self.per_vector);
        Grid::new(vectors.div_ceil(THREADS as usize * depth(self.per_vector)), THREADS)
    }
}

/// Returns the elements per vector: 16 bytes of the widest type.
pub(super) fn at_once(operands: &[View]) -> usize {
    if operands.iter().all(|view| view.dtype() == DType::Bf16) { 8 } else { 4 }
}

/// Returns whether every row of each operand can be moved in vectors of `per_vector` elements.
pub(super) fn are_aligned(per_vector: usize, operands: &[View]) -> bool {
    let is_aligned = |view: &View| {
        let fits = view.cols().is_multiple_of(per_vector) && has_aligned_rows(view, per_vector);
        fits && is_aligned(view, per_vector)
    };
    operands.iter().all(is_aligned)
}

fn has_aligned_rows(view: &View, per_vector: usize) -> bool {
    view.rows() <= 1 || view.stride().is_multiple_of(per_vector)
}

/// Returns whether a view is aligned; a vector of eight f32 is moved as two.
fn is_aligned(view: &View, per_vector: usize) -> bool {
    let bytes = (per_vector * view.dtype().size()).min(16);
    view.address().is_multiple_of(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, MemoryKind, Tensor};

    fn matrix(rows: usize, cols: usize, dtype: DType) -> Tensor {
        Device::meta().alloc(MemoryKind::Scratch, rows, cols, dtype).expect("a dry run has room")
    }

    #[test]
    fn vectors_are_used_where_every_row_is_aligned() {
        let (narrow, wide) = (matrix(3, 24, DType::Bf16), matrix(3, 24, DType::F32));
        let flat = Elements::new(&[narrow.view()]);
        assert_eq!((flat.rows, flat.cols, flat.wide, flat.per_vector), (1, 72, true, 8));
        let both = Elements::new(&[narrow.view(), wide.view()]);
        assert_eq!((both.rows, both.cols, both.wide, both.per_vector), (1, 72, true, 4));
        let part = Elements::new(&[narrow.view().col_range(8..24)]);
        assert_eq!((part.rows, part.cols, part.wide, part.per_vector), (3, 16, true, 8));
        // 8 bytes from what 16 could be moved from.
        let odd = Elements::new(&[narrow.view().col_range(4..20)]);
        assert_eq!((odd.rows, odd.cols, odd.wide, odd.per_vector), (3, 16, false, 1));
        let odd = matrix(3, 12, DType::Bf16);
        assert!(!Elements::new(&[odd.view().col_range(0..8)]).wide, "rows 24 bytes apart");
    }

    #[test]
    fn parts_of_rows_that_vectors_do_not_divide_are_moved_one_by_one() {
        let x = matrix(3, 24, DType::F32);
        let way = Elements::by_rows(3, 24, &[x.view()]);
        assert_eq!(way.wide_if_divides(&[8, 12]), way);
        let narrow = way.wide_if_divides(&[8, 6]);
        assert_eq!((narrow.wide, narrow.per_vector), (false, 1));
    }

    #[test]
    fn blocks_take_all_vectors() {
        let elements = |rows, cols| Elements::by_rows(rows, cols, &[matrix(1, cols, DType::F32).view()]);
        assert_eq!(elements(1, 4096).grid().blocks, [1, 1, 1]);
        assert_eq!(elements(2, 4096).grid().blocks, [2, 1, 1]);
        assert_eq!(elements(1, 4097).grid().blocks, [5, 1, 1]);
        assert_eq!(elements(0, 8).grid().blocks, [0, 1, 1]);
        assert_eq!(elements(8, 0).grid().blocks, [0, 1, 1]);
    }
}
