//! Matrices in device memory: owned ([`Tensor`]) and borrowed ([`View`], [`ViewMut`]).
//!
//! Everything is a row-major matrix; a vector is one row. Views may have a row stride larger than their width (a
//! column range of a wider matrix), so that fused projections need no copy.

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
            // A dry run never dereferences; a dangling aligned pointer keeps the arithmetic defined.
            Self::Meta(_) => std::ptr::without_provenance_mut(64),
        }
    }
}

/// How many rows or columns there are, and for how many memory is taken: where sizes change from one use to the next, those
/// that take as much as the largest take the same places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    len: usize,
    room: usize,
}

impl Extent {
    /// `len`, with room for `room` if that is more.
    pub const fn new(len: usize, room: usize) -> Self {
        Self { len, room: if room > len { room } else { len } }
    }

    /// `len`, and room for no more.
    pub const fn exact(len: usize) -> Self {
        Self { len, room: len }
    }

    /// How many there are.
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// For how many there is memory.
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
    /// Rows that there is memory for; of a range of rows, no more than it has.
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

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len
    }

    /// The rows, and for how many there is memory.
    pub fn extent(&self) -> Extent {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The whole matrix.
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

    /// The whole matrix, to be written.
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

    /// Whether this tensor belongs to a dry run and has no memory behind it.
    pub fn is_meta(&self) -> bool {
        matches!(self.storage, Storage::Meta(_))
    }

    /// Tells that it will be read soon. Where it lies in a file, the system begins to read it; elsewhere this does nothing.
    pub fn announce(&self) {
        if let Storage::Block(block) = &self.storage {
            block.announce();
        }
    }

    /// Tells that it is not needed for now. Where it lies in a file, it leaves this process's memory, and is read from there
    /// when it is used again; elsewhere this does nothing.
    pub fn let_go(&self) {
        if let Storage::Block(block) = &self.storage {
            block.let_go();
        }
    }

    /// Makes the tensor smaller without returning memory: the first `rows` rows remain visible.
    ///
    /// # Panics
    /// If `rows` is more than the tensor has.
    pub fn truncate_rows(&mut self, rows: usize) {
        assert!(rows <= self.rows.len, "truncate_rows({rows}) of a tensor with {} rows", self.rows.len);
        self.rows.len = rows;
    }
}

impl<'a> View<'a> {
    /// A contiguous matrix at an address.
    ///
    /// # Safety
    /// For 'a the matrix lies there, aligned for its type, and nothing writes it. On a dry run nothing need be there.
    pub(crate) unsafe fn from_pointer(pointer: *const u8, rows: usize, cols: usize, dtype: DType) -> Self {
        Self { pointer, rows, room: rows, cols, stride: cols, dtype, lifetime: PhantomData }
    }

    /// Host memory as one row.
    pub fn of_slice(values: &'a [f32]) -> Self {
        let (pointer, cols) = (values.as_ptr().cast(), values.len());
        Self { pointer, rows: 1, room: 1, cols, stride: cols, dtype: DType::F32, lifetime: PhantomData }
    }

    /// Host memory as a matrix.
    ///
    /// # Panics
    /// If it is of another size.
    pub(crate) fn of_host<E: Element>(values: &'a [E], rows: usize, cols: usize) -> Self {
        assert_eq!(values.len(), rows * cols, "a {rows}x{cols} matrix");
        // SAFETY: the slice is borrowed for 'a, aligned and as long as the matrix.
        unsafe { Self::from_pointer(values.as_ptr().cast(), rows, cols, E::DTYPE) }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The rows, and for how many the matrix has memory; a range of rows has no more than it shows.
    pub fn extent(&self) -> Extent {
        Extent { len: self.rows, room: self.room }
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row's start to the next one's.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Size of the elements, gaps between rows left out.
    pub fn num_bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether rows follow one another without a gap.
    pub fn is_contiguous(&self) -> bool {
        self.stride == self.cols || self.rows <= 1
    }

    /// A range of rows.
    ///
    /// # Panics
    /// If the range is not inside the matrix.
    pub fn row_range(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let pointer = self.pointer.wrapping_add(range.start * self.stride * self.dtype.size());
        Self { pointer, rows: range.len(), room: range.len(), ..self }
    }

    /// A range of columns.
    ///
    /// # Panics
    /// If the range is not inside the matrix.
    pub fn col_range(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        let pointer = self.pointer.wrapping_add(range.start * self.dtype.size());
        Self { pointer, cols: range.len(), ..self }
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If the view is not contiguous or the number of elements differs.
    pub fn reshape(self, rows: usize, cols: usize) -> Self {
        assert!(self.is_contiguous() && rows * cols == self.len(), "reshape to {rows}x{cols}");
        Self { rows, room: rows, cols, stride: cols, ..self }
    }

    /// The elements as a slice, on the CPU.
    ///
    /// # Panics
    /// If the type differs or the view is not contiguous.
    pub fn as_slice<E: Element>(self) -> &'a [E] {
        assert!(self.is_contiguous(), "as_slice of a strided view");
        // SAFETY: the view borrows `rows * cols` initialised-or-plain numbers of this type for 'a; the pointer is
        // 64-byte aligned at the tensor's start and element-aligned everywhere.
        unsafe { std::slice::from_raw_parts(self.pointer_of::<E>(), self.len()) }
    }

    /// The elements as bytes in the machine's order, on the CPU.
    ///
    /// # Panics
    /// If the view is not contiguous.
    pub fn as_bytes(self) -> &'a [u8] {
        assert!(self.is_contiguous(), "as_bytes of a strided view");
        // SAFETY: the view borrows `len` plain numbers for 'a, and every byte of a number is a byte.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len() * self.dtype.size()) }
    }

    /// One row as a slice, on the CPU.
    ///
    /// # Panics
    /// If the type differs or there is no such row.
    pub fn row<E: Element>(self, row: usize) -> &'a [E] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: row `row` is inside the borrowed matrix.
        unsafe { std::slice::from_raw_parts(self.pointer_of::<E>().add(row * self.stride), self.cols) }
    }

