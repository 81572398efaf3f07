//! Copies and conversions of whole matrices.

use super::check;
use crate::device::launch;
use crate::{Device, KernelError, Result, View, ViewMut, cuda};

/// Sets every element to zero.
pub fn fill_zero(device: &Device, x: ViewMut) -> Result<()> {
    let work = check::work("fill_zero", &x, 0.0, x.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.fill_zero(x),
        cuda => cuda::convert::fill_zero(cuda, x)
    })
}

/// Computes `dst = src` with conversion between types where they differ.
pub fn cast(device: &Device, src: View, dst: ViewMut) -> Result<()> {
    const OP: &str = "cast";
    check::shape(OP, "dst", &dst, src.rows(), src.cols())?;
    let work = check::work(OP, &src, 0.0, (src.num_bytes() + dst.num_bytes()) as f64);
    launch!(device, work, {
        cpu => cpu.cast(src, dst),
        cuda => cuda::convert::cast(cuda, src, dst)
    })
}

/// Computes `dst += src`; `dst` is f32.
pub fn add(device: &Device, src: View, dst: ViewMut) -> Result<()> {
    const OP: &str = "add";
    check::shape(OP, "dst", &dst, src.rows(), src.cols())?;
    check::is_f32(OP, "dst", &dst)?;
    let work = check::work(OP, &src, src.len() as f64, (src.num_bytes() + 2 * dst.num_bytes()) as f64);
    launch!(device, work, {
        cpu => cpu.add(src, dst),
        cuda => cuda::convert::add(cuda, src, dst)
    })
}

/// Computes `x *= factor`; a bf16 product is rounded once.
pub fn scale(device: &Device, x: ViewMut, factor: f32) -> Result<()> {
    let work = check::work("scale", &x, x.len() as f64, 2.0 * x.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.scale(x, factor),
        cuda => cuda::convert::scale(cuda, x, factor)
    })
}

/// Computes `dst[i] = src[rows[i]]`, with conversion.
pub fn gather_rows(device: &Device, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    const OP: &str = "gather_rows";
    check::shape(OP, "dst", &dst, rows.len(), src.cols())?;
    rows_inside(OP, rows, src.rows())?;
    let read = dst.len() * src.dtype().size();
    let work = check::work(OP, &dst, 0.0, (read + dst.num_bytes()) as f64);
    launch!(device, work, {
        cpu => cpu.gather_rows(src, rows, dst),
        cuda => cuda::convert::gather_rows(cuda, src, rows, dst)
    })
}

/// Computes `dst[rows[i]] = src[i]` with conversion, and zeroes every other row. Rows are distinct.
pub fn spread_rows(device: &Device, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    const OP: &str = "spread_rows";
    check::shape(OP, "src", &src, rows.len(), dst.cols())?;
    distinct_inside(OP, rows, dst.rows())?;
    let work = check::work(OP, &dst, 0.0, (src.num_bytes() + dst.num_bytes()) as f64);
    launch!(device, work, {
        cpu => cpu.spread_rows(src, rows, dst),
        cuda => cuda::convert::spread_rows(cuda, src, rows, dst)
    })
}

/// Computes `dst[rows[i]] = src[i]` with conversion, and keeps every other row. Rows are distinct.
pub fn scatter_rows(device: &Device, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    const OP: &str = "scatter_rows";
    check::shape(OP, "src", &src, rows.len(), dst.cols())?;
    distinct_inside(OP, rows, dst.rows())?;
    let written = src.len() * dst.dtype().size();
    let work = check::work(OP, &dst, 0.0, (src.num_bytes() + written) as f64);
    launch!(device, work, {
        cpu => cpu.scatter_rows(src, rows, dst),
        cuda => cuda::convert::scatter_rows(cuda, src, rows, dst)
    })
}

fn distinct_inside(op: &'static str, rows: &[u32], num_rows: usize) -> Result<()> {
    rows_inside(op, rows, num_rows)?;
    match first_repeated(rows) {
        Some(row) => Err(KernelError::invalid(op, format!("row {row} is listed twice"))),
        None => Ok(()),
    }
}

fn rows_inside(op: &'static str, rows: &[u32], num_rows: usize) -> Result<()> {
    match rows.iter().position(|r| *r as usize >= num_rows) {
        None => Ok(()),
        Some(i) => {
            Err(KernelError::invalid(op, format!("rows[{i}] is {}, the matrix has {num_rows} rows", rows[i])))
        }
    }
}

/// Returns the first value that occurs twice. Ascending lists, as in training, need no memory.
fn first_repeated(rows: &[u32]) -> Option<u32> {
    if rows.is_sorted_by(|a, b| a < b) {
        return None;
    }
    let mut sorted = rows.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

/// Copies host numbers into a tensor, with conversion. Does nothing on a dry run.
pub fn write_f32(device: &Device, values: &[f32], dst: ViewMut) -> Result<()> {
    const OP: &str = "write_f32";
    if values.len() != dst.len() {
        let (rows, cols) = dst.shape();
        return Err(KernelError::invalid(
            OP,
            format!("{} numbers, expected those of a {rows}x{cols} matrix", values.len()),
        ));
    }
    let work = check::work(OP, &dst, 0.0, dst.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.write_f32(values, dst),
        cuda => cuda::convert::write_f32(cuda, values, dst)
    })
}

/// Copies a tensor to the host, with conversion; zeros on a dry run.
pub fn read_f32(device: &Device, src: View) -> Result<Vec<f32>> {
    let mut values = Vec::new();
    read_f32_into(device, src, &mut values)?;
    Ok(values)
}

/// Copies a tensor to the host as [`read_f32`], into an existing vector; a dry run leaves it as it
/// is.
pub fn read_f32_into(device: &Device, src: View, values: &mut Vec<f32>) -> Result<()> {
    values.resize(src.len(), 0.0);
    let work = check::work("read_f32", &src, 0.0, src.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.read_f32(src, values),
        cuda => cuda::convert::read_f32(cuda, src, values)
    })
}
