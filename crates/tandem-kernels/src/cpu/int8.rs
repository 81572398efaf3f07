//! int8 weights with a scale per row (see [`format`](crate::numerics::format)), in the arithmetic
//! order of bitsandbytes.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::rows::RowsMut;
use super::vector::{for_lanes, vector_kernel};
use super::{Cpu, block_rows};
use crate::memory::bytes::{BytesMut, BytesView};
use crate::{Element, Format, View, ViewMut, with_element};

/// The largest code.
pub(crate) const LARGEST: f32 = 127.0;

impl Cpu {
    /// Packs a contiguous matrix. The error is the first row with a weight that is not finite.
    pub(crate) fn pack_int8(&self, values: View, packed: BytesMut) -> Result<(), usize> {
        let (rows, cols) = values.shape();
        let unit_len = Format::Int8.unit_len(cols);
        let packed = RowsMut::from_slice(packed.into_slice());
        let bad_row = AtomicUsize::new(usize::MAX);
        with_element!(values.dtype(), E => self.parallel_ranges(rows, block_rows(cols), |_, range| {
            for row in range {
                // SAFETY: rows are disjoint.
                let unit = unsafe { packed.part(0, row * unit_len, unit_len) };
                let (codes, rest) = unit.split_at_mut(cols);
                rest.fill(0);
                // SAFETY: a code for each weight.
                let scale = unsafe { encode(self.isa(), values.row::<E>(row), codes) };
                rest[..4].copy_from_slice(&scale.to_le_bytes());
                if !scale.is_finite() {
                    bad_row.fetch_min(row, Ordering::Relaxed);
                }
            }
        }));
        match bad_row.into_inner() {
            usize::MAX => Ok(()),
            row => Err(row),
        }
    }

    /// Packs existing codes and scales.
    pub(crate) fn pack_stored_int8(&self, codes: &[u8], scales: &[f32], packed: BytesMut) {
        let cols = codes.len() / scales.len();
        let unit_len = Format::Int8.unit_len(cols);
        let packed = RowsMut::from_slice(packed.into_slice());
        self.parallel_ranges(scales.len(), block_rows(cols), |_, range| {
            for row in range {
                // SAFETY: rows are disjoint.
                let unit = unsafe { packed.part(0, row * unit_len, unit_len) };
                let (to, rest) = unit.split_at_mut(cols);
                to.copy_from_slice(&codes[row * cols..(row + 1) * cols]);
                rest.fill(0);
                rest[..4].copy_from_slice(&scales[row].to_le_bytes());
            }
        });
    }

    pub(crate) fn unpack_int8(&self, packed: BytesView, values: ViewMut) {
        let ((rows, cols), packed) = (values.shape(), packed.as_slice());
        with_element!(values.dtype(), E => {
            let values = RowsMut::<E>::new(values);
            self.parallel_ranges(rows, block_rows(cols), |_, range| {
                for row in range {
                    let (codes, scale) = row_of(packed, cols, row);
                    // SAFETY: rows are disjoint; a code for each weight.
                    unsafe { decode(self.isa(), codes, scale, values.row(row)) };
                }
            });
        });
    }
}

/// Returns the codes of a row, and its scale.
#[inline(always)]
pub(super) fn row_of(packed: &[u8], cols: usize, row: usize) -> (&[u8], f32) {
    let unit_len = Format::Int8.unit_len(cols);
    let (codes, rest) = packed[row * unit_len..][..unit_len].split_at(cols);
    (codes, f32::from_le_bytes(rest[..4].try_into().expect("four bytes")))
}

vector_kernel! {
    /// Encodes a row and returns its scale, infinite or NaN if a weight is. The slices have one
    /// length.
    unsafe fn encode<V: Vector, E: Element>(values: &[E], codes: &mut [u8]) -> f32 {
        // Magnitudes order as their bits do; infinity and NaN have the largest bits.
        let largest = values.iter().fold(0, |m, x| (x.to_f32().to_bits() & 0x7fff_ffff).max(m));
        let scale = f32::from_bits(largest);
        // torch's result for `127 / scale`.
        let factor = 1.0 / scale * LARGEST;
        if !factor.is_finite() {
            // The largest weight is too small to divide by: all weights are zeros.
            codes.fill(0);
            return if scale.is_finite() { 0.0 } else { scale };
        }
        // Adding 1.5·2^23 rounds to nearest, ties to even, and leaves the integer in the low bits.
        const SHIFT: f32 = 12_582_912.0;
        for (code, value) in codes.iter_mut().zip(values) {
            *code = (value.to_f32() * factor + SHIFT).to_bits() as u8;
        }
        scale
    }
}

vector_kernel! {
    /// Decodes neighbours in a row. The slices have one length.
    pub(super) unsafe fn decode<V: Vector, E: Element>(codes: &[u8], scale: f32, values: &mut [E]) {
        // SAFETY: the lanes lie inside both.
        unsafe {
            let (scale, inverse) = (V::splat(scale), V::splat(1.0 / LARGEST));
            let (from, to) = (codes.as_ptr(), values.as_mut_ptr());
            for_lanes!(V, values.len(), |start, count| {
                let x = V::load_i8(from.add(start), count).mul(scale).mul(inverse);
                x.put(to.add(start), count);
            });
        }
    }
}
