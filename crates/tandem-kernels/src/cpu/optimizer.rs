//! Optimiser steps over flat buffers: one pass over memory that also writes the compute copy.
//! States in fewer bits are widened and rounded again chunk by chunk in the first-level cache.

use std::ops::Range;

use super::convert::convert;
use super::exact::{terms_to_f32, to_f32};
use super::rows::RowsMut;
use super::squares::add_squares;
use super::states::{StateStorage, flat};
use super::vector::{for_lanes, vector_kernel};
use super::{Cpu, Isa};
use crate::numerics::squares::BlockSquares;
use crate::ops::{AdamW, Gradient, RmsProp, SQUARES_BLOCK, Update};
use crate::{DType, STATE_BLOCK, StatesMut, ViewMut, bf16};

/// Elements per block.
const BLOCK: usize = SQUARES_BLOCK;

/// Elements per chunk of a block: the copy is written while the new weights are in the first-level
/// cache.
const CHUNK: usize = 1 << 10;

// A chunk begins with a block of states.
const _: () = assert!(CHUNK.is_multiple_of(STATE_BLOCK) && BLOCK.is_multiple_of(CHUNK));

impl Cpu {
    pub(crate) fn adamw(&self, config: &AdamW, update: Update, m: StatesMut, v: StatesMut) {
        let Update { grad, grad_scale, master, copy } = update;
        let step = AdamStep::new(config, grad_scale);
        let (master, m, v) = (flat(master), StateStorage::new(m), StateStorage::new(v));
        let (copy, isa) = (Copy::new(copy), self.isa());
        self.for_chunks(grad, |range, grad| {
            let mut room = [[0.0; CHUNK]; 2];
            let [m_room, v_room] = &mut room;
            // SAFETY: chunks are disjoint and consist of whole blocks of states but for the last;
            // all slices have the length of the chunk.
            unsafe {
                let master = master.part(0, range.start, range.len());
                let (m_now, v_now) = (m.open(isa, &range, m_room), v.open(isa, &range, v_room));
                adam(isa, &step, grad, master, m_now, v_now);
                m.close(isa, &range, m_now);
                v.close(isa, &range, v_now);
                copy.write(isa, range, master);
            }
        });
    }

    pub(crate) fn rmsprop(&self, config: &RmsProp, update: Update, v: StatesMut) {
        let Update { grad, grad_scale, master, copy } = update;
        let step = RmsStep::new(config, grad_scale);
        let (master, v) = (flat(master), StateStorage::new(v));
        let (copy, isa) = (Copy::new(copy), self.isa());
        self.for_chunks(grad, |range, grad| {
            let mut room = [0.0; CHUNK];
            // SAFETY: as above.
            unsafe {
                let master = master.part(0, range.start, range.len());
                let v_now = v.open(isa, &range, &mut room);
                rms(isa, &step, grad, master, v_now);
                v.close(isa, &range, v_now);
                copy.write(isa, range, master);
            }
        });
    }

    pub(crate) fn block_squares(&self, parts: &[Gradient], blocks: &mut [BlockSquares]) {
        let mut rest = blocks;
        for &x in parts {
            let (own, after) = rest.split_at_mut(x.len().div_ceil(BLOCK));
            let shared = RowsMut::from_slice(own);
            self.parallel_ranges(x.len(), BLOCK, |block, range| {
                let mut sum = BlockSquares::default();
                for_chunks_of(self.isa(), x, range, |_, x| {
                    add_squares(self.isa(), x, &mut sum);
                });
                // SAFETY: each block writes its own element.
                unsafe { shared.part(0, block, 1)[0] = sum };
            });
            rest = after;
        }
    }

    /// Calls `chunk` in parallel with each chunk's range and its gradient.
    fn for_chunks(&self, grad: Gradient, chunk: impl Fn(Range<usize>, &[f32]) + Sync) {
        self.parallel_ranges(grad.len(), BLOCK, |_, block| {
            for_chunks_of(self.isa(), grad, block, &chunk);
        });
    }
}

/// Calls `chunk` for the chunks of one block; fixed-point sums are converted in the first-level
/// cache.
fn for_chunks_of(isa: Isa, grad: Gradient, block: Range<usize>, mut chunk: impl FnMut(Range<usize>, &[f32])) {
    let mut converted = [0.0f32; CHUNK];
    for start in block.clone().step_by(CHUNK) {
        let range = start..block.end.min(start + CHUNK);
        match grad {
            Gradient::F32(grad) => chunk(range.clone(), &grad.as_slice::<f32>()[range]),
            Gradient::Exact(sums) => {
                let converted = &mut converted[..range.len()];
                // SAFETY: both are the length of the chunk; the CPU has this level.
                unsafe { to_f32(isa, &sums.as_slice()[range.clone()], converted) };
                chunk(range, converted);
            }
            Gradient::Terms(terms) => {
                let converted = &mut converted[..range.len()];
                // SAFETY: as above.
                unsafe { terms_to_f32(isa, &terms.as_slice::<f32>()[range.clone()], converted) };
                chunk(range, converted);
            }
        }
    }
}

