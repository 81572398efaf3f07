//! Elementwise operations on f32.

use super::check;
use crate::cpu::elementwise as kernel;
use crate::device::launch;
use crate::{Device, Result, View, ViewMut, cuda};

/// Computes `x = value`; f32, contiguous.
pub fn fill(device: &Device, x: ViewMut, value: f32) -> Result<()> {
    const OP: &str = "fill";
    check::is_f32(OP, "x", &x)?;
    check::contiguous(OP, "x", x.is_contiguous())?;
    let work = check::work(OP, &x, 0.0, x.num_bytes() as f64);
    launch!(device, work, {
        _cpu => x.into_slice().fill(value),
        cuda => cuda::elementwise::fill(cuda, x, value)
    })
}

/// Computes `y = a / b`, or `+=` if `add`; f32 `[1,N]`.
pub fn divide(device: &Device, a: View, b: View, y: ViewMut, add: bool) -> Result<()> {
    const OP: &str = "divide";
    check::f32_shape(OP, "a", &a, 1, y.cols())?;
    check::f32_shape(OP, "b", &b, 1, y.cols())?;
    check::f32_shape(OP, "y", &y, 1, y.cols())?;
    let work = check::work(OP, &y, y.len() as f64, 3.0 * y.num_bytes() as f64);
    launch!(device, work, {
        _cpu => kernel::divide(a.as_slice(), b.as_slice(), y.into_slice(), add),
        cuda => cuda::elementwise::divide(cuda, a, b, y, add)
    })
}

/// Computes `x = √x` in place; f32 `[1,N]`.
pub fn square_root(device: &Device, x: ViewMut) -> Result<()> {
    const OP: &str = "square_root";
    check::f32_shape(OP, "x", &x, 1, x.cols())?;
    let work = check::work(OP, &x, x.len() as f64, 2.0 * x.num_bytes() as f64);
    launch!(device, work, {
        _cpu => x.into_slice::<f32>().iter_mut().for_each(|x| *x = x.sqrt()),
        cuda => cuda::elementwise::square_root(cuda, x)
    })
}

/// Computes `y = weight · x + (1 − weight) · y`; f32 `[1,N]`.
pub fn mix(device: &Device, x: View, weight: f32, y: ViewMut) -> Result<()> {
    weighted_sum(device, x, weight, y, 1.0 - weight)
}

/// Computes `y = of_x · x + of_y · y`; f32 `[1,N]`.
pub fn weighted_sum(device: &Device, x: View, of_x: f32, y: ViewMut, of_y: f32) -> Result<()> {
    const OP: &str = "weighted_sum";
    check::f32_shape(OP, "x", &x, 1, y.cols())?;
    check::f32_shape(OP, "y", &y, 1, y.cols())?;
    let work = check::work(OP, &y, 3.0 * y.len() as f64, 3.0 * y.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.weighted_sum(x.as_slice(), of_x, y.into_slice(), of_y),
        cuda => cuda::elementwise::weighted_sum(cuda, x, of_x, y, of_y)
    })
}

/// Moves `y` towards `end`: `y + weight · (end − y)`, as `torch.lerp`; f32 `[1,N]`. A weight may lie
/// outside of 0 to 1.
pub fn lerp(device: &Device, end: View, weight: f32, y: ViewMut) -> Result<()> {
    const OP: &str = "lerp";
    check::f32_shape(OP, "end", &end, 1, y.cols())?;
    check::f32_shape(OP, "y", &y, 1, y.cols())?;
    let work = check::work(OP, &y, 3.0 * y.len() as f64, 3.0 * y.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.lerp(end.as_slice(), weight, y.into_slice()),
        cuda => cuda::elementwise::lerp(cuda, end, weight, y)
    })
}

/// Computes one element of [`lerp`].
#[inline]
pub fn lerp_of(y: f32, end: f32, weight: f32) -> f32 {
    // As in torch, the nearer side is the one that is added to: both ends are exact.
    if weight.abs() < 0.5 { y + weight * (end - y) } else { end - (end - y) * (1.0 - weight) }
}

/// Exchanges `a` and `b`; f32 `[1,N]`.
pub fn swap(device: &Device, a: ViewMut, b: ViewMut) -> Result<()> {
    const OP: &str = "swap";
    check::f32_shape(OP, "a", &a, 1, b.cols())?;
    check::f32_shape(OP, "b", &b, 1, b.cols())?;
    let work = check::work(OP, &b, 0.0, 4.0 * b.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.swap(a.into_slice(), b.into_slice()),
        cuda => cuda::elementwise::swap(cuda, a, b)
    })
}
