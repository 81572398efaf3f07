//! Second moments of Adafactor and directions by them; on CPUs alone.

use super::check;
use crate::device::launch;
use crate::{Device, KernelError, Result, View, ViewMut};

fn on_cpus_alone(op: &'static str) -> KernelError {
    KernelError::invalid(op, "there is no kernel for GPUs")
}

/// Takes the squares of a gradient `g[M,N]` into the averages of their row means `row[1,M]` and column
/// means `col[1,N]`: `row = beta · row + (1 − beta) · mean`. f32, contiguous; sums are f64, in an order
/// that does not depend on the number of threads.
pub fn factored_moments(device: &Device, g: View, beta: f64, row: ViewMut, col: ViewMut) -> Result<()> {
    const OP: &str = "factored_moments";
    check::is_f32(OP, "g", &g)?;
    check::contiguous(OP, "g", g.is_contiguous())?;
    check::f32_shape(OP, "row", &row, 1, g.rows())?;
    check::f32_shape(OP, "col", &col, 1, g.cols())?;
    let work = check::work(OP, &g, 6.0 * g.len() as f64, 2.0 * g.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.factored_moments(g, beta, row.into_slice(), col.into_slice()),
        _cuda => Err(on_cpus_alone(OP))
    })
}

/// Replaces a gradient by its quotient with the root of its second moment: of element (i, j)
/// `row[i] · col[j] / mean(row)`. As [`factored_moments`].
pub fn factored_direction(device: &Device, g: ViewMut, row: View, col: View) -> Result<()> {
    const OP: &str = "factored_direction";
    check::is_f32(OP, "g", &g)?;
    check::contiguous(OP, "g", g.is_contiguous())?;
    check::f32_shape(OP, "row", &row, 1, g.rows())?;
    check::f32_shape(OP, "col", &col, 1, g.cols())?;
    let work = check::work(OP, &g, 6.0 * g.len() as f64, 2.0 * g.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.factored_direction(g, row.as_slice(), col.as_slice()),
        _cuda => Err(on_cpus_alone(OP))
    })
}

/// Takes the squares of a gradient `g[1,N]` into their average `v[1,N]`, and replaces the gradient by its
/// quotient with the root of that.
pub fn whole_moments(device: &Device, g: ViewMut, beta: f64, v: ViewMut) -> Result<()> {
    const OP: &str = "whole_moments";
    check::f32_shape(OP, "g", &g, 1, v.cols())?;
    check::f32_shape(OP, "v", &v, 1, g.cols())?;
    let work = check::work(OP, &g, 7.0 * g.len() as f64, 4.0 * g.num_bytes() as f64);
    launch!(device, work, {
        cpu => cpu.whole_moments(g.into_slice(), beta, v.into_slice()),
        _cuda => Err(on_cpus_alone(OP))
    })
}
