//! Optimisers, fused over flat f32 buffers: one pass over memory, with the compute copy written at once.

use super::check;
use crate::{Device, KernelError, Result, View, ViewMut};

/// Decoupled weight decay Adam (arXiv 1711.05101), in the arithmetic order of `torch.optim.AdamW`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// 1-based step, for bias correction.
    pub step: u64,
}

/// RMSprop as `torch.optim.RMSprop` (alpha 0.99, eps 1e-8, no momentum, not centred, L2 weight decay).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsProp {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the squared gradient.
    pub alpha: f64,
    /// Added to the root.
    pub eps: f64,
    /// L2 penalty added to the gradient.
    pub weight_decay: f64,
}

/// One step on `master`, `m`, `v` (f32, all `[1,N]`). The gradient is `grad · grad_scale` (clipping and averaging).
/// `copy`, where given, receives the new weights in its type.
///
/// # Errors
/// If shapes or types do not fit, or an operand is not contiguous.
pub fn adamw(
    device: &Device,
    config: &AdamW,
    grad_scale: f32,
    grad: View,
    master: ViewMut,
    m: ViewMut,
    v: ViewMut,
    copy: Option<ViewMut>,
) -> Result<()> {
    const OP: &str = "adamw";
    check_flat(OP, &grad, &[("master", &master), ("m", &m), ("v", &v)], copy.as_ref())?;
    if config.step == 0 {
        return Err(KernelError::invalid(OP, "steps count from 1"));
    }
    match device {
        Device::Cpu(cpu) => cpu.adamw(config, grad_scale, grad, master, m, v, copy),
        Device::Meta(ledger) => {
            let moved = grad.num_bytes() + 6 * master.num_bytes() + copy.map_or(0, |c| c.num_bytes());
            ledger.record(OP, 14.0 * grad.len() as f64, moved as f64);
        }
    }
    Ok(())
}

/// One step on `master` and `v` (f32, both `[1,N]`); `grad_scale` and `copy` as in [`adamw`].
///
/// # Errors
/// If shapes or types do not fit, or an operand is not contiguous.
pub fn rmsprop(
    device: &Device,
    config: &RmsProp,
    grad_scale: f32,
    grad: View,
    master: ViewMut,
    v: ViewMut,
    copy: Option<ViewMut>,
) -> Result<()> {
    const OP: &str = "rmsprop";
    check_flat(OP, &grad, &[("master", &master), ("v", &v)], copy.as_ref())?;
    match device {
        Device::Cpu(cpu) => cpu.rmsprop(config, grad_scale, grad, master, v, copy),
        Device::Meta(ledger) => {
            let moved = grad.num_bytes() + 4 * master.num_bytes() + copy.map_or(0, |c| c.num_bytes());
            ledger.record(OP, 10.0 * grad.len() as f64, moved as f64);
        }
    }
    Ok(())
}

/// Σ x² in f64, in an order that does not depend on the number of threads. Infinite or NaN if an element is.
///
/// # Errors
/// If the type does not fit, or `x` is not contiguous.
pub fn sum_of_squares(device: &Device, x: View) -> Result<f64> {
    const OP: &str = "sum_of_squares";
    check::is_f32(OP, "x", &x)?;
    check::contiguous(OP, "x", x.is_contiguous())?;
    match device {
        Device::Cpu(cpu) => Ok(cpu.sum_of_squares(x)),
        Device::Meta(ledger) => {
            ledger.record(OP, 2.0 * x.len() as f64, x.num_bytes() as f64);
            Ok(0.0)
        }
    }
}

/// All operands are contiguous and of the gradient's shape; gradient and states are f32.
fn check_flat(
    op: &'static str,
    grad: &View,
    states: &[(&'static str, &ViewMut)],
    copy: Option<&ViewMut>,
) -> Result<()> {
    check::is_f32(op, "grad", grad)?;
    check::contiguous(op, "grad", grad.is_contiguous())?;
    for (name, state) in states {
        check::is_f32(op, name, *state)?;
        check::shape(op, name, *state, grad.rows(), grad.cols())?;
        check::contiguous(op, name, state.is_contiguous())?;
    }
    if let Some(copy) = copy {
        check::shape(op, "copy", copy, grad.rows(), grad.cols())?;
        check::contiguous(op, "copy", copy.is_contiguous())?;
    }
    Ok(())
}
