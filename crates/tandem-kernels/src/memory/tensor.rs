//! Matrices in device memory: owned ([`Tensor`]) and borrowed ([`View`], [`ViewMut`]).
//!
//! All are row-major matrices; a vector is one row. A view may have a row stride larger than its
//! width (a column range of a wider matrix), so fused projections need no copy.

use std::marker::PhantomData;
use std::ops::Range;

use crate::device::meta::MetaBlock;
use crate::memory::arena::Block;
use crate::numerics::dtype::{DType, Element};

pub(crate) enum Storage {
    Block(Block),
    Meta(#[expect(dead_code, reason = "held for its Drop, which takes the bytes off the ledger")] MetaBlock),
}

impl Storage {
    fn pointer(&self) -> *mut u8 {
        match self {
            Self::Block(block) => block.pointer(),
            // A dry run never dereferences; a dangling aligned pointer keeps the arithmetic
            // defined.
            Self::Meta(_) => std::ptr::without_provenance_mut(64),
        }
    }
}

/// Number of rows or columns, and the number that memory is allocated for. Matrices of changing
/// size that allocate for the largest size keep the same addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    len: usize,
    room: usize,
}

impl Extent {
    /// Creates an extent of `len` with room for at least `room`.
    pub const fn new(len: usize, room: usize) -> Self {
        Self { len, room: if room > len { room } else { len } }
    }

    /// Creates an extent of `len` without further room.
    pub const fn exact(len: usize) -> Self {
        Self { len, room: len }
    }

    /// Returns the number.
    pub const fn len(self) -> usize {
        self.len
    }

    /// Returns whether there is none.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the number that memory is allocated for.
    pub const fn room(self) -> usize {
        self.room
    }
}

/// A matrix that owns its memory and returns it to the arena on drop.
pub struct Tensor {
    storage: Storage,
    rows: Extent,
    cols: usize,
    dtype: DType,
}

/// A borrowed matrix.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pointer: *const u8,
    rows: usize,
    /// Rows that memory is allocated for; in a range of rows, its length.
    room: usize,
    cols: usize,
    stride: usize,
    dtype: DType,
    lifetime: PhantomData<&'a u8>,
}

/// A mutably borrowed matrix.
pub struct ViewMut<'a> {
    pointer: *mut u8,
    rows: usize,
    cols: usize,
    stride: usize,
    dtype: DType,
    lifetime: PhantomData<&'a mut u8>,
}

// SAFETY: a view is a shared borrow of plain numbers; sending it is sending `&[T]`.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}
// SAFETY: a mutable view is an exclusive borrow of plain numbers; sending it is sending `&mut [T]`.
unsafe impl Send for ViewMut<'_> {}
// SAFETY: sharing it allows reading only, as sharing `&mut [T]` does.
unsafe impl Sync for ViewMut<'_> {}

impl Tensor {
    pub(crate) fn new(storage: Storage, rows: Extent, cols: usize, dtype: DType) -> Self {
        Self { storage, rows, cols, dtype }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len
    }

    /// Returns the rows and their allocated number.
    pub fn extent(&self) -> Extent {
        self.rows
    }

    /// Returns the number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the whole matrix.
    pub fn view(&self) -> View<'_> {
        View {
            pointer: self.storage.pointer(),
            rows: self.rows.len,
            room: self.rows.room,
            cols: self.cols,
            stride: self.cols,
            dtype: self.dtype,
            lifetime: PhantomData,
        }
    }

    /// Returns the whole matrix, to be written.
    pub fn view_mut(&mut self) -> ViewMut<'_> {
        ViewMut {
            pointer: self.storage.pointer(),
            rows: self.rows.len,
            cols: self.cols,
            stride: self.cols,
            dtype: self.dtype,
            lifetime: PhantomData,
        }
    }

    /// Returns whether the tensor belongs to a dry run and has no memory.
    pub fn is_meta(&self) -> bool {
        matches!(self.storage, Storage::Meta(_))
    }

    /// Starts reading the tensor's pages if it is in a file; otherwise does nothing.
    pub fn prefetch_pages(&self) {
        if let Storage::Block(block) = &self.storage {
            block.prefetch_pages();
        }
    }

    /// Drops the tensor's pages from memory if it is in a file; a later use reads them again.
    /// Otherwise does nothing.
    pub fn evict_pages(&self) {
        if let Storage::Block(block) = &self.storage {
            block.evict_pages();
        }
    }

    /// Shrinks the tensor to its first `rows` rows; its memory stays allocated.
    ///
    /// # Panics
    /// If `rows` is more than the tensor has.
    pub fn truncate_rows(&mut self, rows: usize) {
        assert!(rows <= self.rows.len, "truncate_rows({rows}) of a tensor with {} rows", self.rows.len);
        self.rows.len = rows;
    }
}

