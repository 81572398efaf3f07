//! Uniform noise without a stored draw: a function of a row's key and of the column, the same on every
//! device and for every number of threads.

use super::check;
use crate::device::launch;
use crate::{Device, Result, ViewMut, cuda};

/// Noise of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NoiseRow {
    /// Key of the draws.
    pub key: u64,
    /// Largest absolute value.
    pub scale: f32,
}

/// Adds uniform noise in `[−scale, scale]` to each row of `x[T,D]`, f32; `rows` has T.
pub fn add_noise(device: &Device, x: ViewMut, rows: &[NoiseRow]) -> Result<()> {
    const OP: &str = "add_noise";
    check::is_f32(OP, "x", &x)?;
    check::shape(OP, "x", &x, rows.len(), x.cols())?;
    let work = check::work(OP, &x, 4.0 * x.len() as f64, 2.0 * x.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.add_noise(x, rows),
        cuda => cuda::dropout::add_noise(cuda, x, rows)
    })
}
