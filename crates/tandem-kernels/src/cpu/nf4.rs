//! nf4 weights (see [`format`](crate::numerics::format)), in the arithmetic order of bitsandbytes.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::Cpu;
use super::coded_rows::largest_magnitude;
use super::double_quant::{self, TABLE};
use super::rows::RowsMut;
use super::vector::{for_lanes, vector_kernel};
use crate::memory::bytes::{BytesMut, BytesView};
use crate::numerics::format::{NF4_BLOCK, NF4_BLOCKS, NF4_UNIT, NF4_UNIT_LEN};
use crate::{Element, View, ViewMut, with_element};

/// Values of the codes: quantiles of the normal distribution, and zero (arXiv 2305.14314, appendix
/// E).
pub(crate) const NUMBERS: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Midpoints of the values: the code of a weight is the count of midpoints below it.
const BOUNDS: [f32; 15] = {
    let mut bounds = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        bounds[i] = (NUMBERS[i] + NUMBERS[i + 1]) / 2.0;
        i += 1;
    }
    bounds
};

/// Blocks without a weight of this magnitude become zeros.
const SMALLEST: f32 = 1e-38;

/// Offset of a unit's scales, their factor and their mean.
const SCALES: usize = NF4_UNIT / 2;
const LARGEST: usize = SCALES + NF4_BLOCKS;
const MEAN: usize = LARGEST + size_of::<f32>();

impl Cpu {
    /// Packs a contiguous matrix; `scales` has room for one scale per block. The error is the start
    /// of the first block with a weight that is not finite.
    pub(crate) fn pack_nf4(
        &self,
        values: View,
        scales: &mut [f32],
        mut packed: BytesMut,
    ) -> Result<(), usize> {
        self.pack_nf4_codes(values, scales, packed.reborrow())?;
        self.pack_nf4_scales(scales, packed);
        Ok(())
    }

    /// Packs the codes of weights, or of whole units of them, and computes the scales of their
    /// blocks.
    pub(crate) fn pack_nf4_codes(
        &self,
        values: View,
        scales: &mut [f32],
        packed: BytesMut,
    ) -> Result<(), usize> {
        let packed = RowsMut::from_slice(packed.into_slice());
        let bad_block = AtomicUsize::new(usize::MAX);
        let all_scales = RowsMut::from_slice(scales);
        with_element!(values.dtype(), E => {
            let values = values.as_slice::<E>();
            self.parallel_ranges(values.len(), NF4_UNIT, |unit, range| {
                let (first, count) = (unit * NF4_BLOCKS, range.len().div_ceil(NF4_BLOCK));
                // SAFETY: units and their blocks are disjoint.
                let (codes, scales) = unsafe {
                    (packed.part(0, unit * NF4_UNIT_LEN, SCALES), all_scales.part(0, first, count))
                };
                codes[range.len().div_ceil(2)..].fill(0);
                // SAFETY: a scale for each block, and half as many bytes as weights.
                let bad = unsafe { encode(self.isa(), &values[range], codes, scales) };
                if bad < count {
                    bad_block.fetch_min(first + bad, Ordering::Relaxed);
                }
            });
        });
        match bad_block.into_inner() {
            usize::MAX => Ok(()),
            block => Err(block * NF4_BLOCK),
        }
    }

    /// Packs the scales of all blocks, which follow the codes of each unit.
    pub(crate) fn pack_nf4_scales(&self, scales: &[f32], packed: BytesMut) {
        let packed = RowsMut::from_slice(packed.into_slice());
        let mean = double_quant::mean(scales);
        self.parallel_ranges(scales.len(), NF4_BLOCKS, |unit, range| {
            // SAFETY: units are disjoint.
            let rest = unsafe { packed.part(0, unit * NF4_UNIT_LEN + SCALES, NF4_UNIT_LEN - SCALES) };
            rest.fill(0);
            let largest = double_quant::quantise(&scales[range.clone()], mean, &mut rest[..range.len()]);
            write_scales(rest, largest, mean);
        });
    }

    /// Packs the stored codes and scales of a bitsandbytes matrix of `len` weights.
    pub(crate) fn pack_stored_nf4(
        &self,
        codes: &[u8],
        scales: &[u8],
        largest: &[f32],
        mean: f32,
        packed: BytesMut,
    ) {
        let packed = RowsMut::from_slice(packed.into_slice());
        self.parallel_for(largest.len(), |unit| {
            // SAFETY: units are disjoint.
            let to = unsafe { packed.part(0, unit * NF4_UNIT_LEN, NF4_UNIT_LEN) };
            to.fill(0);
            let codes = &codes[unit * SCALES..codes.len().min((unit + 1) * SCALES)];
            to[..codes.len()].copy_from_slice(codes);
            let scales = &scales[unit * NF4_BLOCKS..scales.len().min((unit + 1) * NF4_BLOCKS)];
            to[SCALES..][..scales.len()].copy_from_slice(scales);
            write_scales(&mut to[SCALES..], largest[unit], mean);
        });
    }

    pub(crate) fn unpack_nf4(&self, packed: BytesView, values: ViewMut) {
        let (len, packed) = (values.len(), packed.as_slice());
        let table = &*TABLE;
        with_element!(values.dtype(), E => {
            let values = RowsMut::from_slice(values.into_slice::<E>());
            self.parallel_ranges(len, NF4_UNIT, |_, range| {
                // SAFETY: units are disjoint.
                let values = unsafe { values.part(0, range.start, range.len()) };
                // SAFETY: the weights lie in the matrix.
                unsafe { decode(self.isa(), packed, table, range.start, values) };
            });
        });
    }
}

