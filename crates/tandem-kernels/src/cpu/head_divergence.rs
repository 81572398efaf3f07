//! Two heads at once: strips of both models' logits, one pass over each row's strips for its
//! divergences or their gradient, and the GEMMs around it.

use super::Cpu;
use super::elementary::{exp, softplus};
use super::head::{ROWS, STRIP, add_gradients, shaped};
use super::rows::RowsMut;
use super::vector::{Vector, for_lanes, vector_kernel};
use crate::ops::{DivergenceSide, HeadDivergence, HeadGradients, HeadShape, RowDivergence, Strip, strips};
use crate::{Element, ViewMut, with_element};

/// Inputs of a row's numbers in a strip beside the logits.
#[derive(Clone, Copy)]
struct Pair<'a> {
    /// Student, teacher.
    shapes: [&'a HeadShape; 2],
    log_sum_exp: [f32; 2],
    beta: f32,
    /// Logarithms of 1 − β, of β and of their ratio, where there is a mixture.
    logs: [f32; 3],
}

impl<'a> Pair<'a> {
    fn new(call: &'a HeadDivergence, row: usize) -> Self {
        let HeadDivergence { student, teacher, beta } = call;
        let (own, other) = ((1.0 - f64::from(*beta)).ln(), f64::from(*beta).ln());
        Self {
            shapes: [&student.shape, &teacher.shape],
            log_sum_exp: [student.log_sum_exp[row], teacher.log_sum_exp[row]],
            beta: *beta,
            logs: [own as f32, other as f32, (own - other) as f32],
        }
    }

    fn has_mixture(&self) -> bool {
        self.beta != 0.0 && self.beta != 1.0
    }
}

/// Computes both models' logits of a strip; returns those of the student.
fn logits<'m>(
    cpu: &Cpu,
    strip: &Strip,
    call: &HeadDivergence,
    [student, teacher]: &'m mut [ViewMut; 2],
) -> [ViewMut<'m>; 2] {
    let place = |memory: &'m mut ViewMut| {
        memory.reborrow().row_range(0..strip.rows.len()).col_range(0..strip.tokens.len())
    };
    let (mut student, mut teacher) = (place(student), place(teacher));
    let compute = |side: &DivergenceSide, logits: ViewMut| {
        strip.logits(side.hidden, &side.weights, logits).run(cpu);
    };
    compute(&call.student, student.reborrow());
    compute(&call.teacher, teacher.reborrow());
    [student, teacher]
}

/// Sums the divergences of each row, in chunks.
pub(crate) fn forward(
    cpu: &Cpu,
    call: HeadDivergence,
    chunk: usize,
    out: &mut [RowDivergence],
    mut memory: [ViewMut; 2],
) {
    let (rows, vocabulary) = (call.student.hidden.rows(), call.student.weights.weight.rows());
    let out = RowsMut::from_slice(out);
    for strip in strips(rows, chunk, vocabulary, STRIP) {
        let [student, teacher] = logits(cpu, &strip, &call, &mut memory).map(RowsMut::<f32>::new);
        cpu.parallel_ranges(strip.rows.len(), ROWS, |_, range| {
            for r in range {
                let row = strip.rows.start + r;
                let pair = Pair::new(&call, row);
                // SAFETY: this row and its sums belong to this block alone.
                unsafe {
                    let [forward, reverse, of_teacher, of_student] =
                        divergences(cpu.isa(), student.row(r), teacher.row(r), &pair).map(f64::from);
                    let sums = &mut out.part(0, row, 1)[0];
                    sums.forward_kl += forward;
                    sums.reverse_kl += reverse;
                    sums.to_mixture[0] += of_teacher;
                    sums.to_mixture[1] += of_student;
                }
            }
        });
    }
}

/// Computes gradients in chunks. `known` are the sums of the rows and the derivatives by them.
pub(crate) fn backward(
    cpu: &Cpu,
    call: HeadDivergence,
    chunk: usize,
    known: (&[RowDivergence], &[f32]),
    mut gradients: HeadGradients,
    mut memory: [ViewMut; 2],
) {
    let DivergenceSide { hidden, weights, .. } = call.student;
    let dtype = weights.weight.dtype();
    for strip in strips(hidden.rows(), chunk, weights.weight.rows(), STRIP) {
        let [mut student, teacher] = logits(cpu, &strip, &call, &mut memory);
        let len = strip.tokens.len();
        let (of_student, of_teacher) =
            (RowsMut::<f32>::new(student.reborrow()), RowsMut::<f32>::new(teacher));
        cpu.parallel_ranges(strip.rows.len(), ROWS, |_, range| {
            for r in range {
                let row = strip.rows.start + r;
                let (pair, (sums, d)) = (Pair::new(&call, row), known);
                let centre = sums[row].centre(call.beta);
                with_element!(dtype, E => {
                    // SAFETY: row `r` belongs to this block alone, and has `len` logits; an E is no wider
                    // than the f32 that it overwrites.
                    unsafe {
                        let (student, teacher) = (of_student.row(r).as_mut_ptr(), of_teacher.row(r).as_ptr());
                        differentiate::<E>(cpu.isa(), student, teacher, len, &pair, centre, d[row]);
                    }
                });
            }
        });
        add_gradients(cpu, &strip, &student, hidden, &weights, &mut gradients);
    }
}

