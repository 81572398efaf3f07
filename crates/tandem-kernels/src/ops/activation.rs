//! Feed-forward activations, plain and gated.

use crate::{Device, Result, View, ViewMut};

/// The function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
    /// `x · Φ(x)` with the error function.
    Gelu,
    /// The tanh approximation of GELU (`gelu_new`, `gelu_pytorch_tanh`).
    GeluTanh,
    /// `max(x, 0)`.
    Relu,
}

/// `h[T,F] = f(gu[:, ..F]) · gu[:, F..]`: gate first, up second. `gu` `[T,2F]` and `h` share one type.
///
/// # Errors
/// If shapes or types do not fit.
pub fn gated(device: &Device, function: Activation, gu: View, h: ViewMut) -> Result<()> {
    unimplemented!()
}

/// `dgu[T,2F]` of [`gated`] (overwritten).
///
/// # Errors
/// If shapes or types do not fit.
pub fn gated_backward(device: &Device, function: Activation, gu: View, dh: View, dgu: ViewMut) -> Result<()> {
    unimplemented!()
}

/// `h = f(u)`.
///
/// # Errors
/// If shapes or types do not fit.
pub fn activate(device: &Device, function: Activation, u: View, h: ViewMut) -> Result<()> {
    unimplemented!()
}

/// `du = f'(u) · dh` (overwritten).
///
/// # Errors
/// If shapes or types do not fit.
pub fn activate_backward(
    device: &Device,
    function: Activation,
    u: View,
    dh: View,
    du: ViewMut,
) -> Result<()> {
    unimplemented!()
}
