//! Quantised matrices of checkpoints, of bitsandbytes and in FP8: repacked into a [`Format`], or read as
//! f32.

use super::pack::length;
use crate::device::launch;
use crate::memory::bytes::BytesMut;
use crate::numerics::e4m3;
use crate::numerics::format::{NF4_BLOCK, NF4_BLOCKS};
use crate::{DType, Device, Format, KernelError, OpCost, Result, cpu, cuda};

/// A 4-bit matrix: `W.weight` beside `W.weight.absmax`, `W.weight.nested_absmax` and so on.
#[derive(Clone, Copy, Debug)]
pub struct StoredNf4<'a> {
    /// Two weights per byte, the first in the high half.
    pub weight: &'a [u8],
    /// One byte per scale of a block of weights.
    pub absmax: &'a [u8],
    /// Values of the weights' codes.
    pub quant_map: &'a [f32],
    /// One factor per 256 scales.
    pub nested_absmax: &'a [f32],
    /// Values of the scales' bytes.
    pub nested_quant_map: &'a [f32],
    /// Mean of the scales.
    pub nested_offset: f32,
    /// Weights per scale.
    pub blocksize: usize,
    /// Scales per factor.
    pub nested_blocksize: usize,
}

/// An 8-bit matrix: `W.weight` and `W.SCB`.
#[derive(Clone, Copy, Debug)]
pub struct StoredInt8<'a> {
    /// One code per weight, the bits of an i8.
    pub weight: &'a [u8],
    /// Largest magnitude of each row.
    pub scb: &'a [f32],
}

/// An FP8 matrix with scales: a weight is its code's number times the scale of its block.
#[derive(Clone, Copy, Debug)]
pub struct StoredFp8<'a> {
    /// One code in [`e4m3`] per weight.
    pub weight: &'a [u8],
    /// One scale per block, row by row.
    pub scales: &'a [f32],
    /// Rows and columns of a block; the last ones may be partly used.
    pub block: [usize; 2],
}

/// Tolerance between two maps; bitsandbytes treats such maps as equal.
const SAME: f32 = 1e-6;

impl StoredNf4<'_> {
    /// Checks the lengths against a `rows × cols` matrix, and the block sizes and maps against nf4.
    pub fn check(&self, rows: usize, cols: usize) -> Result<(), String> {
        for (name, found, expected) in [
            ("blocksize", self.blocksize, NF4_BLOCK),
            ("nested_blocksize", self.nested_blocksize, NF4_BLOCKS),
        ] {
            if found != expected {
                return Err(format!(
                    "{name} is {found}; only {expected} can be read: quantise the weights again"
                ));
            }
        }
        let num_blocks = (rows * cols).div_ceil(NF4_BLOCK);
        count("weight", self.weight.len(), (rows * cols).div_ceil(2), rows, cols)?;
        count("absmax", self.absmax.len(), num_blocks, rows, cols)?;
        count("nested_absmax", self.nested_absmax.len(), num_blocks.div_ceil(NF4_BLOCKS), rows, cols)?;
        known("quant_map", self.quant_map, &cpu::NF4_NUMBERS)?;
        known("nested_quant_map", self.nested_quant_map, &*cpu::NESTED_TABLE)
    }

    /// Reads weights from index `first` on, row by row, with the bits of an f32
    /// [`unpack`](super::unpack).
    ///
    /// # Panics
    /// If there are not so many.
    pub fn read(&self, first: usize, values: &mut [f32]) {
        let (mut at, mut rest) = (first, values);
        while !rest.is_empty() {
            let block = at / NF4_BLOCK;
            let (values, after) = rest.split_at_mut(((block + 1) * NF4_BLOCK - at).min(rest.len()));
            let number = cpu::NESTED_TABLE[usize::from(self.absmax[block])];
            let scale = number * self.nested_absmax[block / NF4_BLOCKS] + self.nested_offset;
            let products = cpu::NF4_NUMBERS.map(|number| number * scale);
            for (place, value) in (at..).zip(values.iter_mut()) {
                let pair = self.weight[place / 2];
                let code = if place % 2 == 0 { pair >> 4 } else { pair & 15 };
                *value = products[usize::from(code)];
            }
            at += values.len();
            rest = after;
        }
    }
}

impl StoredInt8<'_> {
    /// Checks the lengths against a `rows × cols` matrix.
    pub fn check(&self, rows: usize, cols: usize) -> Result<(), String> {
        count("weight", self.weight.len(), rows * cols, rows, cols)?;
        count("SCB", self.scb.len(), rows, rows, cols)
    }

    /// Reads weights as [`StoredNf4::read`].
    ///
    /// # Panics
    /// If there are not so many.
    pub fn read(&self, first: usize, values: &mut [f32]) {
        let cols = self.weight.len() / self.scb.len();
        let (mut at, mut rest) = (first, values);
        while !rest.is_empty() {
            let row = at / cols;
            let (values, after) = rest.split_at_mut(((row + 1) * cols - at).min(rest.len()));
            for (value, code) in values.iter_mut().zip(&self.weight[at..]) {
                *value = f32::from(code.cast_signed()) * self.scb[row] * (1.0 / cpu::INT8_LARGEST);
            }
            at += values.len();
            rest = after;
        }
    }
}

