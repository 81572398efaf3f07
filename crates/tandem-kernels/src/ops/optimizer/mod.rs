//! Optimiser steps, fused over flat buffers: one pass over memory that also writes the compute
//! copy.

mod adamw;
mod lion;
mod muon;
mod rmsprop;
mod scaled;
mod schedule_free;
mod sgd;

use super::check;
use crate::cpu::vector::Vector;
use crate::device::launch;
use crate::numerics::exact::ExactView;
use crate::numerics::squares::{BlockSquares, SquareSum};
use crate::numerics::states::CodesMut;
use crate::{
    AdamMoment, Backend, DType, Device, KernelError, MemoryKind, OpCost, Result, StatesMut, StatesView,
    Tensor, View, ViewMut, cuda,
};

pub use adamw::{AdamW, adamw};
pub use lion::{Lion, lion};
pub use muon::{DecayedUpdate, MuonMomentum, decayed_update, muon_momentum};
pub use rmsprop::{RmsProp, rmsprop};
pub use scaled::scaled_gradient;
pub use schedule_free::{ScheduleFreeAdamW, schedule_free_adamw};
pub use sgd::{Momentum, Sgd, sgd};

/// A gradient `[1,N]` in either representation.
#[derive(Clone, Copy)]
pub enum Gradient<'a> {
    /// f32 `[1,N]`.
    F32(View<'a>),
    /// Fixed-point sums, read as the nearest f32.
    Exact(ExactView<'a>),
    /// f32 `[1,N]` on a CPU, read as the sums that these terms alone would make.
    Terms(View<'a>),
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
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(view) | Self::Terms(view) => view.len(),
            Self::Exact(view) => view.len(),
        }
    }

    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns elements `range`.
    #[must_use]
    pub fn range(self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::F32(view) => Self::F32(view.col_range(range)),
            Self::Exact(view) => Self::Exact(view.range(range)),
            Self::Terms(view) => Self::Terms(view.col_range(range)),
        }
    }

    fn num_bytes(&self) -> usize {
        match self {
            Self::F32(view) | Self::Terms(view) => view.num_bytes(),
            Self::Exact(view) => 8 * view.len(),
        }
    }

    /// Checks that an f32 gradient is contiguous.
    fn check(&self, op: &'static str, name: &'static str) -> Result<()> {
        match self {
            Self::F32(view) | Self::Terms(view) => {
                check::is_f32(op, name, view)?;
                check::contiguous(op, name, view.is_contiguous())
            }
            Self::Exact(_) => Ok(()),
        }
    }
}

/// An optimiser whose elements move by themselves: a weight by its gradient and its states alone.
///
/// A rule is a file here, beside its arithmetic in `cuda/cu/optimizer.cu`.
pub(crate) trait Rule: Sync {
    /// Name of the operation and of its CUDA kernels.
    const NAME: &'static str;
    /// Operations per element, without those of storage.
    const FLOPS: f64;
    /// Names and maps of the states; at most two.
    const STATES: &'static [(&'static str, AdamMoment)];

    /// Returns the numbers of this step, in the order of the CUDA kernel, rounded to f32 where torch
    /// rounds them.
    fn numbers(&self) -> Numbers;

    /// Moves weights `w` by gradients `g`, and their states. States that the rule has not are zeros.
    ///
    /// # Safety
    /// The CPU has the instructions of V.
    unsafe fn step<V: Vector>(numbers: &Numbers, g: V, w: V, states: [V; 2]) -> (V, [V; 2]);
}

/// Numbers of a step that all elements share; a rule leaves the last ones 0.
pub(crate) type Numbers = [f32; 9];

/// Returns the numbers of a step, rounded to f32, and 0 for those that a rule has not.
fn rounded<const N: usize>(numbers: [f64; N]) -> Numbers {
    std::array::from_fn(|index| numbers.get(index).map_or(0.0, |&number| number as f32))
}

/// Operands of an optimiser step beside its states; all contiguous, of N elements.
pub struct Update<'a> {
    /// The gradient before `grad_scale`.
    pub grad: Gradient<'a>,
    /// Factor on the gradient: clipping and averaging.
    pub grad_scale: f32,
    /// `[1,N]` f32.
    pub master: ViewMut<'a>,
    /// `[1,N]`, receives the new weights in its type.
    pub copy: Option<ViewMut<'a>>,
}

impl<'a> Update<'a> {
    /// Collects the operands.
    pub fn new(
        grad: impl Into<Gradient<'a>>,
        grad_scale: f32,
        master: ViewMut<'a>,
        copy: Option<ViewMut<'a>>,
    ) -> Self {
        Self { grad: grad.into(), grad_scale, master, copy }
    }

