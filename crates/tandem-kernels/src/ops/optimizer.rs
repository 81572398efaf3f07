//! Optimisers, fused over flat buffers: one pass over memory, with the compute copy written at once.

use super::check;
use crate::device::on;
use crate::numerics::exact::ExactView;
use crate::numerics::states::CodesMut;
use crate::{
    Backend, DType, Device, KernelError, Kind, Moment, Result, StatesMut, StatesView, Tensor, View, ViewMut,
    Work, cuda,
};

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

/// One step on `master` (f32 `[1,N]`) and the states `m` and `v`, in any form. The gradient is `grad · grad_scale` (clipping and
/// averaging). `copy`, where given, receives the new weights in its type. The weights move by the states as they are before
/// these are rounded.
///
/// # Errors
/// If shapes or types do not fit, or an operand is not contiguous.
pub fn adamw<'a>(
    device: &Device,
    config: &AdamW,
    grad_scale: f32,
    grad: impl Into<Gradient<'a>>,
    master: ViewMut,
    m: impl Into<StatesMut<'a>>,
    v: impl Into<StatesMut<'a>>,
    copy: Option<ViewMut>,
) -> Result<()> {
    const OP: &str = "adamw";
    let (grad, m, v) = (grad.into(), m.into(), v.into());
    let states = [("m", &m, Moment::First), ("v", &v, Moment::Second)];
    check_flat(OP, &grad, &master, &states, copy.as_ref())?;
    if config.step == 0 {
        return Err(KernelError::invalid(OP, "steps count from 1"));
    }
    let kept = master.num_bytes() + m.num_bytes() + v.num_bytes();
    let moved = grad.num_bytes() + 2 * kept + copy.as_ref().map_or(0, ViewMut::num_bytes);
    let work = check::work(OP, &master, 14.0 * grad.len() as f64, moved as f64);
    device.launch(
        work,
        on!(
            cpu => cpu.adamw(config, grad_scale, grad, master, m, v, copy),
            cuda => cuda::optimizer::adamw(cuda, config, grad_scale, grad, master, m, v, copy)
        ),
    )?;
    Ok(())
}

/// One step on `master` and `v`; they, `grad_scale` and `copy` as in [`adamw`].
///
/// # Errors
/// If shapes or types do not fit, or an operand is not contiguous.
pub fn rmsprop<'a>(
    device: &Device,
    config: &RmsProp,
    grad_scale: f32,
    grad: impl Into<Gradient<'a>>,
    master: ViewMut,
    v: impl Into<StatesMut<'a>>,
    copy: Option<ViewMut>,
) -> Result<()> {
    const OP: &str = "rmsprop";
    let (grad, v) = (grad.into(), v.into());
    check_flat(OP, &grad, &master, &[("v", &v, Moment::Second)], copy.as_ref())?;
    let kept = master.num_bytes() + v.num_bytes();
    let moved = grad.num_bytes() + 2 * kept + copy.as_ref().map_or(0, ViewMut::num_bytes);
    let work = check::work(OP, &master, 10.0 * grad.len() as f64, moved as f64);
    device.launch(
        work,
        on!(
            cpu => cpu.rmsprop(config, grad_scale, grad, master, v, copy),
            cuda => cuda::optimizer::rmsprop(cuda, config, grad_scale, grad, master, v, copy)
        ),
    )?;
    Ok(())
}

/// Elements of a block of [`block_squares`].
pub const SQUARES_BLOCK: usize = 1 << 14;

/// Σ x² in f64, in an order that does not depend on the number of threads. Infinite or NaN if an element is. Waits for a GPU.
///
/// # Errors
/// If the type does not fit, or `x` is not contiguous.
pub fn sum_of_squares<'a>(device: &Device, x: impl Into<Gradient<'a>>) -> Result<f64> {
    let x = x.into();
    let mut blocks = vec![0.0; x.len().div_ceil(SQUARES_BLOCK)];
    block_squares(device, &[x], &mut blocks)?;
    Ok(blocks.iter().sum())
}

