//! Copies and conversions of whole matrices.

use std::ops::Range;

use super::rows::RowsMut;
use super::vector::{for_lanes, vector_kernel};
use super::{Cpu, Isa};
use crate::numerics::dtype::Element;
use crate::{View, ViewMut, with_element};

/// Elements per block: enough to outweigh the scheduling, few enough to balance a few megabytes.
const BLOCK: usize = 1 << 14;

impl Cpu {
    /// Calls `part(row, columns)` for every piece of a `rows × cols` matrix, pieces in parallel.
    pub(super) fn for_parts(&self, (rows, cols): (usize, usize), part: impl Fn(usize, Range<usize>) + Sync) {
        if rows == 0 || cols == 0 {
            return;
        }
        let (rows_per_block, pieces_per_row) = ((BLOCK / cols).max(1), cols.div_ceil(BLOCK));
        let row_blocks = rows.div_ceil(rows_per_block);
        self.parallel_for(row_blocks * pieces_per_row, |block| {
            let (row_block, piece) = (block / pieces_per_row, block % pieces_per_row);
            let first = row_block * rows_per_block;
            let columns = piece * BLOCK..cols.min((piece + 1) * BLOCK);
            for row in first..rows.min(first + rows_per_block) {
                part(row, columns.clone());
            }
        });
    }

    pub(crate) fn fill_zero(&self, x: ViewMut) {
        let x = flat_mut(x, true);
        let shape = x.shape();
        with_element!(x.dtype(), E => {
            let x = RowsMut::<E>::new(x);
            self.for_parts(shape, |row, cols| {
                // SAFETY: parts are disjoint.
                unsafe { x.part(row, cols.start, cols.len()) }.fill(E::from_f32(0.0));
            });
        });
    }

    pub(crate) fn cast(&self, src: View, dst: ViewMut) {
        let both = src.is_contiguous() && dst.is_contiguous();
        let (src, dst) = (flat(src, both), flat_mut(dst, both));
        let shape = dst.shape();
        with_element!(src.dtype(), S => with_element!(dst.dtype(), D => {
            let dst = RowsMut::<D>::new(dst);
            self.for_parts(shape, |row, cols| {
                // SAFETY: parts are disjoint.
                convert(self.isa(), &src.row::<S>(row)[cols.clone()], unsafe { dst.part(row, cols.start, cols.len()) });
            });
        }));
    }

    pub(crate) fn add(&self, src: View, dst: ViewMut) {
        let both = src.is_contiguous() && dst.is_contiguous();
        let (src, dst) = (flat(src, both), flat_mut(dst, both));
        let shape = dst.shape();
        let dst = RowsMut::<f32>::new(dst);
        with_element!(src.dtype(), S => self.for_parts(shape, |row, cols| {
            // SAFETY: parts are disjoint.
            accumulate(self.isa(), &src.row::<S>(row)[cols.clone()], unsafe { dst.part(row, cols.start, cols.len()) });
        }));
    }

    pub(crate) fn scale(&self, x: ViewMut, factor: f32) {
        let x = flat_mut(x, true);
        let shape = x.shape();
        with_element!(x.dtype(), E => {
            let x = RowsMut::<E>::new(x);
            self.for_parts(shape, |row, cols| {
                // SAFETY: parts are disjoint.
                unsafe { scale_vectors(self.isa(), factor, x.part(row, cols.start, cols.len())) };
            });
        });
    }

    pub(crate) fn gather_rows(&self, src: View, rows: &[u32], dst: ViewMut) {
        let shape = dst.shape();
        with_element!(src.dtype(), S => with_element!(dst.dtype(), D => {
            let dst = RowsMut::<D>::new(dst);
            self.for_parts(shape, |row, cols| {
                // SAFETY: parts are disjoint.
                convert(self.isa(), &src.row::<S>(rows[row] as usize)[cols.clone()], unsafe { dst.part(row, cols.start, cols.len()) });
            });
        }));
    }

