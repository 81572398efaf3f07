//! Optimiser steps over flat buffers: one pass over memory, with the compute copy written at once.

use std::ops::Range;

use super::rows::RowsMut;
use super::{Cpu, Isa, scratch};
use crate::ops::{AdamW, RmsProp};
use crate::{DType, View, ViewMut, bf16};

/// Elements per block. The sum of squares adds up blocks in order, so this is part of its definition.
const BLOCK: usize = 1 << 14;

/// Elements per chunk of a block: the copy of the new weights is made while they are in the first-level cache.
const CHUNK: usize = 1 << 10;

impl Cpu {
    pub(crate) fn adamw(
        &self,
        config: &AdamW,
        grad_scale: f32,
        grad: View,
        master: ViewMut,
        m: ViewMut,
        v: ViewMut,
        copy: Option<ViewMut>,
    ) {
        let step = AdamStep::new(config, grad_scale);
        let fused = self.fuses_multiply_add();
        let grad = grad.as_slice::<f32>();
        let [master, m, v] = [master, m, v].map(flat);
        let copy = Copy::new(copy);
        self.for_chunks(grad.len(), |range| {
            let grad = &grad[range.clone()];
            // SAFETY: chunks are disjoint.
            let [master, m, v] = unsafe { [&master, &m, &v].map(|x| x.part(0, range.start, range.len())) };
            // Two loops, so that each is compiled for its case.
            if fused {
                step.run::<true>(grad, master, m, v);
            } else {
                step.run::<false>(grad, master, m, v);
            }
            copy.write(range, master);
        });
    }

    pub(crate) fn rmsprop(
        &self,
        config: &RmsProp,
        grad_scale: f32,
        grad: View,
        master: ViewMut,
        v: ViewMut,
        copy: Option<ViewMut>,
    ) {
        let step = RmsStep::new(config, grad_scale);
        let fused = self.fuses_multiply_add();
        let grad = grad.as_slice::<f32>();
        let [master, v] = [master, v].map(flat);
        let copy = Copy::new(copy);
        self.for_chunks(grad.len(), |range| {
            let grad = &grad[range.clone()];
            // SAFETY: chunks are disjoint.
            let [master, v] = unsafe { [&master, &v].map(|x| x.part(0, range.start, range.len())) };
            if fused {
                step.run::<true>(grad, master, v);
            } else {
                step.run::<false>(grad, master, v);
            }
            copy.write(range, master);
        });
    }

    pub(crate) fn sum_of_squares(&self, x: View) -> f64 {
        /// Independent sums, so that the loop becomes vector code: 8 vectors of 8.
        const LANES: usize = 64;
        let x = x.as_slice::<f32>();
        let num_blocks = x.len().div_ceil(BLOCK);
        scratch::with_f64(num_blocks, |partial| {
            let partial = RowsMut::from_slice(partial);
            self.parallel_ranges(x.len(), BLOCK, |block, range| {
                let mut sums = [0.0f64; LANES];
                let (whole, rest) = x[range].as_chunks::<LANES>();
                for chunk in whole {
                    for (sum, x) in sums.iter_mut().zip(chunk) {
                        *sum += f64::from(*x) * f64::from(*x);
                    }
                }
                for (sum, x) in sums.iter_mut().zip(rest) {
                    *sum += f64::from(*x) * f64::from(*x);
                }
                // SAFETY: each block writes its own element.
                unsafe { partial.part(0, block, 1)[0] = sums.iter().sum() };
            });
            // SAFETY: all blocks have finished.
            unsafe { partial.row(0) }.iter().sum()
        })
    }

    /// Whether a multiply-add with one rounding is an instruction, not a slow library call.
    fn fuses_multiply_add(&self) -> bool {
        self.isa() != Isa::Portable || cfg!(target_arch = "aarch64")
    }

    fn for_chunks(&self, len: usize, chunk: impl Fn(Range<usize>) + Sync) {
        self.parallel_ranges(len, BLOCK, |_, block| {
            for start in block.clone().step_by(CHUNK) {
                chunk(start..block.end.min(start + CHUNK));
            }
        });
    }
}

