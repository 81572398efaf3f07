//! Frozen weights: packed into a [`Format`], and unpacked into what is computed with.

use std::ops::RangeInclusive;

use super::{cast, check};
use crate::bytes::{BytesMut, BytesView};
use crate::format::{NF4_BLOCK, NF4_BLOCKS};
use crate::{DType, Device, Format, KernelError, Kind, Result, View, ViewMut};

/// Packs `values` `[rows, cols]` (f32 or bf16) as a piece of [`Format::packed_len`] bytes, what is unused of them zeros.
///
/// f32 and bf16 are converted, int8 and nf4 quantised to the bits of bitsandbytes 0.50 on the CPU. The mean of nf4's
/// scales is torch's on one thread: on several, torch's last bits depend on their number where a matrix has 2²¹ weights
/// or more. nf4 takes four bytes of scratch for each 64 weights.
///
/// # Errors
/// If shapes do not fit or `values` is not contiguous; for int8 and nf4 if a weight is not finite, and then the bytes
/// are of no use; for nf4 if the arena is exhausted.
pub fn pack(device: &Device, values: View, format: Format, packed: BytesMut) -> Result<()> {
    const OP: &str = "pack";
    let (rows, cols) = values.shape();
    check::contiguous(OP, "values", values.is_contiguous())?;
    length(OP, packed.len(), format, rows, cols)?;
    if values.is_empty() {
        return Ok(());
    }
    if let Some(dtype) = format.dtype() {
        return pack_plain(device, values, dtype, packed);
    }
    let scales = match format {
        Format::Nf4 => Some(device.alloc(Kind::Scratch, 1, values.len().div_ceil(NF4_BLOCK), DType::F32)?),
        _ => None,
    };
    match device {
        Device::Cpu(cpu) => match scales {
            Some(mut scales) => cpu.pack_nf4(values, scales.view_mut(), packed).map_err(|start| {
                not_finite(OP, format, start / cols..=(start + NF4_BLOCK - 1).min(values.len() - 1) / cols)
            }),
            None => cpu.pack_int8(values, packed).map_err(|row| not_finite(OP, format, row..=row)),
        },
        Device::Meta(ledger) => {
            ledger.record(OP, 0.0, (values.num_bytes() + packed.len()) as f64);
            Ok(())
        }
    }
}

fn pack_plain(device: &Device, values: View, dtype: DType, mut packed: BytesMut) -> Result<()> {
    let ((rows, cols), used) = (values.shape(), values.len() * dtype.size());
    if let Device::Cpu(_) = device {
        packed.reborrow().into_slice()[used..].fill(0);
    }
    cast(device, values, packed.into_tensor(0..used, rows, cols, dtype))
}

fn not_finite(op: &'static str, format: Format, rows: RangeInclusive<usize>) -> KernelError {
    KernelError::invalid(op, format!("a weight in rows {rows:?} is not finite, which {format} cannot hold"))
}

/// The piece must be as long as the matrix makes it.
fn length(op: &'static str, found: usize, format: Format, rows: usize, cols: usize) -> Result<()> {
    let expected = format.packed_len(rows, cols);
    if found == expected {
        return Ok(());
    }
    let reason = format!("{found} bytes for a {rows}x{cols} matrix as {format}, expected {expected}");
    Err(KernelError::invalid(op, reason))
}

/// Unpacks a piece into `values` `[rows, cols]` (f32 or bf16).
///
/// int8 and nf4 give the bits of bitsandbytes: f32 products, rounded to nearest even for bf16.
///
/// # Errors
/// If shapes do not fit or `values` is not contiguous.
pub fn unpack(device: &Device, packed: BytesView, format: Format, values: ViewMut) -> Result<()> {
    const OP: &str = "unpack";
    let (rows, cols) = values.shape();
    check::contiguous(OP, "values", values.is_contiguous())?;
    length(OP, packed.len(), format, rows, cols)?;
    if values.is_empty() {
        return Ok(());
    }
    if let Some(dtype) = format.dtype() {
        let used = values.len() * dtype.size();
        return cast(device, packed.as_tensor(0..used, rows, cols, dtype), values);
    }
    match device {
        Device::Cpu(cpu) if format == Format::Nf4 => cpu.unpack_nf4(packed, values),
        Device::Cpu(cpu) => cpu.unpack_int8(packed, values),
        Device::Meta(ledger) => ledger.record(OP, 0.0, (values.num_bytes() + packed.len()) as f64),
    }
    Ok(())
}