    pub(crate) fn spread_rows(&self, src: View, rows: &[u32], mut dst: ViewMut) {
        self.fill_zero(dst.reborrow());
        self.scatter_rows(src, rows, dst);
    }

    pub(crate) fn scatter_rows(&self, src: View, rows: &[u32], dst: ViewMut) {
        with_element!(src.dtype(), S => with_element!(dst.dtype(), D => {
            let dst = RowsMut::<D>::new(dst);
            self.for_parts(src.shape(), |row, cols| {
                // SAFETY: the rows are distinct, so parts are disjoint.
                convert(self.isa(), &src.row::<S>(row)[cols.clone()], unsafe { dst.part(rows[row] as usize, cols.start, cols.len()) });
            });
        }));
    }

    pub(crate) fn write_f32(&self, values: &[f32], dst: ViewMut) {
        let shape = dst.shape();
        with_element!(dst.dtype(), D => {
            let dst = RowsMut::<D>::new(dst);
            self.for_parts(shape, |row, cols| {
                let start = row * shape.1;
                // SAFETY: parts are disjoint.
                convert(self.isa(), &values[start + cols.start..start + cols.end], unsafe { dst.part(row, cols.start, cols.len()) });
            });
        });
    }

    pub(crate) fn read_f32(&self, src: View, values: &mut [f32]) {
        let cols = src.cols().max(1);
        with_element!(src.dtype(), S => for (row, values) in values.chunks_exact_mut(cols).enumerate() {
            convert(self.isa(), src.row::<S>(row), values);
        });
    }
}

/// Returns the matrix as one row if it is contiguous and `wanted`.
fn flat(x: View, wanted: bool) -> View {
    if wanted && x.is_contiguous() { x.reshape(1, x.len()) } else { x }
}

fn flat_mut(x: ViewMut, wanted: bool) -> ViewMut {
    let len = x.len();
    if wanted && x.is_contiguous() { x.reshape(1, len) } else { x }
}

vector_kernel! {
    /// Computes `dst = src`.
    unsafe fn convert_vectors<V: Vector, S: Element, D: Element>(src: &[S], dst: &mut [D]) {
        let (from, to) = (src.as_ptr(), dst.as_mut_ptr());
        for_lanes!(V, dst.len().min(src.len()), |start, count| {
            // SAFETY: the lanes lie inside both slices.
            unsafe { V::get(from.add(start), count).put(to.add(start), count) };
        });
    }
}

vector_kernel! {
    /// Computes `dst += src`.
    unsafe fn add_vectors<V: Vector, S: Element>(src: &[S], dst: &mut [f32]) {
        let (from, to) = (src.as_ptr(), dst.as_mut_ptr());
        for_lanes!(V, dst.len().min(src.len()), |start, count| {
            // SAFETY: the lanes lie inside both slices.
            unsafe { V::load(to.add(start), count).add(V::get(from.add(start), count)).store(to.add(start), count) };
        });
    }
}

vector_kernel! {
    /// Computes `x *= factor`.
    unsafe fn scale_vectors<V: Vector, E: Element>(factor: f32, x: &mut [E]) {
        let x_start = x.as_mut_ptr();
        for_lanes!(V, x.len(), |start, count| {
            // SAFETY: the lanes lie inside the slice.
            unsafe { V::get(x_start.add(start), count).mul(V::splat(factor)).put(x_start.add(start), count) };
        });
    }
}

/// Computes `dst = src` with conversion.
pub(super) fn convert<S: Element, D: Element>(isa: Isa, src: &[S], dst: &mut [D]) {
    assert_eq!(src.len(), dst.len());
    // SAFETY: the slices have one length.
    unsafe { convert_vectors(isa, src, dst) };
}

/// Computes `dst += src` with conversion.
pub(super) fn accumulate<S: Element>(isa: Isa, src: &[S], dst: &mut [f32]) {
    assert_eq!(src.len(), dst.len());
    // SAFETY: the slices have one length.
    unsafe { add_vectors(isa, src, dst) };
}