impl StoredFp8<'_> {
    /// Checks the lengths against a `rows × cols` matrix.
    pub fn check(&self, rows: usize, cols: usize) -> Result<(), String> {
        let [height, width] = self.block;
        count("weight", self.weight.len(), rows * cols, rows, cols)?;
        count("scales", self.scales.len(), rows.div_ceil(height) * cols.div_ceil(width), rows, cols)
    }

    /// Returns whether a code is NaN.
    pub fn has_nan(&self) -> bool {
        // Without a branch in the loop it is as fast as memory.
        self.weight
            .chunks(1 << 16)
            .any(|codes| codes.iter().fold(false, |found, code| found | (code & 0x7f == 0x7f)))
    }

    /// Reads weights of a matrix of `cols` columns, as [`StoredNf4::read`].
    ///
    /// # Panics
    /// If there are not so many.
    pub fn read(&self, cols: usize, first: usize, values: &mut [f32]) {
        let [height, width] = self.block;
        let (mut at, mut rest) = (first, values);
        while !rest.is_empty() {
            let (row, col) = (at / cols, at % cols);
            let end = ((col / width + 1) * width).min(cols);
            let (values, after) = rest.split_at_mut((end - col).min(rest.len()));
            let scale = self.scales[row / height * cols.div_ceil(width) + col / width];
            for (value, code) in values.iter_mut().zip(&self.weight[at..]) {
                *value = e4m3::to_f32(*code) * scale;
            }
            at += values.len();
            rest = after;
        }
    }
}

/// Repacks a `rows × cols` nf4 matrix; codes and scales stay as stored.
pub fn pack_stored_nf4(
    device: &Device,
    stored: &StoredNf4,
    rows: usize,
    cols: usize,
    packed: BytesMut,
) -> Result<()> {
    const OP: &str = "pack_stored_nf4";
    length(OP, packed.len(), Format::Nf4, rows, cols)?;
    stored.check(rows, cols).map_err(|reason| KernelError::invalid(OP, reason))?;
    let StoredNf4 { weight, absmax, nested_absmax, nested_offset: mean, .. } = *stored;
    let bytes = weight.len() + absmax.len() + packed.len();
    let work = OpCost::new(OP, (rows, cols, DType::F32), 0.0, bytes as f64);
    launch!(device, work, {
        cpu => cpu.pack_stored_nf4(weight, absmax, nested_absmax, mean, packed),
        cuda => cuda::stored::pack_stored_nf4(cuda, weight, absmax, nested_absmax, mean, packed)
    })
}

/// Repacks a `rows × cols` int8 matrix, as [`pack_stored_nf4`].
pub fn pack_stored_int8(
    device: &Device,
    stored: &StoredInt8,
    rows: usize,
    cols: usize,
    packed: BytesMut,
) -> Result<()> {
    const OP: &str = "pack_stored_int8";
    length(OP, packed.len(), Format::Int8, rows, cols)?;
    stored.check(rows, cols).map_err(|reason| KernelError::invalid(OP, reason))?;
    let StoredInt8 { weight, scb } = *stored;
    if weight.is_empty() {
        return Ok(());
    }
    let bytes = weight.len() + packed.len();
    let work = OpCost::new(OP, (rows, cols, DType::F32), 0.0, bytes as f64);
    launch!(device, work, {
        cpu => cpu.pack_stored_rows(weight, scb, Format::Int8, packed),
        cuda => cuda::stored::pack_stored_rows(cuda, weight, scb, Format::Int8, packed)
    })
}

/// Repacks a `rows × cols` FP8 matrix whose rows each have one scale, as [`pack_stored_nf4`].
pub fn pack_stored_fp8(
    device: &Device,
    stored: &StoredFp8,
    rows: usize,
    cols: usize,
    packed: BytesMut,
) -> Result<()> {
    const OP: &str = "pack_stored_fp8";
    length(OP, packed.len(), Format::Fp8, rows, cols)?;
    stored.check(rows, cols).map_err(|reason| KernelError::invalid(OP, reason))?;
    let StoredFp8 { weight, scales, block: [height, width] } = *stored;
    if weight.is_empty() {
        return Ok(());
    }
    if width < cols {
        let reason = format!("a scale per {width} columns, but a row of {cols} can have one scale alone");
        return Err(KernelError::invalid(OP, reason));
    }
    let of_rows: Vec<f32> = (0..rows).map(|row| scales[row / height]).collect();
    let bytes = weight.len() + packed.len();
    let work = OpCost::new(OP, (rows, cols, DType::F32), 0.0, bytes as f64);
    launch!(device, work, {
        cpu => cpu.pack_stored_rows(weight, &of_rows, Format::Fp8, packed),
        cuda => cuda::stored::pack_stored_rows(cuda, weight, &of_rows, Format::Fp8, packed)
    })
}

fn count(name: &str, found: usize, expected: usize, rows: usize, cols: usize) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{name} has {found} elements, expected {expected} for a {rows}x{cols} matrix"))
}

fn known(name: &str, found: &[f32], expected: &[f32]) -> Result<(), String> {
    if found.len() != expected.len() {
        return Err(format!("{name} has {} numbers, expected {}", found.len(), expected.len()));
    }
    match found.iter().zip(expected).position(|(f, e)| f.is_nan() || (f - e).abs() > SAME) {
        None => Ok(()),
        Some(i) => {
            let (f, e) = (found[i], expected[i]);
            Err(format!("{name}[{i}] is {f}, expected {e}: another quantisation than nf4's"))
        }
    }
}