/// Σ x² in f64 over each block of [`SQUARES_BLOCK`] elements of each of `parts` (the last of a part may be shorter), one part's
/// after the other's: so that ranks that hold some blocks each can add them all up in one order. Waits for a GPU, once.
///
/// # Errors
/// If a type does not fit, a part is not contiguous, or `blocks` has another length.
pub fn block_squares(device: &Device, parts: &[Gradient], blocks: &mut [f64]) -> Result<()> {
    const OP: &str = "block_squares";
    parts.iter().try_for_each(|x| x.check(OP, "x"))?;
    let expected: usize = parts.iter().map(|x| x.len().div_ceil(SQUARES_BLOCK)).sum();
    if blocks.len() != expected {
        return Err(KernelError::invalid(OP, format!("room for {} blocks, not {expected}", blocks.len())));
    }
    let mut sums = match device.backend() {
        Backend::Cpu => None,
        // The f64 of each block, until they are on the host.
        Backend::Cuda => Some(device.alloc(Kind::Scratch, 1, 2 * blocks.len(), DType::F32)?),
    };
    let sums = sums.as_mut().map(Tensor::view_mut);
    let (len, bytes) = parts.iter().fold((0, 0), |(len, bytes), x| (len + x.len(), bytes + x.num_bytes()));
    let work = Work::new(OP, (1, len, DType::F32), 2.0 * len as f64, bytes as f64);
    device.launch(
        work,
        on!(
            cpu => cpu.block_squares(parts, blocks),
            cuda => cuda::optimizer::block_squares(cuda, parts, sums, blocks)
        ),
    )?;
    Ok(())
}

/// Copies states as they are kept.
///
/// # Errors
/// If form or length differ.
pub fn copy_states(device: &Device, src: StatesView, dst: StatesMut) -> Result<()> {
    const OP: &str = "copy_states";
    if src.len() != dst.len() {
        return Err(KernelError::invalid(OP, format!("{} states into room for {}", src.len(), dst.len())));
    }
    match (src, dst) {
        (StatesView::F32(src), StatesMut::F32(dst)) | (StatesView::Bf16(src), StatesMut::Bf16(dst, _)) => {
            check::same_type(OP, "dst", &dst, &src)?;
            super::cast(device, src, dst)
        }
        (StatesView::EightBit(src), StatesMut::EightBit(dst)) => {
            let Some((src_codes, src_scales)) = src.tensors().filter(|_| src.moment() == dst.moment()) else {
                return Err(KernelError::invalid(OP, "blocks begin elsewhere, or are of another moment"));
            };
            let (dst_codes, dst_scales) = dst.into_tensors();
            // Words that hold codes are moved, not computed with.
            super::cast(device, src_codes, dst_codes)?;
            super::cast(device, src_scales, dst_scales)
        }
        _ => Err(KernelError::invalid(OP, "states of one form into another")),
    }
}

/// All operands are contiguous and of the gradient's shape, and states are of the moment that they are taken for.
fn check_flat(
    op: &'static str,
    grad: &Gradient,
    master: &ViewMut,
    states: &[(&'static str, &StatesMut, Moment)],
    copy: Option<&ViewMut>,
) -> Result<()> {
    grad.check(op, "grad")?;
    let flat = |name, view: &ViewMut, dtype: Option<DType>| {
        if dtype == Some(DType::F32) {
            check::is_f32(op, name, view)?;
        }
        check::shape(op, name, view, 1, grad.len())?;
        check::contiguous(op, name, view.is_contiguous())
    };
    flat("master", master, Some(DType::F32))?;
    for (name, state, moment) in states {
        match state {
            StatesMut::F32(view) => flat(name, view, Some(DType::F32))?,
            StatesMut::Bf16(view, _) => flat(name, view, None)?,
            StatesMut::EightBit(codes) => check_codes(op, name, codes, *moment, grad.len())?,
        }
    }
    copy.map_or(Ok(()), |copy| flat("copy", copy, None))
}

fn check_codes(op: &'static str, name: &str, codes: &CodesMut, moment: Moment, len: usize) -> Result<()> {
    if codes.len() != len {
        return Err(KernelError::invalid(op, format!("{name} has {} elements, expected {len}", codes.len())));
    }
    if codes.moment() != moment {
        return Err(KernelError::invalid(op, format!("{name} is kept as another moment")));
    }
    Ok(())
}
