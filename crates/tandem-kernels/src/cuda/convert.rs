//! Moving and converting whole matrices.

use super::driver::Grid;
use super::{Cuda, args, bytes, driver, failed, source};
use crate::{DType, Result, View, ViewMut, bf16};

pub(super) static SOURCE: driver::Source = source!("convert.cu");

/// Threads of a block of the kernels that go over a matrix.
const THREADS: u32 = 256;

/// Sets every element to zero.
pub(crate) fn fill_zero(cuda: &Cuda, x: ViewMut) -> Result<()> {
    if x.is_contiguous() {
        // SAFETY: the view borrows these bytes.
        return unsafe { cuda.driver().clear(cuda.stream(), x.address(), x.num_bytes()) };
    }
    scale(cuda, x, 0.0)
}

pub(crate) fn cast(cuda: &Cuda, src: View, dst: ViewMut) -> Result<()> {
    let _ = (cuda, src, dst);
    Err(failed("convert", "not written"))
}

pub(crate) fn add(cuda: &Cuda, src: View, dst: ViewMut) -> Result<()> {
    let _ = (cuda, src, dst);
    Err(failed("convert", "not written"))
}

pub(crate) fn scale(cuda: &Cuda, x: ViewMut, factor: f32) -> Result<()> {
    let _ = (cuda, x, factor);
    Err(failed("convert", "not written"))
}

pub(crate) fn gather_rows(cuda: &Cuda, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    let _ = (cuda, src, rows, dst);
    Err(failed("convert", "not written"))
}

pub(crate) fn spread_rows(cuda: &Cuda, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    let _ = (cuda, src, rows, dst);
    Err(failed("convert", "not written"))
}

/// Copies host numbers to the device, rounded on the host where the type is narrower. Waits.
pub(crate) fn write_f32(cuda: &Cuda, values: &[f32], dst: ViewMut) -> Result<()> {
    match dst.dtype() {
        DType::F32 => write_rows(cuda, values, &dst),
        DType::Bf16 => {
            let rounded: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
            write_rows(cuda, &rounded, &dst)
        }
    }
}

fn write_rows<T: bytes::Plain>(cuda: &Cuda, values: &[T], dst: &ViewMut) -> Result<()> {
    if dst.is_contiguous() {
        // SAFETY: the view borrows room for as many numbers.
        return unsafe { cuda.write(values, dst.address()) };
    }
    for (row, values) in values.chunks(dst.cols().max(1)).enumerate() {
        let to = dst.address() + (row * dst.stride() * size_of::<T>()) as u64;
        // SAFETY: the row is inside the view.
        unsafe { cuda.write(values, to)? };
    }
    Ok(())
}

/// Copies numbers to the host, widened there. Waits.
pub(crate) fn read_f32(cuda: &Cuda, src: View, values: &mut [f32]) -> Result<()> {
    match src.dtype() {
        DType::F32 => read_rows(cuda, src, values),
        DType::Bf16 => {
            let mut narrow = vec![bf16::ZERO; values.len()];
            read_rows(cuda, src, &mut narrow)?;
            values.iter_mut().zip(narrow).for_each(|(wide, narrow)| *wide = narrow.to_f32());
            Ok(())
        }
    }
}

fn read_rows<T: bytes::Plain>(cuda: &Cuda, src: View, values: &mut [T]) -> Result<()> {
    if src.is_contiguous() {
        // SAFETY: the view borrows as many numbers.
        return unsafe { cuda.read(src.address(), values) };
    }
    for (row, values) in values.chunks_mut(src.cols().max(1)).enumerate() {
        let from = src.address() + (row * src.stride() * size_of::<T>()) as u64;
        // SAFETY: the row is inside the view.
        unsafe { cuda.read(from, values)? };
    }
    Ok(())
}