    /// The first element's address, in the memory of its device.
    pub(crate) fn address(&self) -> u64 {
        self.pointer.addr() as u64
    }

    /// The first element's address, on the CPU.
    ///
    /// # Panics
    /// If the type differs.
    pub fn pointer_of<E: Element>(self) -> *const E {
        assert!(self.dtype == E::DTYPE, "a {} view read as {}", self.dtype, E::DTYPE);
        self.pointer.cast()
    }
}

impl<'a> ViewMut<'a> {
    /// A contiguous matrix at an address.
    ///
    /// # Safety
    /// As [`View::from_pointer`], and nothing else reads or writes it.
    pub(crate) unsafe fn from_pointer(pointer: *mut u8, rows: usize, cols: usize, dtype: DType) -> Self {
        Self { pointer, rows, cols, stride: cols, dtype, lifetime: PhantomData }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row's start to the next one's.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Rows and columns.
    pub fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Size of the elements, gaps between rows left out.
    pub fn num_bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether rows follow one another without a gap.
    pub fn is_contiguous(&self) -> bool {
        self.stride == self.cols || self.rows <= 1
    }

    /// A shared view of the same elements.
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

    /// The first half of each row of an f32 matrix as bf16, where a kernel has narrowed rows in place.
    pub(crate) fn front_half(&self) -> View<'_> {
        debug_assert_eq!(self.dtype, DType::F32);
        View { stride: 2 * self.stride, dtype: DType::Bf16, ..self.view() }
    }

    /// The same view for a shorter time, so that it can be passed on and used again.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { lifetime: PhantomData, ..*self }
    }

    /// A range of rows.
    ///
    /// # Panics
    /// If the range is not inside the matrix.
    pub fn row_range(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        let pointer = self.pointer.wrapping_add(range.start * self.stride * self.dtype.size());
        Self { pointer, rows: range.len(), ..self }
    }

    /// A range of columns.
    ///
    /// # Panics
    /// If the range is not inside the matrix.
    pub fn col_range(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.cols, "columns {range:?} of {}", self.cols);
        let pointer = self.pointer.wrapping_add(range.start * self.dtype.size());
        Self { pointer, cols: range.len(), ..self }
    }

    /// Cuts into adjacent column ranges of the given widths, each mutable on its own.
    ///
    /// # Panics
    /// If the widths do not add up to the number of columns.
    pub fn split_cols<const N: usize>(self, widths: [usize; N]) -> [Self; N] {
        assert_eq!(widths.iter().sum::<usize>(), self.cols, "split_cols {widths:?}");
        let mut start = 0;
        widths.map(|width| {
            let pointer = self.pointer.wrapping_add(start * self.dtype.size());
            start += width;
            // The parts never overlap: they are disjoint column ranges of the exclusively borrowed matrix.
            Self { pointer, cols: width, ..self }
        })
    }

    /// Cuts into the rows before `row` and the rest.
    ///
    /// # Panics
    /// If `row` is more than the number of rows.
    pub fn split_rows(self, row: usize) -> [Self; 2] {
        assert!(row <= self.rows, "split_rows at {row} of {}", self.rows);
        let pointer = self.pointer.wrapping_add(row * self.stride * self.dtype.size());
        [Self { rows: row, ..self }, Self { pointer, rows: self.rows - row, ..self }]
    }

    /// The same elements in another shape.
    ///
    /// # Panics
    /// If the view is not contiguous or the number of elements differs.
    pub fn reshape(self, rows: usize, cols: usize) -> Self {
        assert!(self.is_contiguous() && rows * cols == self.len(), "reshape to {rows}x{cols}");
        Self { rows, cols, stride: cols, ..self }
    }

    /// The elements as a mutable slice, on the CPU.
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

    /// The first element's address, in the memory of its device.
    pub(crate) fn address(&self) -> u64 {
        self.pointer.addr() as u64
    }

    /// The first element's address, on the CPU.
    ///
    /// # Panics
    /// If the type differs.
    pub fn pointer_of<E: Element>(&self) -> *mut E {
        assert!(self.dtype == E::DTYPE, "a {} view written as {}", self.dtype, E::DTYPE);
        self.pointer.cast()
    }
}