/// A 4-bit matrix as bitsandbytes stores it: `W.weight` beside `W.weight.absmax`, `W.weight.nested_absmax` and so on.
#[derive(Clone, Copy, Debug)]
pub struct StoredNf4<'a> {
    /// Two weights a byte, the first in the high half.
    pub weight: &'a [u8],
    /// A byte for the scale of each block of weights.
    pub absmax: &'a [u8],
    /// What the codes of weights stand for.
    pub quant_map: &'a [f32],
    /// A factor for each 256 scales.
    pub nested_absmax: &'a [f32],
    /// What the bytes of scales stand for.
    pub nested_quant_map: &'a [f32],
    /// The scales' mean.
    pub nested_offset: f32,
    /// Weights that share a scale.
    pub blocksize: usize,
    /// Scales that share a factor.
    pub nested_blocksize: usize,
}

/// How far apart two numbers of a map may be: bitsandbytes itself takes such maps for equal.
const SAME: f32 = 1e-6;

/// Packs what a checkpoint of bitsandbytes holds of a `rows × cols` matrix: codes and scales as they are stored.
///
/// # Errors
/// If lengths do not fit the matrix, or blocks or maps are not those of nf4.
pub fn pack_stored_nf4(
    device: &Device,
    stored: &StoredNf4,
    rows: usize,
    cols: usize,
    packed: BytesMut,
) -> Result<()> {
    const OP: &str = "pack_stored_nf4";
    length(OP, packed.len(), Format::Nf4, rows, cols)?;
    let StoredNf4 { weight, absmax, nested_absmax, nested_offset: mean, .. } = *stored;
    for (name, found, expected) in [
        ("blocksize", stored.blocksize, NF4_BLOCK),
        ("nested_blocksize", stored.nested_blocksize, NF4_BLOCKS),
    ] {
        if found != expected {
            let reason =
                format!("{name} is {found}; only {expected} can be read: quantise the weights again");
            return Err(KernelError::invalid(OP, reason));
        }
    }
    let num_blocks = (rows * cols).div_ceil(NF4_BLOCK);
    count(OP, "weight", weight.len(), (rows * cols).div_ceil(2), rows, cols)?;
    count(OP, "absmax", absmax.len(), num_blocks, rows, cols)?;
    count(OP, "nested_absmax", nested_absmax.len(), num_blocks.div_ceil(NF4_BLOCKS), rows, cols)?;
    known(OP, "quant_map", stored.quant_map, &crate::cpu::NF4_NUMBERS)?;
    known(OP, "nested_quant_map", stored.nested_quant_map, &*crate::cpu::NESTED_TABLE)?;
    match device {
        Device::Cpu(cpu) => cpu.pack_stored_nf4(weight, absmax, nested_absmax, mean, packed),
        Device::Meta(ledger) => ledger.record(OP, 0.0, (weight.len() + absmax.len() + packed.len()) as f64),
    }
    Ok(())
}

/// Packs what a checkpoint of bitsandbytes holds of a `rows × cols` matrix: `W.weight` (int8) and `W.SCB`, the largest
/// magnitude of each row.
///
/// # Errors
/// If lengths do not fit the matrix.
pub fn pack_stored_int8(
    device: &Device,
    weight: &[i8],
    scb: &[f32],
    rows: usize,
    cols: usize,
    packed: BytesMut,
) -> Result<()> {
    const OP: &str = "pack_stored_int8";
    length(OP, packed.len(), Format::Int8, rows, cols)?;
    count(OP, "weight", weight.len(), rows * cols, rows, cols)?;
    count(OP, "SCB", scb.len(), rows, rows, cols)?;
    if weight.is_empty() {
        return Ok(());
    }
    match device {
        Device::Cpu(cpu) => cpu.pack_stored_int8(weight, scb, packed),
        Device::Meta(ledger) => ledger.record(OP, 0.0, (weight.len() + packed.len()) as f64),
    }
    Ok(())
}

fn count(
    op: &'static str,
    name: &str,
    found: usize,
    expected: usize,
    rows: usize,
    cols: usize,
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    let reason = format!("{name} has {found} elements, expected {expected} for a {rows}x{cols} matrix");
    Err(KernelError::invalid(op, reason))
}

fn known(op: &'static str, name: &str, found: &[f32], expected: &[f32]) -> Result<()> {
    count_of_map(op, name, found.len(), expected.len())?;
    match found.iter().zip(expected).position(|(f, e)| f.is_nan() || (f - e).abs() > SAME) {
        None => Ok(()),
        Some(i) => {
            let (f, e) = (found[i], expected[i]);
            let reason = format!("{name}[{i}] is {f}, expected {e}: another quantisation than nf4's");
            Err(KernelError::invalid(op, reason))
        }
    }
}

fn count_of_map(op: &'static str, name: &str, found: usize, expected: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(KernelError::invalid(op, format!("{name} has {found} numbers, expected {expected}")))
}