/// Writes the scales' factor and mean behind a unit's codes.
fn write_scales(rest: &mut [u8], largest: f32, mean: f32) {
    rest[LARGEST - SCALES..][..4].copy_from_slice(&largest.to_le_bytes());
    rest[MEAN - SCALES..][..4].copy_from_slice(&mean.to_le_bytes());
}

#[inline(always)]
fn read_f32(unit: &[u8], at: usize) -> f32 {
    f32::from_le_bytes(unit[at..at + 4].try_into().expect("four bytes"))
}

/// Blocks of a packed matrix, one after another.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    /// The unit, and those after it in the matrix.
    unit: *const u8,
    /// Block in the unit.
    block: usize,
    largest: f32,
    mean: f32,
    end: *const u8,
}

impl Blocks {
    pub(super) const NONE: Self =
        Self { unit: std::ptr::null(), block: 0, largest: 0.0, mean: 0.0, end: std::ptr::null() };

    /// Begins at a block.
    ///
    /// # Panics
    /// If there is none.
    #[inline(always)]
    pub(super) fn from(packed: &[u8], block: usize) -> Self {
        let unit = &packed[block / NF4_BLOCKS * NF4_UNIT_LEN..][..NF4_UNIT_LEN];
        let (largest, mean) = (read_f32(unit, LARGEST), read_f32(unit, MEAN));
        Self { unit: unit.as_ptr(), block: block % NF4_BLOCKS, largest, mean, end: packed.as_ptr_range().end }
    }

    /// Returns the address of the next block's codes, and its scale.
    ///
    /// # Safety
    /// The matrix is still borrowed.
    #[inline(always)]
    pub(super) unsafe fn next(&mut self, table: &[f32; 256]) -> (*const u8, f32) {
        // SAFETY: the unit is whole, and lies in the matrix.
        unsafe {
            if self.block == NF4_BLOCKS {
                let unit = self.unit.wrapping_add(NF4_UNIT_LEN);
                assert!(unit < self.end, "a block beyond the last");
                *self = Self::from(std::slice::from_raw_parts(unit, self.end.addr() - unit.addr()), 0);
            }
            let scale =
                double_quant::dequantise(*self.unit.add(SCALES + self.block), self.largest, self.mean, table);
            let codes = self.unit.add(self.block * NF4_BLOCK / 2);
            self.block += 1;
            (codes, scale)
        }
    }
}

vector_kernel! {
    /// Encodes weights, with a scale per block. Returns the first block with a weight that is not
    /// finite. `codes` has `⌈N / 2⌉` bytes.
    unsafe fn encode<V: Vector, E: Element>(values: &[E], codes: &mut [u8], scales: &mut [f32]) -> usize {
        let mut bad = usize::MAX;
        for (block, values) in values.chunks(NF4_BLOCK).enumerate() {
            let mut x = [0.0f32; NF4_BLOCK];
            for (x, value) in x.iter_mut().zip(values) {
                *x = value.to_f32();
            }
            let scale = largest_magnitude(&x);
            if !scale.is_finite() {
                bad = bad.min(block);
            }
            if values.len() == NF4_BLOCK {
                let factor = 1.0 / scale.max(SMALLEST);
                for x in &mut x {
                    *x *= factor;
                }
                scales[block] = scale;
            } else {
                // bitsandbytes divides in a partial block.
                scales[block] = scale.max(SMALLEST);
                for x in &mut x {
                    *x /= scales[block];
                }
            }
            let mut code = [0u32; NF4_BLOCK];
            for bound in BOUNDS {
                for (code, x) in code.iter_mut().zip(&x) {
                    *code += u32::from(*x > bound);
                }
            }
            let pairs = code.as_chunks::<2>().0;
            let start = block * NF4_BLOCK / 2;
            for (byte, [first, second]) in codes[start..][..values.len().div_ceil(2)].iter_mut().zip(pairs) {
                *byte = (first << 4 | second) as u8;
            }
        }
        bad
    }
}

vector_kernel! {
    /// Decodes neighbours in a packed matrix, from weight `first` on. They lie in `packed`.
    pub(super) unsafe fn decode<V: Vector, E: Element>(
        packed: &[u8],
        table: &[f32; 256],
        first: usize,
        values: &mut [E],
    ) {
        let (mut at, end) = (first, first + values.len());
        if at == end {
            return;
        }
        let mut blocks = Blocks::from(packed, first / NF4_BLOCK);
        while at < end {
            // SAFETY: `packed` is borrowed.
            let (places, scale) = unsafe { blocks.next(table) };
            // A weight is one of sixteen products, rounded once for the block.
            let mut products = [E::from_f32(0.0); 16];
            let (from, to) = (NUMBERS.as_ptr(), products.as_mut_ptr());
            let skipped = at % NF4_BLOCK;
            let values = &mut values[at - first..end.min(at - skipped + NF4_BLOCK) - first];
            at += values.len();
            // SAFETY: sixteen numbers; 32 bytes are 64 places, and the weights, or else `whole`,
            // have room for them.
            unsafe {
                for_lanes!(V, 16, |start, lanes| {
                    V::load(from.add(start), lanes).mul(V::splat(scale)).put(to.add(start), lanes);
                });
                if values.len() == NF4_BLOCK {
                    V::look_up(products.as_ptr(), places, values.as_mut_ptr());
                } else {
                    let mut whole = [E::from_f32(0.0); NF4_BLOCK];
                    V::look_up(products.as_ptr(), places, whole.as_mut_ptr());
                    values.copy_from_slice(&whole[skipped..][..values.len()]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_lie_between_numbers() {
        for (i, bound) in BOUNDS.into_iter().enumerate() {
            assert!(NUMBERS[i] < bound && bound < NUMBERS[i + 1]);
        }
    }
}
