//! RMSNorm and LayerNorm over rows, forward and backward.

use crate::cpu::norm as kernel;
use crate::device::launch;
use crate::ops::check;
use crate::{Backend, DType, Device, Extent, MemoryKind, Result, Tensor, View, ViewMut, cuda};

/// Rows per partial sum of the weight gradient on a CPU. A constant, so that the order of the sum
/// does not depend on the number of threads.
pub(crate) const BLOCK_ROWS: usize = 32;

/// Allocates one row of `width` partial sums per block of rows of `x`; no rows unless `wanted`.
fn partial_sums(device: &Device, x: &View, wanted: bool, width: usize) -> Result<Tensor> {
    let blocks = |rows: usize| match device.backend() {
        _ if !wanted => 0,
        Backend::Cpu => rows.div_ceil(BLOCK_ROWS),
        Backend::Cuda => cuda::norm::blocks(rows, x.cols()),
    };
    let blocks = Extent::new(blocks(x.rows()), blocks(x.extent().room()));
    device.alloc_in(MemoryKind::Scratch, blocks, Extent::exact(width), DType::F32)
}

/// Operands of [`rms_norm`].
pub struct RmsNorm<'a> {
    /// `[T,D]`, f32 or bf16.
    pub x: View<'a>,
    /// `[1,D]` f32.
    pub w: View<'a>,
    /// Added to `w`: 0, or 1 for Gemma.
    pub offset: f32,
    /// Added to the mean square.
    pub eps: f32,
    /// `[T,D]`, f32 or bf16.
    pub y: ViewMut<'a>,
    /// `[1,T]` f32, saved for backward.
    pub inverse_rms: ViewMut<'a>,
}

/// Operands of [`rms_norm_backward`]. `x`, `w`, `offset` and `inverse_rms` are those of the forward
/// pass.
pub struct RmsNormBackward<'a> {
    /// `[T,D]`, f32 or bf16.
    pub x: View<'a>,
    /// `[1,D]` f32.
    pub w: View<'a>,
    /// Added to `w`.
    pub offset: f32,
    /// `[1,T]` f32.
    pub inverse_rms: View<'a>,
    /// `[T,D]`, f32 or bf16.
    pub dy: View<'a>,
    /// `[T,D]` f32, added to.
    pub dx: ViewMut<'a>,
    /// `[1,D]` f32, added to; skipped if `None`.
    pub dw: Option<ViewMut<'a>>,
}

/// Operands of [`layer_norm`].
pub struct LayerNorm<'a> {
    /// `[T,D]`, f32 or bf16.
    pub x: View<'a>,
    /// `[1,D]` f32.
    pub w: View<'a>,
    /// `[1,D]` f32; zeros if `None`.
    pub b: Option<View<'a>>,
    /// Added to the variance.
    pub eps: f32,
    /// `[T,D]`, f32 or bf16.
    pub y: ViewMut<'a>,
    /// `[T,2]` f32 (mean, 1/σ), saved for backward.
    pub mean_inverse: ViewMut<'a>,
}

/// Operands of [`layer_norm_backward`]. `x`, `w` and `mean_inverse` are those of the forward pass.
pub struct LayerNormBackward<'a> {
    /// `[T,D]`, f32 or bf16.
    pub x: View<'a>,
    /// `[1,D]` f32.
    pub w: View<'a>,
    /// `[T,2]` f32.
    pub mean_inverse: View<'a>,
    /// `[T,D]`, f32 or bf16.
    pub dy: View<'a>,
    /// `[T,D]` f32, added to.
    pub dx: ViewMut<'a>,
    /// `[1,D]` f32 each, added to; skipped if `None`. The second is that of the bias, if there is one.
    pub dw_db: Option<(ViewMut<'a>, Option<ViewMut<'a>>)>,
}

