//! fp8 codes of a row: numbers of [`e4m3`](crate::numerics::e4m3) under one scale.

use super::coded_rows::largest_magnitude;
use super::vector::{for_lanes, vector_kernel};
use crate::Element;
use crate::numerics::e4m3;

vector_kernel! {
    /// Encodes a row and returns its scale, infinite or NaN if a weight is. The slices have one
    /// length.
    pub(super) unsafe fn encode<V: Vector, E: Element>(values: &[E], codes: &mut [u8]) -> f32 {
        let scale = largest_magnitude(values) / e4m3::MAX;
        if !scale.is_normal() {
            // The largest weight is too small to scale by: all weights are zeros.
            codes.fill(0);
            return if scale.is_finite() { 0.0 } else { scale };
        }
        for (code, value) in codes.iter_mut().zip(values) {
            *code = e4m3::from_f32(value.to_f32() / scale);
        }
        scale
    }
}

vector_kernel! {
    /// Decodes a row. The slices have one length.
    pub(super) unsafe fn decode<V: Vector, E: Element>(codes: &[u8], scale: f32, values: &mut [E]) {
        const CHUNK: usize = 64;
        for (values, codes) in values.chunks_mut(CHUNK).zip(codes.chunks(CHUNK)) {
            let mut x = [0.0f32; CHUNK];
            for (x, code) in x.iter_mut().zip(codes) {
                *x = e4m3::to_f32(*code);
            }
            let (from, to) = (x.as_ptr(), values.as_mut_ptr());
            for_lanes!(V, values.len(), |start, count| {
                // SAFETY: the lanes lie inside both.
                unsafe { V::load(from.add(start), count).mul(V::splat(scale)).put(to.add(start), count) };
            });
        }
    }
}
