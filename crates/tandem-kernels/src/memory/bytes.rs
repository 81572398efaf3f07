//! Device memory counted in bytes, for packed weights.
//!
//! Ranges begin at multiples of [`ALIGNMENT`], so a matrix that begins at a range can be read in
//! place.

use std::marker::PhantomData;
use std::ops::Range;

use crate::memory::tensor::{Tensor, View, ViewMut};
use crate::{DType, Device, MemoryKind, Result};

/// Bytes of a cache line; ranges and matrices in place begin at multiples of it.
pub const ALIGNMENT: usize = 64;

/// Owned bytes, returned to the arena on drop.
pub struct Bytes {
    /// `[1, ⌈len / 4⌉]` f32.
    words: Tensor,
    len: usize,
}

/// Borrowed bytes.
#[derive(Clone, Copy)]
pub struct BytesView<'a> {
    pointer: *const u8,
    len: usize,
    lifetime: PhantomData<&'a u8>,
}

/// Mutably borrowed bytes.
pub struct BytesMut<'a> {
    pointer: *mut u8,
    len: usize,
    lifetime: PhantomData<&'a mut u8>,
}

// SAFETY: a view is a shared borrow of plain bytes; sending it is sending `&[u8]`.
unsafe impl Send for BytesView<'_> {}
// SAFETY: as above.
unsafe impl Sync for BytesView<'_> {}
// SAFETY: a mutable view is an exclusive borrow of plain bytes; sending it is sending `&mut [u8]`.
unsafe impl Send for BytesMut<'_> {}
// SAFETY: sharing it allows reading only, as sharing `&mut [u8]` does.
unsafe impl Sync for BytesMut<'_> {}

impl Bytes {
    /// Allocates `len` bytes of unspecified value.
    pub fn new(device: &Device, kind: MemoryKind, len: usize) -> Result<Self> {
        Ok(Self { words: device.alloc(kind, 1, len.div_ceil(4), DType::F32)?, len })
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether the bytes belong to a dry run.
    pub fn is_meta(&self) -> bool {
        self.words.is_meta()
    }

    /// Does the same as [`Tensor::prefetch_pages`].
    pub fn prefetch_pages(&self) {
        self.words.prefetch_pages();
    }

    /// Does the same as [`Tensor::evict_pages`].
    pub fn evict_pages(&self) {
        self.words.evict_pages();
    }

    /// Returns a view of all elements.
    pub fn view(&self) -> BytesView<'_> {
        let pointer = self.words.view().pointer_of::<f32>().cast();
        BytesView { pointer, len: self.len, lifetime: PhantomData }
    }

    /// Returns a mutable view of all elements.
    pub fn view_mut(&mut self) -> BytesMut<'_> {
        let pointer = self.words.view_mut().pointer_of::<f32>().cast();
        BytesMut { pointer, len: self.len, lifetime: PhantomData }
    }

    /// Returns bytes `range`.
    ///
    /// # Panics
    /// If the range is not inside, or does not begin at a multiple of [`ALIGNMENT`].
    pub fn range(&self, range: Range<usize>) -> BytesView<'_> {
        self.view().range(range)
    }

    /// Borrows bytes `range` mutably.
    ///
    /// # Panics
    /// As [`Self::range`].
    pub fn range_mut(&mut self, range: Range<usize>) -> BytesMut<'_> {
        self.view_mut().range(range)
    }

    /// Returns a slice, on the CPU.
    pub fn as_slice(&self) -> &[u8] {
        self.view().as_slice()
    }

    /// Returns a mutable slice, on the CPU.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.view_mut().into_slice()
    }
}

/// Asserts that the range lies inside `len` bytes and is aligned.
fn check(range: &Range<usize>, len: usize) {
    assert!(range.start <= range.end && range.end <= len, "bytes {range:?} of {len}");
    assert!(range.start.is_multiple_of(ALIGNMENT), "bytes {range:?} begin at no multiple of {ALIGNMENT}");
}

/// Asserts [`check`], and that the range is as long as the matrix.
fn check_matrix(range: &Range<usize>, len: usize, rows: usize, cols: usize, dtype: DType) {
    check(range, len);
    assert_eq!(range.len(), rows * cols * dtype.size(), "bytes of a {rows}x{cols} matrix of {dtype}");
}

impl<'a> BytesView<'a> {
    /// Returns the number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Returns whether there is none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns bytes `range`.
    ///
    /// # Panics
    /// If the range is not inside, or does not begin at a multiple of [`ALIGNMENT`].
    #[must_use]
    pub fn range(self, range: Range<usize>) -> Self {
        check(&range, self.len);
        Self { pointer: self.pointer.wrapping_add(range.start), len: range.len(), ..self }
    }

    /// Returns the address of the first byte in the device's memory.
    pub(crate) fn address(self) -> u64 {
        self.pointer.addr() as u64
    }

    /// Returns a slice, on the CPU.
    pub fn as_slice(self) -> &'a [u8] {
        // SAFETY: the view borrows that many bytes for 'a; every pattern of bits is a byte.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    /// Views bytes `range` as a `rows × cols` matrix.
    ///
    /// # Panics
    /// As [`Self::range`], and if the range is not as long as the matrix.
    pub fn as_tensor(self, range: Range<usize>, rows: usize, cols: usize, dtype: DType) -> View<'a> {
        check_matrix(&range, self.len, rows, cols, dtype);
        // SAFETY: the range is inside the borrow of 'a, aligned and as long as the matrix; every
        // bit pattern is a number.
        unsafe { View::from_pointer(self.pointer.wrapping_add(range.start), rows, cols, dtype) }
    }
}

impl<'a> BytesMut<'a> {
    /// Borrows host memory for CPU kernels. It may be unaligned and cannot be read as a matrix.
    pub(crate) fn from_host(bytes: &'a mut [u8]) -> Self {
        Self { pointer: bytes.as_mut_ptr(), len: bytes.len(), lifetime: PhantomData }
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a shared view.
    pub fn view(&self) -> BytesView<'_> {
        BytesView { pointer: self.pointer, len: self.len, lifetime: PhantomData }
    }

    /// Borrows the view for a shorter time, so that it can be passed on and used again.
    pub fn reborrow(&mut self) -> BytesMut<'_> {
        BytesMut { lifetime: PhantomData, ..*self }
    }

    /// Returns bytes `range`.
    ///
    /// # Panics
    /// If the range is not inside, or does not begin at a multiple of [`ALIGNMENT`].
    #[must_use]
    pub fn range(self, range: Range<usize>) -> Self {
        check(&range, self.len);
        Self { pointer: self.pointer.wrapping_add(range.start), len: range.len(), ..self }
    }

    /// Returns a slice, on the CPU.
    pub fn into_slice(self) -> &'a mut [u8] {
        // SAFETY: the view borrows that many bytes exclusively for 'a; every pattern of bits is a
        // byte.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }

    /// Views bytes `range` as a `rows × cols` matrix.
    ///
    /// # Panics
    /// As [`Self::range`], and if the range is not as long as the matrix.
    pub fn into_tensor(self, range: Range<usize>, rows: usize, cols: usize, dtype: DType) -> ViewMut<'a> {
        check_matrix(&range, self.len, rows, cols, dtype);
        // SAFETY: as in `BytesView::as_tensor`, of what is borrowed exclusively.
        unsafe { ViewMut::from_pointer(self.pointer.wrapping_add(range.start), rows, cols, dtype) }
    }
}