/// Shape, strides, address and parts of a view, shared or mutable. `room` names the field that only
/// [`View`] has.
macro_rules! describe {
    ($view:ident $(, $room:ident)?) => {
        impl $view<'_> {
            /// Returns the number of rows.
            pub fn rows(&self) -> usize {
                self.rows
            }

            /// Returns the number of columns.
            pub fn cols(&self) -> usize {
                self.cols
            }

            /// Returns rows and columns.
            pub fn shape(&self) -> (usize, usize) {
                (self.rows, self.cols)
            }

            /// Returns the distance between rows in elements.
            pub fn stride(&self) -> usize {
                self.stride
            }

            /// Returns the element type.
            pub fn dtype(&self) -> DType {
                self.dtype
            }

            /// Returns the number of elements.
            pub fn len(&self) -> usize {
                self.rows * self.cols
            }

            /// Returns the bytes of the elements, without gaps between rows.
            pub fn num_bytes(&self) -> usize {
                self.len() * self.dtype.size()
            }

            /// Returns whether there is no element.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Returns whether rows follow one another without a gap.
            pub fn is_contiguous(&self) -> bool {
                self.stride == self.cols || self.rows <= 1
            }

            /// Returns the address of the first element in the device's memory.
            pub fn address(&self) -> u64 {
                self.pointer.addr() as u64
            }

        /// Returns a range of rows.
        ///
        /// # Panics
        /// If the range is not inside the matrix.
        pub fn row_range(self, range: Range<usize>) -> Self {
            assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
            let pointer = self.pointer.wrapping_add(range.start * self.stride * self.dtype.size());
            Self { pointer, rows: range.len(), $($room: range.len(),)? ..self }
        }

        /// Returns a range of columns.
        ///
        /// # Panics
        /// If the range is not inside the matrix.
        pub fn col_range(self, range: Range<usize>) -> Self {
            assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
            let pointer = self.pointer.wrapping_add(range.start * self.dtype.size());
            Self { pointer, cols: range.len(), ..self }
        }

        /// Returns the elements in another shape.
        ///
        /// # Panics
        /// If the view is not contiguous or the number of elements differs.
        pub fn reshape(self, rows: usize, cols: usize) -> Self {
            assert!(self.is_contiguous() && rows * cols == self.len(), "reshape to {rows}x{cols}");
            Self { rows, $($room: rows,)? cols, stride: cols, ..self }
        }
        }
    };
}
describe!(View, room);
describe!(ViewMut);

impl<'a> View<'a> {
    /// Views a contiguous matrix at an address.
    ///
    /// # Safety
    /// For 'a a matrix of that shape is at the address, aligned for its type, and nothing writes
    /// it. A dry run never reads it.
    pub(crate) unsafe fn from_pointer(pointer: *const u8, rows: usize, cols: usize, dtype: DType) -> Self {
        Self { pointer, rows, room: rows, cols, stride: cols, dtype, lifetime: PhantomData }
    }

    /// Views host memory as one row.
    pub fn from_slice(values: &'a [f32]) -> Self {
        let (pointer, cols) = (values.as_ptr().cast(), values.len());
        Self { pointer, rows: 1, room: 1, cols, stride: cols, dtype: DType::F32, lifetime: PhantomData }
    }

    /// Views host memory as a matrix.
    ///
    /// # Panics
    /// If the size differs.
    pub(crate) fn from_host<E: Element>(values: &'a [E], rows: usize, cols: usize) -> Self {
        assert_eq!(values.len(), rows * cols, "a {rows}x{cols} matrix");
        // SAFETY: the slice is borrowed for 'a, aligned and as long as the matrix.
        unsafe { Self::from_pointer(values.as_ptr().cast(), rows, cols, E::DTYPE) }
    }

    /// Returns the rows and their allocated number; a range of rows has no further room.
    pub fn extent(&self) -> Extent {
        Extent { len: self.rows, room: self.room }
    }

    /// Returns the elements as a slice, on the CPU.
    ///
    /// # Panics
    /// If the type differs or the view is not contiguous.
    pub fn as_slice<E: Element>(self) -> &'a [E] {
        assert!(self.is_contiguous(), "as_slice of a strided view");
        // SAFETY: the view borrows `rows * cols` plain numbers of this type for 'a; the pointer is
        // aligned for elements.
        unsafe { std::slice::from_raw_parts(self.pointer_of::<E>(), self.len()) }
    }

    /// Returns the elements as bytes in the machine's order, on the CPU.
    ///
    /// # Panics
    /// If the view is not contiguous.
    pub fn as_bytes(self) -> &'a [u8] {
        assert!(self.is_contiguous(), "as_bytes of a strided view");
        // SAFETY: the view borrows `len` plain numbers for 'a, and every byte of a number is a
        // byte.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len() * self.dtype.size()) }
    }

    /// Returns one row as a slice, on the CPU.
    ///
    /// # Panics
    /// If the type differs or there is no such row.
    pub fn row<E: Element>(self, row: usize) -> &'a [E] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: row `row` is inside the borrowed matrix.
        unsafe { std::slice::from_raw_parts(self.pointer_of::<E>().add(row * self.stride), self.cols) }
    }

    /// Returns the first element's address, on the CPU.
    ///
    /// # Panics
    /// If the type differs.
    pub fn pointer_of<E: Element>(self) -> *const E {
        assert!(self.dtype == E::DTYPE, "a {} view read as {}", self.dtype, E::DTYPE);
        self.pointer.cast()
    }
}

