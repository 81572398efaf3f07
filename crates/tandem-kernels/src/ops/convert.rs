//! Moving and converting whole matrices.

use crate::{Device, Result, View, ViewMut};

/// Sets every element to zero.
///
/// # Errors
/// None on the CPU.
pub fn fill_zero(device: &Device, x: ViewMut) -> Result<()> {
    unimplemented!()
}

/// `dst = src` with conversion between types where they differ.
///
/// # Errors
/// If shapes do not fit.
pub fn cast(device: &Device, src: View, dst: ViewMut) -> Result<()> {
    unimplemented!()
}

/// `dst += src`; `dst` is f32.
///
/// # Errors
/// If shapes do not fit.
pub fn add(device: &Device, src: View, dst: ViewMut) -> Result<()> {
    unimplemented!()
}

/// `x *= factor`; f32.
///
/// # Errors
/// If the type does not fit.
pub fn scale(device: &Device, factor: f32, x: ViewMut) -> Result<()> {
    unimplemented!()
}

/// `dst[i] = src[rows[i]]`, with conversion.
///
/// # Errors
/// If a row is outside `src` or shapes do not fit.
pub fn gather_rows(device: &Device, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    unimplemented!()
}

/// `dst[rows[i]] += src[i]`; rows are distinct; `dst` is f32.
///
/// # Errors
/// If a row is outside `dst`, rows repeat, or shapes do not fit.
pub fn scatter_add_rows(device: &Device, src: View, rows: &[u32], dst: ViewMut) -> Result<()> {
    unimplemented!()
}

/// Copies host numbers into a tensor, with conversion. Nothing on a dry run.
///
/// # Errors
/// If the number of elements differs.
pub fn write_f32(device: &Device, values: &[f32], dst: ViewMut) -> Result<()> {
    unimplemented!()
}

/// Copies a tensor to the host, with conversion; zeros on a dry run.
///
/// # Errors
/// None on the CPU.
pub fn read_f32(device: &Device, src: View) -> Result<Vec<f32>> {
    unimplemented!()
}
