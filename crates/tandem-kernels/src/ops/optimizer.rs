//! Optimisers, fused over flat f32 buffers: one pass over memory, with the compute copy written at once.

use super::check;
use crate::exact::ExactView;
use crate::{Device, KernelError, Result, View, ViewMut};

/// A gradient as a row of numbers, in either form that it is summed in.
#[derive(Clone, Copy)]
pub enum Gradient<'a> {
    /// f32 `[1,N]`.
    F32(View<'a>),
    /// Fixed-point sums, read as the nearest f32.
    Exact(ExactView<'a>),
}

impl<'a> From<View<'a>> for Gradient<'a> {
    fn from(view: View<'a>) -> Self {
        Self::F32(view)
    }
}

impl<'a> From<ExactView<'a>> for Gradient<'a> {
    fn from(view: ExactView<'a>) -> Self {
        Self::Exact(view)
    }
}

impl<'a> Gradient<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(view) => view.len(),
            Self::Exact(view) => view.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements `range`.
    #[must_use]
    pub fn range(self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::F32(view) => Self::F32(view.col_range(range)),
            Self::Exact(view) => Self::Exact(view.range(range)),
        }
    }

    fn num_bytes(&self) -> usize {
        match self {
            Self::F32(view) => view.num_bytes(),
            Self::Exact(view) => 8 * view.len(),
        }
    }

    /// An f32 gradient must be one contiguous row.
    fn check(&self, op: &'static str, name: &'static str) -> Result<()> {
        match self {
            Self::F32(view) => {
                check::is_f32(op, name, view)?;
                check::contiguous(op, name, view.is_contiguous())
            }
            Self::Exact(_) => Ok(()),
        }
    }
}

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
pub fn adamw<'a>(
    device: &Device,
    config: &AdamW,
    grad_scale: f32,
    grad: impl Into<Gradient<'a>>,
    master: ViewMut,
    m: ViewMut,
    v: ViewMut,
    copy: Option<ViewMut>,
) -> Result<()> {
    const OP: &str = "adamw";
    let grad = grad.into();
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
pub fn rmsprop<'a>(
    device: &Device,
    config: &RmsProp,
    grad_scale: f32,
    grad: impl Into<Gradient<'a>>,
    master: ViewMut,
    v: ViewMut,
    copy: Option<ViewMut>,
) -> Result<()> {
    const OP: &str = "rmsprop";
    let grad = grad.into();
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

/// Elements of a block of [`block_squares`].
pub const SQUARES_BLOCK: usize = 1 << 14;

/// Σ x² in f64, in an order that does not depend on the number of threads. Infinite or NaN if an element is.
///
/// # Errors
/// If the type does not fit, or `x` is not contiguous.
pub fn sum_of_squares<'a>(device: &Device, x: impl Into<Gradient<'a>>) -> Result<f64> {
    let x = x.into();
    let mut blocks = vec![0.0; x.len().div_ceil(SQUARES_BLOCK)];
    block_squares(device, x, &mut blocks)?;
    Ok(blocks.iter().sum())
}

/// Σ x² in f64 over each block of [`SQUARES_BLOCK`] elements (the last may be shorter), so that ranks that hold some blocks
/// each can add them all up in one order.
///
/// # Errors
/// If the type does not fit, `x` is not contiguous, or `blocks` has another length.
pub fn block_squares<'a>(device: &Device, x: impl Into<Gradient<'a>>, blocks: &mut [f64]) -> Result<()> {
    const OP: &str = "block_squares";
    let x = x.into();
    x.check(OP, "x")?;
    let expected = x.len().div_ceil(SQUARES_BLOCK);
    if blocks.len() != expected {
        return Err(KernelError::invalid(OP, format!("room for {} blocks, not {expected}", blocks.len())));
    }
    match device {
        Device::Cpu(cpu) => cpu.block_squares(x, blocks),
        Device::Meta(ledger) => ledger.record(OP, 2.0 * x.len() as f64, x.num_bytes() as f64),
    }
    Ok(())
}

/// All operands are contiguous and of the gradient's shape; gradient and states are f32.
fn check_flat(
    op: &'static str,
    grad: &Gradient,
    states: &[(&'static str, &ViewMut)],
    copy: Option<&ViewMut>,
) -> Result<()> {
    grad.check(op, "grad")?;
    for (name, state) in states {
        check::is_f32(op, name, *state)?;
        check::shape(op, name, *state, 1, grad.len())?;
        check::contiguous(op, name, state.is_contiguous())?;
    }
    if let Some(copy) = copy {
        check::shape(op, "copy", copy, 1, grad.len())?;
        check::contiguous(op, "copy", copy.is_contiguous())?;
    }
    Ok(())
}
