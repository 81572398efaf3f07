//! Quantised matrices of a checkpoint: the host assembles their units part by part and sends them.

use super::Cuda;
use super::pack::{PART, host};
use crate::memory::bytes::BytesMut;
use crate::numerics::format::{NF4_BLOCK, NF4_UNIT, NF4_UNIT_LEN};
use crate::{Format, Result};

pub(crate) fn pack_stored_nf4(
    cuda: &Cuda,
    weight: &[u8],
    absmax: &[u8],
    nested_absmax: &[f32],
    mean: f32,
    packed: BytesMut,
) -> Result<()> {
    const UNITS: usize = PART / NF4_UNIT;
    let host = host()?;
    let mut bytes = vec![0; packed.len().min(UNITS * NF4_UNIT_LEN)];
    let parts = weight.chunks(PART / 2).zip(absmax.chunks(PART / NF4_BLOCK)).zip(nested_absmax.chunks(UNITS));
    for (index, ((codes, scales), largest)) in parts.enumerate() {
        let bytes = &mut bytes[..largest.len() * NF4_UNIT_LEN];
        host.pack_stored_nf4(codes, scales, largest, mean, BytesMut::from_host(bytes));
        let to = packed.view().address() + (index * UNITS * NF4_UNIT_LEN) as u64;
        // SAFETY: the view borrows room for all units, and this many precede.
        unsafe { cuda.write(bytes, to)? };
    }
    Ok(())
}

pub(crate) fn pack_stored_rows(
    cuda: &Cuda,
    weight: &[u8],
    scales: &[f32],
    format: Format,
    packed: BytesMut,
) -> Result<()> {
    let (cols, host) = (weight.len() / scales.len(), host()?);
    let unit_len = format.unit_len(cols);
    let num_rows = (PART / cols).clamp(1, scales.len());
    let mut bytes = vec![0; num_rows * unit_len];
    for (index, (codes, scales)) in weight.chunks(num_rows * cols).zip(scales.chunks(num_rows)).enumerate() {
        let bytes = &mut bytes[..scales.len() * unit_len];
        host.pack_stored_rows(codes, scales, format, BytesMut::from_host(bytes));
        let to = packed.view().address() + (index * num_rows * unit_len) as u64;
        // SAFETY: the view borrows room for a unit of each row.
        unsafe { cuda.write(bytes, to)? };
    }
    Ok(())
}
