//! Sums without an order: gradients as 64-bit fixed-point numbers.
//!
//! A term is rounded towards zero to a multiple of 2⁻⁴⁸ and added as an integer. Integer addition is associative, so a sum
//! has the same bits whoever added which terms in which order, on one rank or on many. Every f32 of at least 2⁻²⁴ (6e-8) is
//! such a multiple as it stands; of smaller ones the bits below 2⁻⁴⁸ (3.6e-15) are lost, once for each term.
//!
//! A sum lies in ±2¹⁵. Terms are held to what cannot leave that range whatever their signs: see [`limit`].

use crate::memory::tensor::{Tensor, View, ViewMut};
use crate::{DType, Device, Kind, Result};

/// Bits behind the point.
pub const FRACTION_BITS: u32 = 48;

/// The largest magnitude that each of `num_terms` terms may have.
pub fn limit(num_terms: usize) -> f32 {
    let whole = (1u64 << (63 - FRACTION_BITS)) as f32;
    // Half of the range stays free: dividing may have rounded up.
    0.5 * whole / num_terms.max(1) as f32
}

/// A row of sums in device memory.
pub struct ExactSum {
    /// Each sum is two f32 wide: `[1, 2·len]`.
    words: Tensor,
}

/// A borrowed range of sums.
#[derive(Clone, Copy)]
pub struct ExactView<'a> {
    words: View<'a>,
}

impl ExactSum {
    /// Memory for `len` sums of unspecified value.
    ///
    /// # Errors
    /// If the arena is exhausted.
    pub fn new(device: &Device, kind: Kind, len: usize) -> Result<Self> {
        Ok(Self { words: device.alloc(kind, 1, 2 * len, DType::F32)? })
    }

    /// Number of sums.
    pub fn len(&self) -> usize {
        self.words.cols() / 2
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.words.cols() == 0
    }

    /// Whether this lies on a device that computes nothing.
    pub fn is_meta(&self) -> bool {
        self.words.is_meta()
    }

    /// All of them.
    pub fn view(&self) -> ExactView<'_> {
        ExactView { words: self.words.view() }
    }

    /// As integers, on the CPU.
    pub fn as_slice(&self) -> &[i64] {
        self.view().as_slice()
    }

    /// As integers to be written, on the CPU.
    pub fn as_mut_slice(&mut self) -> &mut [i64] {
        let len = self.len();
        let words: ViewMut<'_> = self.words.view_mut();
        // SAFETY: the exclusively borrowed tensor holds 2·len f32, which is len i64; tensors begin at multiples of 64
        // bytes, and every pattern of bits is an i64.
        unsafe { std::slice::from_raw_parts_mut(words.pointer_of::<f32>().cast(), len) }
    }
}

impl<'a> ExactView<'a> {
    /// Number of sums.
    pub fn len(&self) -> usize {
        self.words.cols() / 2
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.words.cols() == 0
    }

    /// Sums `range`.
    #[must_use]
    pub fn range(self, range: std::ops::Range<usize>) -> Self {
        Self { words: self.words.col_range(2 * range.start..2 * range.end) }
    }

    /// The first sum's address, in the memory of its device.
    pub(crate) fn address(self) -> u64 {
        self.words.address()
    }

    /// As integers, on the CPU.
    pub fn as_slice(self) -> &'a [i64] {
        // SAFETY: the view borrows 2·len f32, which is len i64. Ranges begin at even words of a tensor that begins at a
        // multiple of 64 bytes; every pattern of bits is an i64.
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
