//! Device memory counted in bytes: what packed weights lie in.
//!
//! Bytes begin at a multiple of [`ALIGNMENT`], and ranges of them may be cut at its multiples only; so a matrix that
//! begins where a range does can be read in place.

use std::marker::PhantomData;
use std::ops::Range;

use crate::memory::tensor::{Tensor, View, ViewMut};
use crate::{DType, Device, Kind, Result};

/// Bytes of a cache line: ranges and what is read in place begin at multiples of it.
pub const ALIGNMENT: usize = 64;

/// A row of bytes that owns its memory and returns it to the arena on drop.
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
    /// `len` bytes of unspecified value.
    ///
    /// # Errors
    /// If the arena is exhausted.
    pub fn new(device: &Device, kind: Kind, len: usize) -> Result<Self> {
        Ok(Self { words: device.alloc(kind, 1, len.div_ceil(4), DType::F32)?, len })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this lies on a device that computes nothing.
    pub fn is_meta(&self) -> bool {
        self.words.is_meta()
    }

    /// As [`Tensor::announce`].
    pub fn announce(&self) {
        self.words.announce();
    }

    /// As [`Tensor::let_go`].
    pub fn let_go(&self) {
        self.words.let_go();
    }

    /// All of them.
    pub fn view(&self) -> BytesView<'_> {
        let pointer = self.words.view().pointer_of::<f32>().cast();
        BytesView { pointer, len: self.len, lifetime: PhantomData }
    }

    /// All of them, to be written.
    pub fn view_mut(&mut self) -> BytesMut<'_> {
        let pointer = self.words.view_mut().pointer_of::<f32>().cast();
        BytesMut { pointer, len: self.len, lifetime: PhantomData }
    }

    /// Bytes `range`.
    ///
    /// # Panics
    /// If the range is not inside, or does not begin at a multiple of [`ALIGNMENT`].
    pub fn range(&self, range: Range<usize>) -> BytesView<'_> {
        self.view().range(range)
    }

    /// Bytes `range`, to be written.
    ///
    /// # Panics
    /// As [`Self::range`].
    pub fn range_mut(&mut self, range: Range<usize>) -> BytesMut<'_> {
        self.view_mut().range(range)
    }

    /// As a slice, on the CPU.
    pub fn as_slice(&self) -> &[u8] {
        self.view().as_slice()
    }

    /// As a slice to be written, on the CPU.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.view_mut().into_slice()
    }
}

/// The range must lie inside `len` bytes and begin where a matrix may.
fn check(range: &Range<usize>, len: usize) {
    assert!(range.start <= range.end && range.end <= len, "bytes {range:?} of {len}");
    assert!(range.start.is_multiple_of(ALIGNMENT), "bytes {range:?} begin at no multiple of {ALIGNMENT}");
}

/// [`check`], and the range must be as long as the matrix.
fn check_matrix(range: &Range<usize>, len: usize, rows: usize, cols: usize, dtype: DType) {
    check(range, len);
    assert_eq!(range.len(), rows * cols * dtype.size(), "bytes of a {rows}x{cols} matrix of {dtype}");
}

impl<'a> BytesView<'a> {
    /// Number of bytes.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Bytes `range`.
    ///
    /// # Panics
    /// If the range is not inside, or does not begin at a multiple of [`ALIGNMENT`].
    #[must_use]
    pub fn range(self, range: Range<usize>) -> Self {
        check(&range, self.len);
        Self { pointer: self.pointer.wrapping_add(range.start), len: range.len(), ..self }
    }

    /// The first byte's address, in the memory of its device.
    pub(crate) fn address(self) -> u64 {
        self.pointer.addr() as u64
    }

    /// As a slice, on the CPU.
    pub fn as_slice(self) -> &'a [u8] {
        // SAFETY: the view borrows that many bytes for 'a; every pattern of bits is a byte.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    /// Bytes `range` as the `rows × cols` matrix that they are.
    ///
    /// # Panics
    /// As [`Self::range`], and if the range is not as long as the matrix.
    pub fn as_tensor(self, range: Range<usize>, rows: usize, cols: usize, dtype: DType) -> View<'a> {
        check_matrix(&range, self.len, rows, cols, dtype);
        // SAFETY: the range is inside what is borrowed for 'a, aligned and as long as the matrix; every pattern of bits
        // is a number.
        unsafe { View::from_pointer(self.pointer.wrapping_add(range.start), rows, cols, dtype) }
    }
}

impl<'a> BytesMut<'a> {
    /// Host memory, for kernels of the CPU alone: it begins anywhere, and cannot be read as a matrix.
    pub(crate) fn of_host(bytes: &'a mut [u8]) -> Self {
        Self { pointer: bytes.as_mut_ptr(), len: bytes.len(), lifetime: PhantomData }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A shared view of the same bytes.
    pub fn view(&self) -> BytesView<'_> {
        BytesView { pointer: self.pointer, len: self.len, lifetime: PhantomData }
    }

    /// The same view for a shorter time, so that it can be passed on and used again.
    pub fn reborrow(&mut self) -> BytesMut<'_> {
        BytesMut { lifetime: PhantomData, ..*self }
    }

    /// Bytes `range`.
    ///
    /// # Panics
    /// If the range is not inside, or does not begin at a multiple of [`ALIGNMENT`].
    #[must_use]
    pub fn range(self, range: Range<usize>) -> Self {
        check(&range, self.len);
        Self { pointer: self.pointer.wrapping_add(range.start), len: range.len(), ..self }
    }

    /// As a slice, on the CPU.
    pub fn into_slice(self) -> &'a mut [u8] {
        // SAFETY: the view borrows that many bytes exclusively for 'a; every pattern of bits is a byte.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }

    /// Bytes `range` as the `rows × cols` matrix that they are.
    ///
    /// # Panics
    /// As [`Self::range`], and if the range is not as long as the matrix.
    pub fn into_tensor(self, range: Range<usize>, rows: usize, cols: usize, dtype: DType) -> ViewMut<'a> {
        check_matrix(&range, self.len, rows, cols, dtype);
        // SAFETY: as in `BytesView::as_tensor`, of what is borrowed exclusively.
        unsafe { ViewMut::from_pointer(self.pointer.wrapping_add(range.start), rows, cols, dtype) }
    }
}
