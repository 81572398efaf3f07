//! RMSNorm and LayerNorm over rows, forward and backward.

use crate::{Device, Result, View, ViewMut};

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
    unimplemented!()
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
    unimplemented!()
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
    unimplemented!()
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
    unimplemented!()
}
