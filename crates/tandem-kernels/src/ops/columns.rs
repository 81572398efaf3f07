//! Column factors, as the magnitudes of DoRA, and their gradient.

use super::check;
use crate::cpu::columns as kernel;
use crate::device::launch;
use crate::{Backend, DType, Device, Extent, MemoryKind, Result, Tensor, View, ViewMut, cuda};

fn check_columns(op: &'static str, cols: usize, factors: &View, bias: Option<&View>) -> Result<()> {
    check::f32_shape(op, "factors", factors, 1, cols)?;
    bias.map_or(Ok(()), |bias| check::f32_shape(op, "bias", bias, 1, cols))
}

/// Allocates partial sums of row blocks, if a GPU sums columns in several blocks.
pub(super) fn partial_sums(device: &Device, rows: Extent, cols: usize) -> Result<Option<Tensor>> {
    let blocks = |rows: usize| rows.div_ceil(cuda::columns::BLOCK_ROWS);
    let blocks = Extent::new(blocks(rows.len()), blocks(rows.room()));
    let are_needed = device.backend() == Backend::Cuda && blocks.room() > 1;
    are_needed
        .then(|| device.alloc_in(MemoryKind::Scratch, blocks, Extent::exact(cols), DType::F32))
        .transpose()
}

/// Computes `y[T,N] ← y ⊙ factors[1,N] (+ bias[1,N])`. `y` is f32 or bf16, rounded once; `factors`
/// and `bias` are f32.
pub fn scale_columns(device: &Device, y: ViewMut, factors: View, bias: Option<View>) -> Result<()> {
    const OP: &str = "scale_columns";
    check_columns(OP, y.cols(), &factors, bias.as_ref())?;
    let work = check::work(OP, &y, 2.0 * y.len() as f64, 2.0 * y.num_bytes() as f64);
    launch!(device, work, {
        cpu => kernel::scale_columns(cpu, None, factors, bias, y),
        cuda => cuda::columns::scale_columns(cuda, None, factors, bias, y)
    })
}

/// Computes [`scale_columns`] out of place: `y[T,N] = x[T,N] ⊙ factors[1,N] (+ bias[1,N])`, `x` and
/// `y` f32 or bf16.
pub fn scaled_columns(device: &Device, x: View, factors: View, bias: Option<View>, y: ViewMut) -> Result<()> {
    const OP: &str = "scaled_columns";
    check::shape(OP, "y", &y, x.rows(), x.cols())?;
    check_columns(OP, x.cols(), &factors, bias.as_ref())?;
    let work = check::work(OP, &x, 2.0 * x.len() as f64, check::bytes(&[&x, &y]));
    launch!(device, work, {
        cpu => kernel::scale_columns(cpu, Some(x), factors, bias, y),
        cuda => cuda::columns::scale_columns(cuda, Some(x), factors, bias, y)
    })
}

/// Computes `out[1,N] = Σ_t a[t,N] · b[t,N]`, or `+=` if `add`, in a fixed order per column. `a`
/// and `b` are f32 or bf16; `out` is f32.
pub fn column_dots(device: &Device, a: View, b: View, out: ViewMut, add: bool) -> Result<()> {
    const OP: &str = "column_dots";
    check::shape(OP, "b", &b, a.rows(), a.cols())?;
    check::f32_shape(OP, "out", &out, 1, a.cols())?;
    let work = check::work(OP, &a, 2.0 * a.len() as f64, check::bytes(&[&a, &b, &out]));
    let mut partial = partial_sums(device, a.extent(), a.cols())?;
    launch!(device, work, {
        cpu => kernel::column_dots(cpu, a, b, out, add),
        cuda => cuda::columns::column_dots(cuda, a, b, out, add, partial.as_mut().map(Tensor::view_mut))
    })
}
