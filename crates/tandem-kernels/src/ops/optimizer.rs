//! Optimisers, fused over flat f32 buffers: one pass over memory, with the compute copy written at once.

use crate::{Device, Result, View, ViewMut};

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
/// If shapes or types do not fit.
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
    unimplemented!()
}

/// One step on `master` and `v`.
///
/// # Errors
/// If shapes or types do not fit.
pub fn rmsprop(
    device: &Device,
    config: &RmsProp,
    grad_scale: f32,
    grad: View,
    master: ViewMut,
    v: ViewMut,
    copy: Option<ViewMut>,
) -> Result<()> {
    unimplemented!()
}

/// Σ x² in f64, in an order that does not depend on the number of threads. Infinite or NaN if an element is.
///
/// # Errors
/// If the type does not fit.
pub fn sum_of_squares(device: &Device, x: View) -> Result<f64> {
    unimplemented!()
}
