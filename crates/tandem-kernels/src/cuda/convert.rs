//! Copies and conversions of whole matrices.

use super::elements::Elements;
use super::graph::Work;
use super::{Cuda, args, by_type, bytes, driver, source};
use crate::{DType, Result, View, ViewMut, bf16};

pub(super) static SOURCE: driver::Source = source!("convert.cu");

/// Sets every element to zero.
pub(crate) fn fill_zero(cuda: &Cuda, x: ViewMut) -> Result<()> {
    if x.is_contiguous() {
        // SAFETY: the view borrows these bytes.
        return unsafe { cuda.put(Work::Clear { at: x.address(), bytes: x.num_bytes() }) };
    }
    super::elementwise::fill(cuda, x, 0.0)
}

/// Returns the driver copies between equal types, also from and to host memory.
pub(crate) fn cast(cuda: &Cuda, src: View, dst: ViewMut) -> Result<()> {
    if src.dtype() == dst.dtype() {
        return copy(cuda, src, dst);
    }
    let way = Elements::new(&[src, dst.view()]);
    let name = if src.dtype() == DType::F32 { "cast_f32_bf16" } else { "cast_bf16_f32" };
    let args = args![src, src.stride(), &dst, dst.stride(), way.rows, way.cols, way.wide];
    // SAFETY: the operands are those of the kernel, of one shape, as the operation has checked.
    unsafe { cuda.launch(&SOURCE, name, way.grid(), args) }
}

fn copy(cuda: &Cuda, src: View, dst: ViewMut) -> Result<()> {
    if src.is_empty() {
        return Ok(());
    }
    if src.is_contiguous() && dst.is_contiguous() {
        let work = Work::Copy { from: src.address(), to: dst.address(), bytes: src.num_bytes() };
        // SAFETY: the views borrow as many bytes.
        return unsafe { cuda.put(work) };
    }
    let size = src.dtype().size();
    let (from, to) = ((src.address(), src.stride() * size), (dst.address(), dst.stride() * size));
    // SAFETY: as above.
    unsafe { cuda.put(Work::CopyRows { from, to, rows: src.rows(), bytes: src.cols() * size }) }
}

pub(crate) fn add(cuda: &Cuda, src: View, dst: ViewMut) -> Result<()> {
    let way = Elements::new(&[src, dst.view()]);
    let args = args![src, src.stride(), &dst, dst.stride(), way.rows, way.cols, way.wide];
    // SAFETY: as of `cast`.
    unsafe { cuda.launch(&SOURCE, by_type!("add", src.dtype()), way.grid(), args) }
}

pub(crate) fn scale(cuda: &Cuda, x: ViewMut, factor: f32) -> Result<()> {
    let way = Elements::new(&[x.view()]);
    let args = args![&x, x.stride(), factor, way.rows, way.cols, way.wide];
    // SAFETY: the view borrows these elements.
    unsafe { cuda.launch(&SOURCE, by_type!("scale", x.dtype()), way.grid(), args) }
}

pub(crate) fn gather_rows(cuda: &Cuda, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    take_rows(cuda, src, rows, &dst)
}

/// Writes each row of the result once: a row of `src`, or zeros.
pub(crate) fn spread_rows(cuda: &Cuda, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    let mut sources = vec![NO_ROW; dst.rows()];
    for (source, &row) in rows.iter().enumerate() {
        sources[row as usize] = source as u32;
    }
    take_rows(cuda, src, &sources, &dst)
}

/// Writes the listed rows of the result.
pub(crate) fn scatter_rows(cuda: &Cuda, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    let way = Elements::by_rows(src.rows(), src.cols(), &[src, dst.view()]);
    let name = by_type!("put_rows", src.dtype(), dst.dtype());
    let rows = cuda.table(rows)?;
    let args = args![src, src.stride(), rows, &dst, dst.stride(), way.rows, way.cols, way.wide];
    // SAFETY: the operands are those of the kernel; the operation has checked that there is a row for each of
    // `src`, inside `dst` and no other's.
    unsafe { cuda.launch(&SOURCE, name, way.grid(), args) }
}

/// Entry of a table of rows for a row of zeros, as in `convert.cu`.
const NO_ROW: u32 = u32::MAX;

fn take_rows(cuda: &Cuda, src: View, rows: &[u32], dst: &ViewMut) -> Result<()> {
    let way = Elements::by_rows(dst.rows(), dst.cols(), &[src, dst.view()]);
    let name = by_type!("take_rows", src.dtype(), dst.dtype());
    let rows = cuda.table(rows)?;
    let args = args![src, src.stride(), rows, dst, dst.stride(), way.rows, way.cols, way.wide];
    // SAFETY: the operands are those of the kernel; the operation has checked that rows are inside
    // `src`, and there is one for each of `dst`.
    unsafe { cuda.launch(&SOURCE, name, way.grid(), args) }
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
