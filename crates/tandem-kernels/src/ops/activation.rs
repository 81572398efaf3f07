//! Feed-forward activations, plain and gated.

use crate::cpu::activation as kernel;
use crate::device::launch;
use crate::ops::check;
use crate::{Device, Result, View, ViewMut, cuda};

/// Approximate flops of one activation or its derivative.
const FLOPS: f64 = 10.0;

/// Activation function.
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
    /// `max(x, 0)²` (`relu2`).
    ReluSquared,
}

/// Computes `h[T,F] = f(gu[:, ..F]) · gu[:, F..]`: gate first, up second. `gu` `[T,2F]` and `h`
/// share one type.
pub fn gated(device: &Device, function: Activation, gu: View, h: ViewMut) -> Result<()> {
    const OP: &str = "gated";
    let (tokens, width) = (h.rows(), h.cols());
    check::shape(OP, "gu", &gu, tokens, 2 * width)?;
    check::same_type(OP, "h", &h, &gu)?;
    let work = check::work(OP, &h, FLOPS * h.len() as f64, check::bytes(&[&gu, &h]));
    launch!(device, work, {
        cpu => kernel::gated(cpu, function, gu, h),
        cuda => cuda::activation::gated(cuda, function, gu, h)
    })
}

/// Overwrites `dgu[T,2F]` with the gradient of [`gated`].
pub fn gated_backward(device: &Device, function: Activation, gu: View, dh: View, dgu: ViewMut) -> Result<()> {
    const OP: &str = "gated_backward";
    let (tokens, width) = (dh.rows(), dh.cols());
    check::shape(OP, "gu", &gu, tokens, 2 * width)?;
    check::shape(OP, "dgu", &dgu, tokens, 2 * width)?;
    check::same_type(OP, "dh", &dh, &gu)?;
    check::same_type(OP, "dgu", &dgu, &gu)?;
    let work = check::work(OP, &dh, 2.0 * FLOPS * dh.len() as f64, check::bytes(&[&gu, &dh, &dgu]));
    launch!(device, work, {
        cpu => kernel::gated_backward(cpu, function, gu, dh, dgu),
        cuda => cuda::activation::gated_backward(cuda, function, gu, dh, dgu)
    })
}

/// Computes `h = f(u)`.
pub fn activate(device: &Device, function: Activation, u: View, h: ViewMut) -> Result<()> {
    const OP: &str = "activate";
    check::shape(OP, "h", &h, u.rows(), u.cols())?;
    check::same_type(OP, "h", &h, &u)?;
    let work = check::work(OP, &u, FLOPS * u.len() as f64, check::bytes(&[&u, &h]));
    launch!(device, work, {
        cpu => kernel::activate(cpu, function, u, h),
        cuda => cuda::activation::activate(cuda, function, u, h)
    })
}

/// Computes `du = f'(u) · dh`; `du` is overwritten.
pub fn activate_backward(
    device: &Device,
    function: Activation,
    u: View,
    dh: View,
    du: ViewMut,
) -> Result<()> {
    const OP: &str = "activate_backward";
    check::shape(OP, "dh", &dh, u.rows(), u.cols())?;
    check::shape(OP, "du", &du, u.rows(), u.cols())?;
    check::same_type(OP, "dh", &dh, &u)?;
    check::same_type(OP, "du", &du, &u)?;
    let work = check::work(OP, &u, FLOPS * u.len() as f64, check::bytes(&[&u, &dh, &du]));
    launch!(device, work, {
        cpu => kernel::activate_backward(cpu, function, u, dh, du),
        cuda => cuda::activation::activate_backward(cuda, function, u, dh, du)
    })
}
