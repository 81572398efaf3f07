//! RMSNorm and LayerNorm over rows, forward and backward.

use crate::cpu::norm as kernel;
use crate::device::on;
use crate::ops::check;
use crate::{Backend, DType, Device, Extent, Kind, Result, Tensor, View, ViewMut, cuda};

/// Rows whose contributions to the weight gradient are summed in one go on a processor. Fixed, so that the order of the sum does
/// not depend on the number of threads.
pub(crate) const BLOCK_ROWS: usize = 32;

/// Room for the contributions of each block of rows of `x`; none if they are not asked for.
fn partial_sums(device: &Device, x: View, wanted: bool, width: usize) -> Result<Tensor> {
    let blocks = |rows: usize| match device.backend() {
        _ if !wanted => 0,
        Backend::Cpu => rows.div_ceil(BLOCK_ROWS),
        Backend::Cuda => cuda::norm::blocks(rows, x.cols()),
    };
    let blocks = Extent::new(blocks(x.rows()), blocks(x.extent().room()));
    device.alloc_in(Kind::Scratch, blocks, Extent::exact(width), DType::F32)
}

/// `y = x / rms(x) · (w + offset)`; `rms(x) = sqrt(mean(x²) + eps)`. `offset` is 0, or 1 for Gemma.
///
/// `x` `[T,D]` f32 or bf16, `w` `[1,D]` f32, `y` `[T,D]` either type, `inverse_rms` `[1,T]` f32 is kept for backward.
///
/// # Errors
/// If shapes or types do not fit.
pub fn rms_norm(
    device: &Device,
    x: View,
    w: View,
    offset: f32,
    eps: f32,
    y: ViewMut,
    inverse_rms: ViewMut,
) -> Result<()> {
    const OP: &str = "rms_norm";
    let (tokens, width) = (x.rows(), x.cols());
    check::f32_shape(OP, "w", &w, 1, width)?;
    check::shape(OP, "y", &y, tokens, width)?;
    check::f32_shape(OP, "inverse_rms", &inverse_rms, 1, tokens)?;
    let work = check::work(OP, &x, 4.0 * x.len() as f64, check::bytes(&[&x, &w, &y, &inverse_rms]));
    device.launch(
        work,
        on!(
            cpu => kernel::rms_norm(cpu, x, w, offset, eps, y, inverse_rms),
            cuda => cuda::norm::rms_norm(cuda, x, w, offset, eps, y, inverse_rms)
        ),
    )?;
    Ok(())
}

/// `dx += ∂y/∂x · dy` (f32 `[T,D]`) and `dw += Σ_t dy · x / rms` (f32 `[1,D]`; skipped if `None`).
///
/// # Errors
/// If shapes or types do not fit.
pub fn rms_norm_backward(
    device: &Device,
    x: View,
    w: View,
    offset: f32,
    inverse_rms: View,
    dy: View,
    dx: ViewMut,
    dw: Option<ViewMut>,
) -> Result<()> {
    const OP: &str = "rms_norm_backward";
    let (tokens, width) = (x.rows(), x.cols());
    check::f32_shape(OP, "w", &w, 1, width)?;
    check::f32_shape(OP, "inverse_rms", &inverse_rms, 1, tokens)?;
    check::shape(OP, "dy", &dy, tokens, width)?;
    check::f32_shape(OP, "dx", &dx, tokens, width)?;
    if let Some(dw) = &dw {
        check::f32_shape(OP, "dw", dw, 1, width)?;
    }
    let mut partial = partial_sums(device, x, dw.is_some(), width)?;
    let bytes = check::bytes(&[&x, &w, &inverse_rms, &dy, &dx, &dx]);
    let work = check::work(OP, &x, 10.0 * x.len() as f64, bytes);
    let partial = partial.view_mut();
    device.launch(
        work,
        on!(
            cpu => kernel::rms_norm_backward(cpu, x, w, offset, inverse_rms, dy, dx, dw, partial),
            cuda => cuda::norm::rms_norm_backward(cuda, x, w, offset, inverse_rms, dy, dx, dw, partial)
        ),
    )?;
    Ok(())
}

/// `y = (x − mean) / sqrt(var + eps) · w + b` with the biased variance.
///
/// `x` `[T,D]` f32 or bf16, `w`, `b` `[1,D]` f32, `y` either type, `mean_inverse` `[T,2]` f32 (mean, 1/σ) is kept.
///
/// # Errors
/// If shapes or types do not fit.
pub fn layer_norm(
    device: &Device,
    x: View,
    w: View,
    b: View,
    eps: f32,
    y: ViewMut,
    mean_inverse: ViewMut,
) -> Result<()> {
    const OP: &str = "layer_norm";
    let (tokens, width) = (x.rows(), x.cols());
    check::f32_shape(OP, "w", &w, 1, width)?;
    check::f32_shape(OP, "b", &b, 1, width)?;
    check::shape(OP, "y", &y, tokens, width)?;
    check::f32_shape(OP, "mean_inverse", &mean_inverse, tokens, 2)?;
    let work = check::work(OP, &x, 8.0 * x.len() as f64, check::bytes(&[&x, &w, &b, &y, &mean_inverse]));
    device.launch(
        work,
        on!(
            cpu => kernel::layer_norm(cpu, x, w, b, eps, y, mean_inverse),
            cuda => cuda::norm::layer_norm(cuda, x, w, b, eps, y, mean_inverse)
        ),
    )?;
    Ok(())
}

/// `dx +=`, `dw +=`, `db +=` of [`layer_norm`]; all f32; weight gradients skipped if `None`.
///
/// # Errors
/// If shapes or types do not fit.
pub fn layer_norm_backward(
    device: &Device,
    x: View,
    w: View,
    mean_inverse: View,
    dy: View,
    dx: ViewMut,
    dw_db: Option<(ViewMut, ViewMut)>,
) -> Result<()> {
    const OP: &str = "layer_norm_backward";
    let (tokens, width) = (x.rows(), x.cols());
    check::f32_shape(OP, "w", &w, 1, width)?;
    check::f32_shape(OP, "mean_inverse", &mean_inverse, tokens, 2)?;
    check::shape(OP, "dy", &dy, tokens, width)?;
    check::f32_shape(OP, "dx", &dx, tokens, width)?;
    if let Some((dw, db)) = &dw_db {
        check::f32_shape(OP, "dw", dw, 1, width)?;
        check::f32_shape(OP, "db", db, 1, width)?;
    }
    let mut partial = partial_sums(device, x, dw_db.is_some(), 2 * width)?;
    let bytes = check::bytes(&[&x, &w, &mean_inverse, &dy, &dx, &dx]);
    let work = check::work(OP, &x, 14.0 * x.len() as f64, bytes);
    let partial = partial.view_mut();
    device.launch(
        work,
        on!(
            cpu => kernel::layer_norm_backward(cpu, x, w, mean_inverse, dy, dx, dw_db, partial),
            cuda => cuda::norm::layer_norm_backward(cuda, x, w, mean_inverse, dy, dx, dw_db, partial)
        ),
    )?;
    Ok(())
}