/// Computes `y = x / rms(x) · (w + offset)` with `rms(x) = sqrt(mean(x²) + eps)`.
pub fn rms_norm(device: &Device, call: RmsNorm) -> Result<()> {
    const OP: &str = "rms_norm";
    let RmsNorm { x, w, y, inverse_rms, .. } = &call;
    let (tokens, width) = (x.rows(), x.cols());
    check::f32_shape(OP, "w", w, 1, width)?;
    check::shape(OP, "y", y, tokens, width)?;
    check::f32_shape(OP, "inverse_rms", inverse_rms, 1, tokens)?;
    let work = check::work(OP, x, 4.0 * x.len() as f64, check::bytes(&[x, w, y, inverse_rms]));
    launch!(device, work, {
        cpu => kernel::rms_norm(cpu, call),
        cuda => cuda::norm::rms_norm(cuda, call)
    })
}

/// Computes `dx += ∂y/∂x · dy` and `dw += Σ_t dy · x / rms` of [`rms_norm`].
pub fn rms_norm_backward(device: &Device, call: RmsNormBackward) -> Result<()> {
    const OP: &str = "rms_norm_backward";
    let RmsNormBackward { x, w, inverse_rms, dy, dx, dw, .. } = &call;
    let (tokens, width) = (x.rows(), x.cols());
    check::f32_shape(OP, "w", w, 1, width)?;
    check::f32_shape(OP, "inverse_rms", inverse_rms, 1, tokens)?;
    check::shape(OP, "dy", dy, tokens, width)?;
    check::f32_shape(OP, "dx", dx, tokens, width)?;
    if let Some(dw) = dw {
        check::f32_shape(OP, "dw", dw, 1, width)?;
    }
    let mut partial = partial_sums(device, x, dw.is_some(), width)?;
    let bytes = check::bytes(&[x, w, inverse_rms, dy, dx, dx]);
    let work = check::work(OP, x, 10.0 * x.len() as f64, bytes);
    let partial = partial.view_mut();
    launch!(device, work, {
        cpu => kernel::rms_norm_backward(cpu, call, partial),
        cuda => cuda::norm::rms_norm_backward(cuda, call, partial)
    })
}

/// Computes `y = (x − mean) / sqrt(var + eps) · w + b` with the biased variance.
pub fn layer_norm(device: &Device, call: LayerNorm) -> Result<()> {
    const OP: &str = "layer_norm";
    let LayerNorm { x, w, b, y, mean_inverse, .. } = &call;
    let (tokens, width) = (x.rows(), x.cols());
    check::f32_shape(OP, "w", w, 1, width)?;
    if let Some(b) = b {
        check::f32_shape(OP, "b", b, 1, width)?;
    }
    check::shape(OP, "y", y, tokens, width)?;
    check::f32_shape(OP, "mean_inverse", mean_inverse, tokens, 2)?;
    let work = check::work(OP, x, 8.0 * x.len() as f64, check::bytes(&[x, w, y, mean_inverse]));
    launch!(device, work, {
        cpu => kernel::layer_norm(cpu, call),
        cuda => cuda::norm::layer_norm(cuda, call)
    })
}

/// Adds the gradients of [`layer_norm`] to `dx`, `dw` and `db`.
pub fn layer_norm_backward(device: &Device, call: LayerNormBackward) -> Result<()> {
    const OP: &str = "layer_norm_backward";
    let LayerNormBackward { x, w, mean_inverse, dy, dx, dw_db } = &call;
    let (tokens, width) = (x.rows(), x.cols());
    check::f32_shape(OP, "w", w, 1, width)?;
    check::f32_shape(OP, "mean_inverse", mean_inverse, tokens, 2)?;
    check::shape(OP, "dy", dy, tokens, width)?;
    check::f32_shape(OP, "dx", dx, tokens, width)?;
    if let Some((dw, db)) = dw_db {
        check::f32_shape(OP, "dw", dw, 1, width)?;
        if let Some(db) = db {
            check::f32_shape(OP, "db", db, 1, width)?;
        }
    }
    let mut partial = partial_sums(device, x, dw_db.is_some(), 2 * width)?;
    let bytes = check::bytes(&[x, w, mean_inverse, dy, dx, dx]);
    let work = check::work(OP, x, 14.0 * x.len() as f64, bytes);
    let partial = partial.view_mut();
    launch!(device, work, {
        cpu => kernel::layer_norm_backward(cpu, call, partial),
        cuda => cuda::norm::layer_norm_backward(cuda, call, partial)
    })
}
