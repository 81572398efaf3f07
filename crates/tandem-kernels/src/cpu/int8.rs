//! int8 codes of a row, in the arithmetic order of bitsandbytes.

use super::coded_rows::largest_magnitude;
use super::vector::{for_lanes, vector_kernel};
use crate::Element;

/// The largest code.
pub(crate) const LARGEST: f32 = 127.0;

vector_kernel! {
    /// Encodes a row and returns its scale, infinite or NaN if a weight is. The slices have one
    /// length.
    pub(super) unsafe fn encode<V: Vector, E: Element>(values: &[E], codes: &mut [u8]) -> f32 {
        let scale = largest_magnitude(values);
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