fn flat(x: ViewMut<'_>) -> RowsMut<'_, f32> {
    let len = x.len();
    RowsMut::new(x.reshape(1, len))
}

/// Where the new weights are copied to.
enum Copy<'a> {
    None,
    F32(RowsMut<'a, f32>),
    Bf16(RowsMut<'a, bf16>),
}

impl<'a> Copy<'a> {
    fn new(copy: Option<ViewMut<'a>>) -> Self {
        let Some(copy) = copy else { return Self::None };
        let len = copy.len();
        let copy = copy.reshape(1, len);
        match copy.dtype() {
            DType::F32 => Self::F32(RowsMut::new(copy)),
            DType::Bf16 => Self::Bf16(RowsMut::new(copy)),
        }
    }

    #[inline(always)]
    fn write(&self, range: Range<usize>, weights: &[f32]) {
        match self {
            Self::None => {}
            // SAFETY: chunks are disjoint.
            Self::F32(copy) => unsafe { copy.part(0, range.start, range.len()) }.copy_from_slice(weights),
            Self::Bf16(copy) => {
                // SAFETY: chunks are disjoint.
                for (copy, w) in unsafe { copy.part(0, range.start, range.len()) }.iter_mut().zip(weights) {
                    *copy = bf16::from_f32(*w);
                }
            }
        }
    }
}

/// `a · b + c`, rounded once where the processor can.
#[inline(always)]
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// The scalars of one AdamW step, rounded to f32 where torch rounds them.
struct AdamStep {
    grad_scale: f32,
    decay: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    root_correction2: f32,
    eps: f32,
    minus_step_size: f32,
}

impl AdamStep {
    fn new(c: &AdamW, grad_scale: f32) -> Self {
        let step = c.step as f64;
        let (correction1, correction2) = (1.0 - c.beta1.powf(step), 1.0 - c.beta2.powf(step));
        Self {
            grad_scale,
            decay: (1.0 - c.learning_rate * c.weight_decay) as f32,
            one_minus_beta1: (1.0 - c.beta1) as f32,
            beta2: c.beta2 as f32,
            one_minus_beta2: (1.0 - c.beta2) as f32,
            root_correction2: correction2.sqrt() as f32,
            eps: c.eps as f32,
            minus_step_size: (-c.learning_rate / correction1) as f32,
        }
    }

    #[inline(always)]
    fn run<const FUSED: bool>(&self, grad: &[f32], master: &mut [f32], m: &mut [f32], v: &mut [f32]) {
        for (((w, m), v), g) in master.iter_mut().zip(m).zip(v).zip(grad) {
            let g = g * self.grad_scale;
            *m = multiply_add::<FUSED>(g - *m, self.one_minus_beta1, *m);
            *v = multiply_add::<FUSED>(self.one_minus_beta2 * g, g, *v * self.beta2);
            let root = v.sqrt() / self.root_correction2 + self.eps;
            *w = *w * self.decay + (self.minus_step_size * *m) / root;
        }
    }
}

/// The scalars of one RMSprop step.
struct RmsStep {
    grad_scale: f32,
    weight_decay: f32,
    alpha: f32,
    one_minus_alpha: f32,
    eps: f32,
    minus_learning_rate: f32,
}

impl RmsStep {
    fn new(c: &RmsProp, grad_scale: f32) -> Self {
        Self {
            grad_scale,
            weight_decay: c.weight_decay as f32,
            alpha: c.alpha as f32,
            one_minus_alpha: (1.0 - c.alpha) as f32,
            eps: c.eps as f32,
            minus_learning_rate: -c.learning_rate as f32,
        }
    }

    #[inline(always)]
    fn run<const FUSED: bool>(&self, grad: &[f32], master: &mut [f32], v: &mut [f32]) {
        for ((w, v), g) in master.iter_mut().zip(v).zip(grad) {
            let g = multiply_add::<FUSED>(*w, self.weight_decay, g * self.grad_scale);
            *v = multiply_add::<FUSED>(self.one_minus_alpha * g, g, *v * self.alpha);
            *w += (self.minus_learning_rate * g) / (v.sqrt() + self.eps);
        }
    }
}
