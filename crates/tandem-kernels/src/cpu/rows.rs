//! Matrices whose rows several threads write, each its own.

use std::marker::PhantomData;

use crate::{Element, ViewMut};

/// A mutably borrowed matrix that lends rows, or column ranges of rows, one by one.
pub(crate) struct RowsMut<'a, E> {
    pointer: *mut E,
    rows: usize,
    cols: usize,
    stride: usize,
    lifetime: PhantomData<&'a mut E>,
}

// SAFETY: this is an exclusive borrow of plain numbers; `part` demands that no two parts overlap.
unsafe impl<E: Send> Send for RowsMut<'_, E> {}
// SAFETY: as above.
unsafe impl<E: Send> Sync for RowsMut<'_, E> {}

impl<'a, E: Copy> RowsMut<'a, E> {
    /// Takes over a view.
    ///
    /// # Panics
    /// If the type differs.
    pub(crate) fn new(view: ViewMut<'a>) -> Self
    where
        E: Element,
    {
        Self {
            pointer: view.pointer_of(),
            rows: view.rows(),
            cols: view.cols(),
            stride: view.stride(),
            lifetime: PhantomData,
        }
    }

    /// Views a slice as a matrix of one row.
    pub(crate) fn from_slice(slice: &'a mut [E]) -> Self {
        let (pointer, cols) = (slice.as_mut_ptr(), slice.len());
        Self { pointer, rows: 1, cols, stride: cols, lifetime: PhantomData }
    }

    /// Returns an element's address and the row stride.
    pub(crate) fn address(&self, row: usize, col: usize) -> (*mut E, usize) {
        (self.pointer.wrapping_add(row * self.stride + col), self.stride)
    }

    /// Returns columns `start..start + length` of row `row`.
    ///
    /// # Panics
    /// If they are outside the matrix.
    ///
    /// # Safety
    /// While the result lives, no other part that overlaps it may exist.
    #[inline]
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(crate) unsafe fn part(&self, row: usize, start: usize, length: usize) -> &mut [E] {
        assert!(row < self.rows && start + length <= self.cols, "part {row}, {start}+{length}");
        // SAFETY: inside the exclusively borrowed matrix by the assertion; not aliased by the
        // caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(row * self.stride + start), length) }
    }

    /// Returns row `row`.
    ///
    /// # Panics
    /// If there is no such row.
    ///
    /// # Safety
    /// While the result lives, no other part that overlaps it may exist.
    #[inline]
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(crate) unsafe fn row(&self, row: usize) -> &mut [E] {
        // SAFETY: the caller's promise.
        unsafe { self.part(row, 0, self.cols) }
    }
}