    /// Returns the cost of a step with `flops` operations per element and `state_bytes` of states.
    fn work(&self, op: &'static str, flops: f64, state_bytes: usize) -> OpCost {
        let Self { grad, master, copy, .. } = self;
        let moved = grad.num_bytes()
            + 2 * (master.num_bytes() + state_bytes)
            + copy.as_ref().map_or(0, ViewMut::num_bytes);
        check::work(op, master, flops * grad.len() as f64, moved as f64)
    }
}

/// Takes one step on the master weights and the states, in any form. The weights move by the states
/// before these are rounded.
///
/// The operations that call it are not generic: this kernel would be compiled in their callers' crates, which are
/// optimised less.
fn step<R: Rule>(device: &Device, rule: &R, update: Update, states: Vec<StatesMut<'_>>) -> Result<()> {
    let of = |(state, &(name, moment)): (_, &(&'static str, AdamMoment))| (name, state, moment);
    let named: Vec<_> = states.iter().zip(R::STATES).map(of).collect();
    check_flat(R::NAME, &update, &named)?;
    let work = update.work(R::NAME, R::FLOPS, states.iter().map(StatesMut::num_bytes).sum());
    let numbers = rule.numbers();
    launch!(device, work, {
        cpu => cpu.optimizer_step::<R>(&numbers, update, states),
        cuda => cuda::optimizer::step::<R>(cuda, &numbers, update, states)
    })
}

/// Elements whose squares a CPU thread or a GPU block sums at once.
pub const SQUARES_BLOCK: usize = 1 << 14;

/// Returns room for the squares of so many blocks. A device that computes nothing has none: plans may be of any size.
pub(super) fn blocks_of(device: &Device, count: usize) -> Vec<BlockSquares> {
    vec![BlockSquares::default(); if device.is_meta() { 0 } else { count }]
}

/// Computes Σ x² in f64, from a sum that does not depend on its order. The result is infinite or NaN if
/// an element is. Waits for a GPU.
pub fn sum_of_squares<'a>(device: &Device, x: impl Into<Gradient<'a>>) -> Result<f64> {
    Ok(block_squares(device, &[x.into()])?.value())
}

/// Computes Σ x² over all parts, as integers: ranks that hold any parts can add up theirs. Waits for a
/// GPU once.
pub fn block_squares(device: &Device, parts: &[Gradient]) -> Result<SquareSum> {
    const OP: &str = "block_squares";
    parts.iter().try_for_each(|x| x.check(OP, "x"))?;
    let num_blocks = parts.iter().map(|x| x.len().div_ceil(SQUARES_BLOCK)).sum();
    let mut blocks = blocks_of(device, num_blocks);
    let mut sums = match device.backend() {
        Backend::Cpu => None,
        // Four numbers of 64 bits per block, until the host reads them.
        Backend::Cuda => Some(device.alloc(MemoryKind::Scratch, 1, 8 * num_blocks, DType::F32)?),
    };
    let sums = sums.as_mut().map(Tensor::view_mut);
    let (len, bytes) = parts.iter().fold((0, 0), |(len, bytes), x| (len + x.len(), bytes + x.num_bytes()));
    let work = OpCost::new(OP, (1, len, DType::F32), 2.0 * len as f64, bytes as f64);
    let of_blocks = &mut blocks[..];
    launch!(device, work, {
        cpu => cpu.block_squares(parts, of_blocks),
        cuda => cuda::optimizer::block_squares(cuda, parts, sums, of_blocks)
    })?;
    Ok(SquareSum::of_blocks(&blocks))
}

/// Copies states as stored.
pub fn copy_states(device: &Device, src: StatesView, dst: StatesMut) -> Result<()> {
    const OP: &str = "copy_states";
    if src.len() != dst.len() {
        return Err(KernelError::invalid(
            OP,
            format!("{} states to copy, room for {}", src.len(), dst.len()),
        ));
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
            // Words of codes are only moved.
            super::cast(device, src_codes, dst_codes)?;
            super::cast(device, src_scales, dst_scales)
        }
        _ => Err(KernelError::invalid(OP, "states of one form into another")),
    }
}

/// Checks that all operands are contiguous, have the gradient's length, and that states are of the
/// expected moment.
fn check_flat(
    op: &'static str,
    update: &Update,
    states: &[(&'static str, &StatesMut, AdamMoment)],
) -> Result<()> {
    let Update { grad, master, copy, .. } = update;
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
    copy.as_ref().map_or(Ok(()), |copy| flat("copy", copy, None))
}

fn check_codes(op: &'static str, name: &str, codes: &CodesMut, moment: AdamMoment, len: usize) -> Result<()> {
    if codes.len() != len {
        return Err(KernelError::invalid(op, format!("{name} has {} elements, expected {len}", codes.len())));
    }
    if codes.moment() != moment {
        return Err(KernelError::invalid(op, format!("{name} has the states of another moment")));
    }
    Ok(())
}