/// Returns log m − log p and log m − log q up to the constants −ln(1 − β) and −ln β, from
/// log p − log q. (m = (1 − β)p + βq, and both logarithms under that of the sum are known.)
#[inline(always)]
fn above<V: Vector>(log_ratio: V, pair: &Pair) -> [V; 2] {
    // SAFETY: `log_ratio` exists, so the CPU has V.
    unsafe {
        let x = log_ratio.add(V::splat(pair.logs[2]));
        [softplus(V::splat(0.0).sub(x)), softplus(x)]
    }
}

vector_kernel! {
    /// Sums over a strip of a row KL(q‖p), KL(p‖q), KL(q‖m) and KL(p‖m).
    unsafe fn divergences<V: Vector>(student: &[f32], teacher: &[f32], pair: &Pair<'_>) -> [f32; 4] {
        // SAFETY: every access is inside the slices, which are of one length.
        unsafe {
            let zero = V::splat(0.0);
            let mut sums = [zero; 4];
            let mixes = pair.has_mixture();
            for_lanes!(V, student.len(), |i, n| {
                let log_probability = |logits: &[f32], side: usize| {
                    let HeadShape { softcap, logit_scale } = *pair.shapes[side];
                    let logit = shaped(V::load(logits.as_ptr().add(i), n), logit_scale.unwrap_or(1.0), softcap);
                    logit.sub(V::splat(pair.log_sum_exp[side]))
                };
                let (log_p, log_q) = (log_probability(student, 0), log_probability(teacher, 1));
                // Lanes beyond the row count for nothing.
                let [p, q] = [exp(log_p), exp(log_q)]
                    .map(|x| if n < V::LANES { x.keep_first(n, 0.0) } else { x });
                let log_ratio = log_p.sub(log_q);
                sums[0] = q.mul_add(zero.sub(log_ratio), sums[0]);
                sums[1] = p.mul_add(log_ratio, sums[1]);
                if mixes {
                    let [of_p, of_q] = above(log_ratio, pair);
                    sums[2] = q.mul_add(V::splat(-pair.logs[1]).sub(of_q), sums[2]);
                    sums[3] = p.mul_add(V::splat(-pair.logs[0]).sub(of_p), sums[3]);
                }
            });
            sums.map(V::sum)
        }
    }
}

vector_kernel! {
    /// Writes the derivative of `d` times the divergence by each of the student's `len` raw logits, in
    /// their place, as type E.
    unsafe fn differentiate<V: Vector, E: Element>(
        student: *mut f32,
        teacher: *const f32,
        len: usize,
        pair: &Pair<'_>,
        centre: f32,
        d: f32,
    ) {
        // SAFETY: inside the rows; writes never pass reads, and a register is read before it is
        // written.
        unsafe {
            let [own, other] = pair.shapes;
            let (scale, beta) = (own.logit_scale.unwrap_or(1.0), pair.beta);
            let weight = if pair.has_mixture() { 1.0 - beta } else { 1.0 };
            let factor = V::splat(d * scale * weight);
            for_lanes!(V, len, |i, n| {
                let logit = shaped(V::load(student.add(i), n), scale, own.softcap);
                let log_p = logit.sub(V::splat(pair.log_sum_exp[0]));
                let of_teacher = shaped(V::load(teacher.add(i), n), other.logit_scale.unwrap_or(1.0), other.softcap);
                let log_q = of_teacher.sub(V::splat(pair.log_sum_exp[1]));
                let p = exp(log_p);
                let gradient = if beta == 0.0 {
                    p.sub(exp(log_q))
                } else if beta == 1.0 {
                    p.mul(log_p.sub(log_q).sub(V::splat(centre)))
                } else {
                    let [of_p, _] = above(log_p.sub(log_q), pair);
                    p.mul(V::splat(-pair.logs[0] - centre).sub(of_p))
                };
                let mut gradient = gradient.mul(factor);
                if let Some(cap) = own.softcap {
                    let t = logit.mul(V::splat(1.0 / cap));
                    gradient = gradient.mul(V::splat(1.0).sub(t.mul(t)));
                }
                gradient.put(student.cast::<E>().add(i), n);
            });
        }
    }
}