impl<'a> ViewMut<'a> {
    /// Views a contiguous matrix at an address.
    ///
    /// # Safety
    /// As [`View::from_pointer`], and nothing else accesses the matrix.
    pub(crate) unsafe fn from_pointer(pointer: *mut u8, rows: usize, cols: usize, dtype: DType) -> Self {
        Self { pointer, rows, cols, stride: cols, dtype, lifetime: PhantomData }
    }

    /// Views a matrix at an address, with rows `stride` elements apart.
    ///
    /// # Safety
    /// As [`ViewMut::from_pointer`].
    pub(crate) unsafe fn strided(
        pointer: *mut u8,
        rows: usize,
        cols: usize,
        stride: usize,
        dtype: DType,
    ) -> Self {
        Self { pointer, rows, cols, stride, dtype, lifetime: PhantomData }
    }

    /// Returns a shared view.
    pub fn view(&self) -> View<'_> {
        View {
            pointer: self.pointer,
            rows: self.rows,
            room: self.rows,
            cols: self.cols,
            stride: self.stride,
            dtype: self.dtype,
            lifetime: PhantomData,
        }
    }

    /// Returns the first half of each row of an f32 matrix as bf16: the result of a kernel that
    /// narrows rows in place.
    pub(crate) fn front_half(&self) -> View<'_> {
        debug_assert_eq!(self.dtype, DType::F32);
        View { stride: 2 * self.stride, dtype: DType::Bf16, ..self.view() }
    }

    /// Borrows the view for a shorter time, so that it can be passed on and used again.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { lifetime: PhantomData, ..*self }
    }

    /// Splits into adjacent column ranges of the given widths.
    ///
    /// # Panics
    /// If the widths do not add up to the number of columns.
    pub fn split_cols<const N: usize>(self, widths: [usize; N]) -> [Self; N] {
        assert_eq!(widths.iter().sum::<usize>(), self.cols, "split_cols {widths:?}");
        let mut start = 0;
        widths.map(|width| {
            let pointer = self.pointer.wrapping_add(start * self.dtype.size());
            start += width;
            // The parts are disjoint column ranges of the exclusively borrowed matrix.
            Self { pointer, cols: width, ..self }
        })
    }

    /// Splits into the rows before `row` and the rest.
    ///
    /// # Panics
    /// If `row` is more than the number of rows.
    pub fn split_rows(self, row: usize) -> [Self; 2] {
        assert!(row <= self.rows, "split_rows at {row} of {}", self.rows);
        let pointer = self.pointer.wrapping_add(row * self.stride * self.dtype.size());
        [Self { rows: row, ..self }, Self { pointer, rows: self.rows - row, ..self }]
    }

    /// Returns the elements as a mutable slice, on the CPU.
    ///
    /// # Panics
    /// If the type differs or the view is not contiguous.
    pub fn into_slice<E: Element>(self) -> &'a mut [E] {
        assert!(self.is_contiguous(), "into_slice of a strided view");
        let length = self.len();
        // SAFETY: the view borrows these plain numbers exclusively for 'a.
        unsafe { std::slice::from_raw_parts_mut(self.pointer_of::<E>(), length) }
    }

    /// Overwrites the elements from bytes in the machine's order, on the CPU.
    ///
    /// # Panics
    /// If the view is not contiguous or the number of bytes differs.
    pub fn copy_from_bytes(self, bytes: &[u8]) {
        assert!(self.is_contiguous(), "copy_from_bytes into a strided view");
        assert_eq!(bytes.len(), self.len() * self.dtype.size(), "bytes for {} elements", self.len());
        // SAFETY: the view borrows that many bytes exclusively, and every bit pattern is a number.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer, bytes.len()) };
    }

    /// Returns the first element's address, on the CPU.
    ///
    /// # Panics
    /// If the type differs.
    pub fn pointer_of<E: Element>(&self) -> *mut E {
        assert!(self.dtype == E::DTYPE, "a {} view written as {}", self.dtype, E::DTYPE);
        self.pointer.cast()
    }
}
