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
use crate::ops::optimizer::{Numbers, Rule};
use crate::ops::{Gradient, SQUARES_BLOCK, Update};
use crate::{DType, STATE_BLOCK, StatesMut, ViewMut, bf16};

/// Elements per block.
const BLOCK: usize = SQUARES_BLOCK;

/// Elements per chunk of a block: the copy is written while the new weights are in the first-level
/// cache.
const CHUNK: usize = 1 << 10;

// A chunk begins with a block of states.
const _: () = assert!(CHUNK.is_multiple_of(STATE_BLOCK) && BLOCK.is_multiple_of(CHUNK));

impl Cpu {
    /// Takes one step of a rule on all elements.
    pub(crate) fn optimizer_step<R: Rule>(&self, numbers: &Numbers, update: Update, states: Vec<StatesMut>) {
        let Update { grad, grad_scale, master, copy } = update;
        let (master, copy, isa) = (flat(master), Copy::new(copy), self.isa());
        let states: Vec<StateStorage> = states.into_iter().map(StateStorage::new).collect();
        self.for_chunks(grad, |range, grad| {
            let mut room = [[0.0; CHUNK]; 2];
            // SAFETY: chunks are disjoint and consist of whole blocks of states but for the last;
            // all slices have the length of the chunk.
            unsafe {
                let master = master.part(0, range.start, range.len());
                let mut now: [&mut [f32]; 2] = [&mut [], &mut []];
                for ((now, states), room) in now.iter_mut().zip(&states).zip(&mut room) {
                    *now = states.open(isa, &range, room);
                }
                elements::<R>(isa, numbers, grad_scale, grad, master, &mut now);
                for (now, states) in now.iter().zip(&states) {
                    states.close(isa, &range, now);
                }
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

vector_kernel! {
    /// Takes a rule's step. All slices have one length, but states that the rule has not, which have
    /// none.
    unsafe fn elements<V: Vector, R: Rule>(
        numbers: &Numbers,
        grad_scale: f32,
        grad: &[f32],
        master: &mut [f32],
        states: &mut [&mut [f32]; 2],
    ) {
        let (g_start, w_start) = (grad.as_ptr(), master.as_mut_ptr());
        let [a_start, b_start] = states.each_mut().map(|states| states.as_mut_ptr());
        for_lanes!(V, grad.len(), |start, count| {
            // SAFETY: the lanes lie inside the slices; the caller runs where V exists.
            unsafe {
                let g = V::load(g_start.add(start), count).mul(V::splat(grad_scale));
                let w = V::load(w_start.add(start), count);
                let a = if R::STATES.is_empty() { V::splat(0.0) } else { V::load(a_start.add(start), count) };
                let b = if R::STATES.len() < 2 { V::splat(0.0) } else { V::load(b_start.add(start), count) };
                let (w, [a, b]) = R::step(numbers, g, w, [a, b]);
                w.store(w_start.add(start), count);
                if !R::STATES.is_empty() {
                    a.store(a_start.add(start), count);
                }
                if R::STATES.len() == 2 {
                    b.store(b_start.add(start), count);
                }
            }
        });
    }
}
