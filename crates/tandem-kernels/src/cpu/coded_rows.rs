//! Weights in a byte each with a scale per row: int8 and fp8 (see
//! [`format`](crate::numerics::format)).

use std::sync::atomic::{AtomicUsize, Ordering};

use super::rows::RowsMut;
use super::{Cpu, Isa, block_rows, fp8, int8};
use crate::memory::bytes::{BytesMut, BytesView};
use crate::{Element, Format, View, ViewMut, with_element};

impl Cpu {
    /// Packs a contiguous matrix. The error is the first row with a weight that is not finite.
    pub(crate) fn pack_rows(&self, values: View, format: Format, packed: BytesMut) -> Result<(), usize> {
        let (rows, cols) = values.shape();
        let unit_len = format.unit_len(cols);
        let packed = RowsMut::from_slice(packed.into_slice());
        let bad_row = AtomicUsize::new(usize::MAX);
        with_element!(values.dtype(), E => self.parallel_ranges(rows, block_rows(cols), |_, range| {
            for row in range {
                // SAFETY: rows are disjoint.
                let unit = unsafe { packed.part(0, row * unit_len, unit_len) };
                let (codes, rest) = unit.split_at_mut(cols);
                rest.fill(0);
                let values = values.row::<E>(row);
                // SAFETY: a code for each weight.
                let scale = unsafe {
                    match format {
                        Format::Fp8 => fp8::encode(self.isa(), values, codes),
                        _ => int8::encode(self.isa(), values, codes),
                    }
                };
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
    pub(crate) fn pack_stored_rows(&self, codes: &[u8], scales: &[f32], format: Format, packed: BytesMut) {
        let cols = codes.len() / scales.len();
        let unit_len = format.unit_len(cols);
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

    pub(crate) fn unpack_rows(&self, packed: BytesView, format: Format, values: ViewMut) {
        let ((rows, cols), packed) = (values.shape(), packed.as_slice());
        with_element!(values.dtype(), E => {
            let values = RowsMut::<E>::new(values);
            self.parallel_ranges(rows, block_rows(cols), |_, range| {
                for row in range {
                    let (codes, scale) = row_of(packed, format, cols, row);
                    // SAFETY: rows are disjoint.
                    decode(self.isa(), format, codes, scale, unsafe { values.row(row) });
                }
            });
        });
    }
}

/// Returns the codes of a row, and its scale.
#[inline(always)]
pub(super) fn row_of(packed: &[u8], format: Format, cols: usize, row: usize) -> (&[u8], f32) {
    let unit_len = format.unit_len(cols);
    let (codes, rest) = packed[row * unit_len..][..unit_len].split_at(cols);
    (codes, f32::from_le_bytes(rest[..4].try_into().expect("four bytes")))
}

/// Returns the largest magnitude; infinity or NaN, if one is.
#[inline(always)]
pub(super) fn largest_magnitude<E: Element>(values: &[E]) -> f32 {
    // Magnitudes order as their bits do; infinity and NaN have the largest bits.
    f32::from_bits(values.iter().fold(0, |m, x| (x.to_f32().to_bits() & 0x7fff_ffff).max(m)))
}

/// Decodes neighbours in a row.
///
/// # Panics
/// The slices have different lengths.
pub(super) fn decode<E: Element>(isa: Isa, format: Format, codes: &[u8], scale: f32, values: &mut [E]) {
    assert_eq!(codes.len(), values.len(), "a code for each weight");
    // SAFETY: the level is this processor's, and the slices have one length.
    unsafe {
        match format {
            Format::Fp8 => fp8::decode(isa, codes, scale, values),
            _ => int8::decode(isa, codes, scale, values),
        }
    }
}
