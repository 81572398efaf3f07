//! Optimiser steps and sums of squares: one warp per 256 elements, a block of 8-bit states.

use super::driver::{Arg, Grid};
use super::{Cuda, args, driver, source};
use crate::numerics::squares::BlockSquares;
use crate::numerics::states::{RowColumns, StochasticRounding};
use crate::ops::optimizer::{Numbers, Rule};
use crate::ops::{Gradient, SQUARES_BLOCK, Update};
use crate::{DType, KernelError, Result, STATE_BLOCK, StatesMut, ViewMut};

pub(super) static SOURCE: driver::Source = source!("optimizer.cu", not fused);

/// Threads of a block, as in `optimizer.cu`.
const THREADS: u32 = 256;

/// Elements per block of threads: one block of states per warp.
const BLOCK: usize = THREADS as usize / 32 * STATE_BLOCK;

/// Kernels of steps: a rule and the formats of its states.
const KERNELS: [&str; 27] = [
    "adamw_f32_f32",
    "adamw_f32_bf16",
    "adamw_f32_8bit",
    "adamw_bf16_f32",
    "adamw_bf16_bf16",
    "adamw_bf16_8bit",
    "adamw_8bit_f32",
    "adamw_8bit_bf16",
    "adamw_8bit_8bit",
    "rmsprop_f32",
    "rmsprop_bf16",
    "rmsprop_8bit",
    "lion_f32",
    "lion_bf16",
    "lion_8bit",
    "schedule_free_adamw_f32_f32",
    "schedule_free_adamw_f32_bf16",
    "schedule_free_adamw_f32_8bit",
    "muon_momentum_f32",
    "muon_momentum_bf16",
    "muon_momentum_8bit",
    "decayed_update",
    "scaled_gradient",
    "sgd",
    "momentum_f32",
    "momentum_bf16",
    "momentum_8bit",
];

/// Takes one step of a rule on all elements. The kernel is named after the rule and the formats of its
/// states.
pub(crate) fn step<R: Rule>(
    cuda: &Cuda,
    numbers: &Numbers,
    update: Update,
    states: Vec<StatesMut>,
) -> Result<()> {
    let Update { grad, grad_scale, master, copy } = update;
    let (len, mut name) = (grad.len(), R::NAME.to_owned());
    let mut args = [&gradient(grad)[..], args![grad_scale], &weights(&master, copy)].concat();
    for states in states {
        let (form, stored) = kept(states);
        name = format!("{name}_{form}");
        args.extend(stored);
    }
    args.extend(numbers.map(Arg::from));
    args.push(len.into());
    let kernel = KERNELS.into_iter().find(|kernel| *kernel == name);
    let kernel = kernel.ok_or_else(|| KernelError::invalid(R::NAME, format!("there is no kernel {name}")))?;
    // SAFETY: the operands are those of the kernel, and of one length.
    unsafe { cuda.launch(&SOURCE, kernel, grid(len), &args) }
}

/// Computes Σ x² per block; `sums` has room for the numbers of each. Waits.
pub(crate) fn block_squares(
    cuda: &Cuda,
    parts: &[Gradient],
    sums: Option<ViewMut>,
    blocks: &mut [BlockSquares],
) -> Result<()> {
    let Some(sums) = sums.filter(|_| !blocks.is_empty()) else { return Ok(()) };
    let mut at = sums.address();
    for &x in parts.iter().filter(|x| !x.is_empty()) {
        let (count, [f32s, exact, are_terms]) = (x.len().div_ceil(SQUARES_BLOCK), gradient(x));
        let args = [f32s, exact, are_terms, Arg::address(at), x.len().into()];
        // SAFETY: the operands are those of the kernel; there are four numbers for each of its blocks,
        // which are those of the host.
        unsafe { cuda.launch(&SOURCE, "block_squares", Grid::new(count, THREADS), &args)? };
        at += (count * size_of::<BlockSquares>()) as u64;
    }
    let mut numbers = vec![0i64; 4 * blocks.len()];
    // SAFETY: there are four numbers for each block.
    unsafe { cuda.read(sums.address(), &mut numbers)? };
    for (block, numbers) in blocks.iter_mut().zip(numbers.as_chunks::<4>().0) {
        let [a, b, c, large] = *numbers;
        *block = BlockSquares { parts: [a, b, c], large: f64::from_bits(large.cast_unsigned()) };
    }
    Ok(())
}

fn grid(len: usize) -> Grid {
    Grid::new(len.div_ceil(BLOCK), THREADS)
}

/// Returns the pointer of one representation, null for the other, and whether f32 numbers are terms.
fn gradient(grad: Gradient) -> [Arg; 3] {
    match grad {
        Gradient::F32(view) => [view.into(), Arg::address(0), false.into()],
        Gradient::Exact(sums) => [Arg::address(0), sums.into(), false.into()],
        Gradient::Terms(view) => [view.into(), Arg::address(0), true.into()],
    }
}

/// Returns the master weights, and the copy in f32 or bf16.
fn weights(master: &ViewMut, copy: Option<ViewMut>) -> [Arg; 3] {
    let of = |dtype| copy.as_ref().filter(|copy| copy.dtype() == dtype).into();
    [master.into(), of(DType::F32), of(DType::Bf16)]
}

/// Returns the name of the states' format; values, scales, and key, index and columns of stochastic
/// rounding.
fn kept(states: StatesMut) -> (&'static str, [Arg; 7]) {
    let (none, zero) = (Arg::address(0), || Arg::from(0u32));
    match states {
        StatesMut::F32(view) => ("f32", [(&view).into(), none, zero(), zero(), zero(), zero(), zero()]),
        StatesMut::Bf16(view, StochasticRounding { key, first, columns }) => {
            let RowColumns { width, stride, skipped } = columns;
            let [key, first, width, stride, skipped] = [key, first, width, stride, skipped].map(Arg::from);
            ("bf16", [(&view).into(), none, key, first, width, stride, skipped])
        }
        StatesMut::EightBit(codes) => {
            let (codes, scales) = codes.into_tensors();
            ("8bit", [(&codes).into(), (&scales).into(), zero(), zero(), zero(), zero(), zero()])
        }
    }
}
