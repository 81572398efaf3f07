//! Packing and unpacking of frozen weights in a [`Format`].

use std::ops::RangeInclusive;

use super::{cast, check};
use crate::device::{launch, on};
use crate::memory::bytes::{ALIGNMENT, BytesMut, BytesView};
use crate::numerics::format::NF4_BLOCK;
use crate::{Backend, DType, Device, Format, KernelError, MemoryKind, Result, Tensor, View, ViewMut, cuda};

/// Packs `values` `[rows, cols]` (f32 or bf16) into a piece of [`Format::packed_len`] bytes; unused
/// bytes are zero.
///
/// f32 and bf16 are converted; int8 and nf4 are quantised to the bits of bitsandbytes 0.50 on the
/// CPU. An fp8 scale is the row's largest magnitude / 448; a code is the nearest to weight / scale, ties
/// to even. The mean of nf4's scales is that of torch on one thread: with more threads, torch's last
/// bits vary for matrices of 2²¹ weights or more. nf4 allocates four bytes of scratch per 64
/// weights. The host packs for a GPU, on up to eight threads: it reads the matrix part by part and
/// assembles the piece in host memory.
///
/// # Errors
/// If shapes do not fit or `values` is not contiguous. int8, fp8 and nf4 also refuse weights that are
/// not finite; the bytes are then meaningless.
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
    let mut scales = match (format, device.backend()) {
        (Format::Nf4, Backend::Cpu) => {
            Some(device.alloc(MemoryKind::Scratch, 1, values.len().div_ceil(NF4_BLOCK), DType::F32)?)
        }
        // For a GPU the host packs.
        _ => None,
    };
    let scales = scales.as_mut().map(Tensor::view_mut);
    let work = check::work(OP, &values, 0.0, (values.num_bytes() + packed.len()) as f64);
    let packing = device.launch(
        work,
        on!(
            cpu => match scales {
                Some(scales) => {
                    let packing = cpu.pack_nf4(values, scales.into_slice(), packed);
                    packing.map_err(|start| rows_of_block(values.shape(), start))
                }
                None => cpu.pack_rows(values, format, packed).map_err(|row| row..=row),
            },
            cuda => cuda::pack::pack(cuda, values, format, packed)
        ),
    )?;
    let Err(rows) = packing.unwrap_or(Ok(())) else { return Ok(()) };
    let reason = format!("a weight in rows {rows:?} is not finite, which {format} cannot hold");
    Err(KernelError::invalid(OP, reason))
}

/// Returns the rows of a matrix that overlap an nf4 block.
pub(crate) fn rows_of_block((rows, cols): (usize, usize), start: usize) -> RangeInclusive<usize> {
    start / cols..=(start + NF4_BLOCK - 1).min(rows * cols - 1) / cols
}

fn pack_plain(device: &Device, values: View, dtype: DType, mut packed: BytesMut) -> Result<()> {
    let ((rows, cols), used) = (values.shape(), values.len() * dtype.size());
    let (start, len) = (used / ALIGNMENT * ALIGNMENT, packed.len());
    if used < len {
        // Clears the last unit, which may be partly used.
        let last = packed.reborrow().into_tensor(start..len, 1, (len - start) / 4, DType::F32);
        super::fill_zero(device, last)?;
    }
    cast(device, values, packed.into_tensor(0..used, rows, cols, dtype))
}

/// Checks the length of a piece.
pub(super) fn length(op: &'static str, found: usize, format: Format, rows: usize, cols: usize) -> Result<()> {
    let expected = format.packed_len(rows, cols);
    if found == expected {
        return Ok(());
    }
    let reason = format!("{found} bytes for a {rows}x{cols} matrix as {format}, expected {expected}");
    Err(KernelError::invalid(op, reason))
}

/// Unpacks a piece into `values` `[rows, cols]` (f32 or bf16).
///
/// Quantised weights are products in f32, rounded to nearest even for bf16. Those of int8 and nf4 have
/// the bits of bitsandbytes.
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
    let work = check::work(OP, &values, 0.0, (values.num_bytes() + packed.len()) as f64);
    launch!(device, work, {
        cpu => match format {
            Format::Nf4 => cpu.unpack_nf4(packed, values),
            _ => cpu.unpack_rows(packed, format, values),
        },
        cuda => cuda::pack::unpack(cuda, packed, format, values)
    })
}
