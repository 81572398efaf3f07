//! Order-independent sums: gradients as 64-bit fixed-point numbers.

use std::ops::Range;

use crate::memory::tensor::{Tensor, View, ViewMut};
use crate::{DType, Device, MemoryKind, Result};

/// Fraction bits.
pub const FRACTION_BITS: u32 = 48;

/// Returns the largest magnitude allowed for each of `num_terms` terms.
pub fn limit(num_terms: usize) -> f32 {
    let whole = (1u64 << (63 - FRACTION_BITS)) as f32;
    // Half of the range stays free: the division may have rounded up.
    0.5 * whole / num_terms.max(1) as f32
}

/// A row of sums in device memory.
pub struct FixedPointSum {
    /// `[1, 2·len]`: two f32 words per sum.
    words: Tensor,
}

/// A borrowed range of sums.
#[derive(Clone, Copy)]
pub struct ExactView<'a> {
    words: View<'a>,
}

/// A mutably borrowed range of sums.
pub struct ExactViewMut<'a> {
    words: ViewMut<'a>,
}

impl FixedPointSum {
    /// Allocates `len` sums of unspecified value.
    pub fn new(device: &Device, kind: MemoryKind, len: usize) -> Result<Self> {
        Ok(Self { words: device.alloc(kind, 1, 2 * len, DType::F32)? })
    }

    /// Returns the number of sums.
    pub fn len(&self) -> usize {
        self.words.cols() / 2
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.words.cols() == 0
    }

    /// Returns whether the sums belong to a dry run.
    pub fn is_meta(&self) -> bool {
        self.words.is_meta()
    }

    /// Returns a view of all elements.
    pub fn view(&self) -> ExactView<'_> {
        ExactView { words: self.words.view() }
    }

    /// Returns the integers, on the CPU.
    pub fn as_slice(&self) -> &[i64] {
        self.view().as_slice()
    }

    /// Returns a mutable view of all elements.
    pub fn view_mut(&mut self) -> ExactViewMut<'_> {
        ExactViewMut { words: self.words.view_mut() }
    }

    /// Returns the integers mutably, on the CPU.
    pub fn as_mut_slice(&mut self) -> &mut [i64] {
        self.view_mut().into_slice()
    }
}

impl<'a> ExactViewMut<'a> {
    /// Returns the number of sums.
    pub fn len(&self) -> usize {
        self.words.cols() / 2
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.words.cols() == 0
    }

    /// Returns sums `range`.
    #[must_use]
    pub fn range(self, range: Range<usize>) -> Self {
        Self { words: self.words.col_range(2 * range.start..2 * range.end) }
    }

    /// Returns room for one f32 term per sum, in the front half of the memory.
    #[must_use]
    pub fn into_terms(self) -> ViewMut<'a> {
        let len = self.len();
        self.words.col_range(0..len)
    }

    /// Returns a shared view of the same sums.
    pub fn view(&self) -> ExactView<'_> {
        ExactView { words: self.words.view() }
    }

    /// Returns the integers, on the CPU.
    pub fn into_slice(self) -> &'a mut [i64] {
        // SAFETY: the view borrows 2·len f32 exclusively, as wide as len i64. Ranges begin at even
        // words of a tensor aligned to 64 bytes; every bit pattern is an i64.
        unsafe { std::slice::from_raw_parts_mut(self.words.pointer_of::<f32>().cast(), self.len()) }
    }
}

impl<'a> ExactView<'a> {
    /// Returns the number of sums.
    pub fn len(&self) -> usize {
        self.words.cols() / 2
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.words.cols() == 0
    }

    /// Returns sums `range`.
    #[must_use]
    pub fn range(self, range: Range<usize>) -> Self {
        Self { words: self.words.col_range(2 * range.start..2 * range.end) }
    }

    /// Returns what [`ExactViewMut::into_terms`] had room for.
    #[must_use]
    pub fn terms(self) -> View<'a> {
        self.words.col_range(0..self.len())
    }

    /// Returns the first sum's address, in the memory of its device.
    pub(crate) fn address(self) -> u64 {
        self.words.address()
    }

    /// Returns the integers, on the CPU.
    pub fn as_slice(self) -> &'a [i64] {
        // SAFETY: the view borrows 2·len f32, as wide as len i64. Ranges begin at even words of a
        // tensor aligned to 64 bytes; every bit pattern is an i64.
        unsafe { std::slice::from_raw_parts(self.words.pointer_of::<f32>().cast(), self.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_within_the_limit_cannot_overflow() {
        for num_terms in [1, 2, 3, 7, 64, 1000, 12_345] {
            let term = (f64::from(limit(num_terms)) * (1u64 << FRACTION_BITS) as f64) as i64;
            assert!(term.checked_mul(num_terms as i64).is_some(), "{num_terms} terms");
        }
    }
}
