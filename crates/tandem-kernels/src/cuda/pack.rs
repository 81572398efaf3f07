//! Frozen weights. The GPU unpacks them at every step; the host packs them once, since its kernels
//! have the bits of bitsandbytes, and it reads the folder.

use std::ops::RangeInclusive;

use super::driver::Grid;
use super::{Cuda, args, by_type, driver, source};
use crate::cpu::{self, Cpu, Isa};
use crate::memory::arena::Arena;
use crate::memory::bytes::{BytesMut, BytesView};
use crate::numerics::format::{NF4_BLOCK, NF4_UNIT, NF4_UNIT_LEN};
use crate::ops::rows_of_block;
use crate::{Element, Format, Result, View, ViewMut, with_element};

pub(super) static SOURCE: driver::Source = source!("pack.cu", not fused);

/// Threads of a block, as in `pack.cu`.
const THREADS: u32 = 256;

/// Columns per block of the kernels of coded rows, as in `pack.cu`.
const ROW_COLUMNS: usize = 32 * THREADS as usize;

/// Weights packed by the host at a time.
pub(super) const PART: usize = 256 * NF4_UNIT;

/// Threads that pack on the host.
const HOST_THREADS: usize = 8;

/// Creates a CPU device without memory.
pub(super) fn host() -> Result<Cpu> {
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get().min(HOST_THREADS));
    Cpu::new(threads, Arena::new(1)?, Isa::detect()?)
}

/// Packs a matrix. The error is the range of rows with a weight that is not finite.
pub(crate) fn pack(
    cuda: &Cuda,
    values: View,
    format: Format,
    packed: BytesMut,
) -> Result<Result<(), RangeInclusive<usize>>> {
    with_element!(values.dtype(), E => match format {
        Format::Nf4 => pack_nf4::<E>(cuda, values, packed),
        _ => pack_rows::<E>(cuda, values, format, packed),
    })
}

fn pack_nf4<E: Element>(
    cuda: &Cuda,
    values: View,
    packed: BytesMut,
) -> Result<Result<(), RangeInclusive<usize>>> {
    let (len, host) = (values.len(), host()?);
    let mut bytes = vec![0; packed.len()];
    // Scales are quantised with the mean of all of them, so they come last.
    let mut scales = vec![0.0; len.div_ceil(NF4_BLOCK)];
    let mut part = vec![E::from_f32(0.0); len.min(PART)];
    let units = bytes.chunks_mut(PART / NF4_UNIT * NF4_UNIT_LEN);
    for (index, (units, scales)) in units.zip(scales.chunks_mut(PART / NF4_BLOCK)).enumerate() {
        let start = index * PART;
        let part = &mut part[..PART.min(len - start)];
        // SAFETY: the view borrows as many weights from there on.
        unsafe { cuda.read(values.address() + (start * size_of::<E>()) as u64, part)? };
        let row = View::from_host(part, 1, part.len());
        if let Err(block) = host.pack_nf4_codes(row, scales, BytesMut::from_host(units)) {
            return Ok(Err(rows_of_block(values.shape(), start + block)));
        }
    }
    host.pack_nf4_scales(&scales, BytesMut::from_host(&mut bytes));
    // SAFETY: the view borrows room for as many bytes.
    unsafe { cuda.write(&bytes, packed.view().address())? };
    Ok(Ok(()))
}

fn pack_rows<E: Element>(
    cuda: &Cuda,
    values: View,
    format: Format,
    packed: BytesMut,
) -> Result<Result<(), RangeInclusive<usize>>> {
    let ((rows, cols), host) = (values.shape(), host()?);
    let unit_len = format.unit_len(cols);
    let num_rows = (PART / cols).clamp(1, rows);
    let mut bytes = vec![0; num_rows * unit_len];
    let mut part = vec![E::from_f32(0.0); num_rows * cols];
    for first in (0..rows).step_by(num_rows) {
        let count = num_rows.min(rows - first);
        let (part, bytes) = (&mut part[..count * cols], &mut bytes[..count * unit_len]);
        // SAFETY: the view borrows as many weights from there on.
        unsafe { cuda.read(values.address() + (first * cols * size_of::<E>()) as u64, part)? };
        let packing = host.pack_rows(View::from_host(part, count, cols), format, BytesMut::from_host(bytes));
        if let Err(row) = packing {
            return Ok(Err(first + row..=first + row));
        }
        // SAFETY: the view borrows room for a unit of each row.
        unsafe { cuda.write(bytes, packed.view().address() + (first * unit_len) as u64)? };
    }
    Ok(Ok(()))
}

pub(crate) fn unpack(cuda: &Cuda, packed: BytesView, format: Format, values: ViewMut) -> Result<()> {
    let (rows, cols) = values.shape();
    match format {
        Format::Nf4 => {
            let mut tables = [0.0; 16 + 256];
            tables[..16].copy_from_slice(&cpu::NF4_NUMBERS);
            tables[16..].copy_from_slice(&*cpu::NESTED_TABLE);
            let (name, grid) =
                (by_type!("unpack_nf4", values.dtype()), Grid::new(values.len().div_ceil(NF4_UNIT), THREADS));
            let args = args![packed, cuda.table(&tables)?, &values, values.len()];
            // SAFETY: the operands are those of the kernel, with a unit for each block of threads.
            unsafe { cuda.launch(&SOURCE, name, grid, args) }
        }
        _ => {
            let grid = Grid::with_dims([rows, cols.div_ceil(ROW_COLUMNS), 1], THREADS);
            let name = match format {
                Format::Fp8 => by_type!("unpack_fp8", values.dtype()),
                _ => by_type!("unpack_int8", values.dtype()),
            };
            let args = args![packed, format.unit_len(cols), &values, cols];
            // SAFETY: the operands are those of the kernel, with a unit for each row.
            unsafe { cuda.launch(&SOURCE, name, grid, args) }
        }
    }
}
