//! The linear layer: `y = x wᵀ + b + r`, its gradient to the input and to the weights.
//!
//! Weights are `[out, in]` as in HF folders. Accumulation is f32 whatever the operand types.
//! The bits of the result do not depend on the number of threads.

use crate::{Device, Result, View, ViewMut};

/// `y[T,N] = x[T,K] · w[N,K]ᵀ (+ bias[1,N]) (+ residual[T,N])`.
///
/// `x` and `w` share one type (f32 or bf16); `bias` and `residual` are f32; `y` is either type.
///
/// # Errors
/// If shapes or types do not fit.
pub fn linear(
    device: &Device,
    x: View,
    w: View,
    bias: Option<View>,
    residual: Option<View>,
    y: ViewMut,
) -> Result<()> {
    unimplemented!()
}

/// `dx[T,K] = dy[T,N] · w[N,K]`, or `+=` if `accumulate`.
///
/// `dy` and `w` share one type; `dx` is either type (f32 if `accumulate`).
///
/// # Errors
/// If shapes or types do not fit.
pub fn linear_backward_input(
    device: &Device,
    dy: View,
    w: View,
    dx: ViewMut,
    accumulate: bool,
) -> Result<()> {
    unimplemented!()
}

/// `dw[N,K] = dy[T,N]ᵀ · x[T,K]`, or `+=` if `accumulate`. `dw` is f32; `dy` and `x` share one type.
///
/// # Errors
/// If shapes or types do not fit.
pub fn linear_backward_weight(
    device: &Device,
    dy: View,
    x: View,
    dw: ViewMut,
    accumulate: bool,
) -> Result<()> {
    unimplemented!()
}

/// `db[1,N] += Σ_t dy[t,N]`, in an order that does not depend on the number of threads. `db` is f32.
///
/// # Errors
/// If shapes or types do not fit.
pub fn bias_backward(device: &Device, dy: View, db: ViewMut) -> Result<()> {
    unimplemented!()
}