/// Compute copy of the new weights.
enum Copy<'a> {
    None,
    F32(RowsMut<'a, f32>),
    Bf16(RowsMut<'a, bf16>),
}

impl<'a> Copy<'a> {
    fn new(copy: Option<ViewMut<'a>>) -> Self {
        let Some(copy) = copy else { return Self::None };
        match copy.dtype() {
            DType::F32 => Self::F32(flat(copy)),
            DType::Bf16 => Self::Bf16(flat(copy)),
        }
    }

    fn write(&self, isa: Isa, range: Range<usize>, weights: &[f32]) {
        // SAFETY: chunks are disjoint.
        unsafe {
            match self {
                Self::None => {}
                Self::F32(copy) => copy.part(0, range.start, range.len()).copy_from_slice(weights),
                Self::Bf16(copy) => convert(isa, weights, copy.part(0, range.start, range.len())),
            }
        }
    }
}

/// Scalars of one AdamW step, rounded to f32 where torch rounds them.
pub(crate) struct AdamStep {
    pub(crate) grad_scale: f32,
    pub(crate) decay: f32,
    pub(crate) one_minus_beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) one_minus_beta2: f32,
    pub(crate) root_correction2: f32,
    pub(crate) eps: f32,
    pub(crate) minus_step_size: f32,
}

impl AdamStep {
    pub(crate) fn new(c: &AdamW, grad_scale: f32) -> Self {
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
}

vector_kernel! {
    /// Runs on slices of one length.
    unsafe fn adam<V: Vector>(s: &AdamStep, grad: &[f32], master: &mut [f32], m: &mut [f32], v: &mut [f32]) {
        let (g_start, w_start) = (grad.as_ptr(), master.as_mut_ptr());
        let (m_start, v_start) = (m.as_mut_ptr(), v.as_mut_ptr());
        for_lanes!(V, grad.len(), |start, count| {
            // SAFETY: the lanes lie inside the slices; the caller runs where V exists.
            unsafe {
                let g = V::load(g_start.add(start), count).mul(V::splat(s.grad_scale));
                let m = V::load(m_start.add(start), count);
                let m = g.sub(m).fused_mul_add(V::splat(s.one_minus_beta1), m);
                let v = V::load(v_start.add(start), count).mul(V::splat(s.beta2));
                let v = g.mul(V::splat(s.one_minus_beta2)).fused_mul_add(g, v);
                let root = v.sqrt().div(V::splat(s.root_correction2)).add(V::splat(s.eps));
                let w = V::load(w_start.add(start), count).mul(V::splat(s.decay));
                w.add(m.mul(V::splat(s.minus_step_size)).div(root)).store(w_start.add(start), count);
                m.store(m_start.add(start), count);
                v.store(v_start.add(start), count);
            }
        });
    }
}

/// Scalars of one RMSprop step.
pub(crate) struct RmsStep {
    pub(crate) grad_scale: f32,
    pub(crate) weight_decay: f32,
    pub(crate) alpha: f32,
    pub(crate) one_minus_alpha: f32,
    pub(crate) eps: f32,
    pub(crate) minus_learning_rate: f32,
}

impl RmsStep {
    pub(crate) fn new(c: &RmsProp, grad_scale: f32) -> Self {
        Self {
            grad_scale,
            weight_decay: c.weight_decay as f32,
            alpha: c.alpha as f32,
            one_minus_alpha: (1.0 - c.alpha) as f32,
            eps: c.eps as f32,
            minus_learning_rate: -c.learning_rate as f32,
        }
    }
}

vector_kernel! {
    /// Runs on slices of one length.
    unsafe fn rms<V: Vector>(s: &RmsStep, grad: &[f32], master: &mut [f32], v: &mut [f32]) {
        let (g_start, w_start, v_start) = (grad.as_ptr(), master.as_mut_ptr(), v.as_mut_ptr());
        for_lanes!(V, grad.len(), |start, count| {
            // SAFETY: the lanes lie inside the slices; the caller runs where V exists.
            unsafe {
                let w = V::load(w_start.add(start), count);
                let g = V::load(g_start.add(start), count).mul(V::splat(s.grad_scale));
                let g = w.fused_mul_add(V::splat(s.weight_decay), g);
                let v = V::load(v_start.add(start), count).mul(V::splat(s.alpha));
                let v = g.mul(V::splat(s.one_minus_alpha)).fused_mul_add(g, v);
                let root = v.sqrt().add(V::splat(s.eps));
                w.add(g.mul(V::splat(s.minus_learning_rate)).div(root)).store(w_start.add(start), count);
                v.store(v_start.add(start), count);
            }
        });
    }
}
