//! The head: chunks of logits, one pass over each row for its statistics or its gradient, and the products around it.

use std::ops::Range;

use super::elementary::{exp, softcap};
use super::rows::RowsMut;
use super::vector::{Vector, for_lanes, vector_kernel};
use super::{Cpu, Operand, Product, Term, scratch};
use crate::ops::{
    ELSEWHERE, FIRST, HeadGradients, HeadParts, HeadShape, HeadWeights, LowRank, NOT_HERE, PASSED_OVER,
    Targets,
};
use crate::{DType, Element, View, ViewMut, with_element};

/// Logits that are summed in f32 before the sum is carried in f64.
const RUN: usize = 4096;

/// Indices of the predictions that rows `rows` are asked for.
fn predictions_of(targets: &Targets, rows: Range<usize>) -> Range<usize> {
    let before = |row: usize| targets.rows.partition_point(|&r| (r as usize) < row);
    before(rows.start)..before(rows.end)
}

/// `hidden weightᵀ + bias + h bᵀ` of a range of rows, before scale and softcap.
fn multiply(cpu: &Cpu, hidden: View, weights: &HeadWeights, rows: Range<usize>, logits: ViewMut) {
    let HeadWeights { weight, bias, low_rank } = *weights;
    let (a, b) = (Operand::rows_of(hidden.row_range(rows.clone())), Operand::rows_of(weight));
    let term = low_rank.map(|LowRank { h, b }| Term {
        a: Operand::rows_of(h.row_range(rows.clone())),
        b: Operand::rows_of(b),
    });
    Product { a, b, term, c: logits, accumulate: false, bias, residual: None }.run(cpu);
}

/// Where the logits of a chunk of rows go: among the kept ones if all of them are to be kept, else into the buffer that
/// every chunk reuses.
fn place<'a>(kept: &'a mut ViewMut, spare: &'a mut ViewMut, rows: Range<usize>) -> ViewMut<'a> {
    if rows.end <= kept.rows() {
        kept.reborrow().row_range(rows)
    } else {
        spare.reborrow().row_range(0..rows.len())
    }
}

/// Scores rows in chunks of `chunk`. The logits of the chunks that end within the rows of `kept` stay there.
pub(crate) fn forward(
    cpu: &Cpu,
    hidden: View,
    weights: HeadWeights,
    targets: Targets,
    shape: &HeadShape,
    parts: &mut HeadParts,
    chunk: usize,
    mut kept: ViewMut,
    mut spare: ViewMut,
) {
    let rows = hidden.rows();
    let (of_rows, of_predictions) = parts.own_mut();
    let (of_rows, of_predictions) = (RowsMut::from_slice(of_rows), RowsMut::from_slice(of_predictions));
    for start in (0..rows).step_by(chunk.max(1)) {
        let range = start..rows.min(start + chunk);
        let mut logits = place(&mut kept, &mut spare, range.clone());
        multiply(cpu, hidden, &weights, range.clone(), logits.reborrow());
        let logits = RowsMut::<f32>::new(logits);
        cpu.parallel_for(range.len(), |r| {
            let row = start + r;
            // SAFETY: this row, its numbers and those of its predictions belong to this block alone.
            unsafe {
                let logits = logits.row(r);
                let Statistics { largest, sum, weighted, total } = statistics(cpu.isa(), logits, shape);
                of_rows.part(0, row, 1)[0] = [f64::from(largest), sum, weighted, total];
                for i in predictions_of(&targets, row..row + 1) {
                    of_predictions.part(0, i, 1)[0] = of_target(logits, targets.targets[i], largest);
                }
            }
        });
    }
}

/// What a row says of a target: its place and its logit.
fn of_target(logits: &[f32], target: u32, largest: f32) -> [f64; 2] {
    if target == ELSEWHERE {
        return [NOT_HERE, 0.0];
    }
    let (before, logit) = (&logits[..target as usize], logits[target as usize]);
    let is_first = logit == largest && !contains(before, largest);
    [if is_first { FIRST } else { PASSED_OVER }, f64::from(logit)]
}

/// Whether some element equals `x`; by blocks, so that the comparison is vectorised.
fn contains(elements: &[f32], x: f32) -> bool {
    elements.chunks(256).any(|chunk| chunk.iter().fold(false, |found, e| found | (*e == x)))
}

/// Of a row of logits l after scale and softcap.
struct Statistics {
    largest: f32,
    /// Σ exp(l − largest).
    sum: f64,
    /// Σ exp(l − largest) · (l − largest).
    weighted: f64,
    /// Σ l.
    total: f64,
}

/// A logit after scale and softcap.
#[inline(always)]
fn shaped<V: Vector>(logit: V, scale: f32, cap: Option<f32>) -> V {
    // SAFETY: `logit` exists, so the processor has V.
    let scaled = logit.mul(unsafe { V::splat(scale) });
    match cap {
        Some(cap) => softcap(scaled, cap),
        None => scaled,
    }
}

vector_kernel! {
    /// Applies scale and softcap in place and reads the statistics off.
    unsafe fn statistics<V: Vector>(logits: &mut [f32], shape: &HeadShape) -> Statistics {
        // SAFETY: every access is inside the slice.
        unsafe {
            let scale = shape.logit_scale.unwrap_or(1.0);
            let changes = scale != 1.0 || shape.softcap.is_some();
            let mut largest = V::splat(f32::NEG_INFINITY);
            let mut total = 0.0;
            for run in logits.chunks_mut(RUN) {
                let mut sum = V::splat(0.0);
                for_lanes!(V, run.len(), |i, n| {
                    let at = run.as_mut_ptr().add(i);
                    let mut logit = V::load(at, n);
                    if changes {
                        logit = shaped(logit, scale, shape.softcap);
                        logit.store(at, n);
                    }
                    // The lanes beyond the row are 0, which may exceed every logit.
                    let seen = if n < V::LANES { logit.keep_first(n, f32::NEG_INFINITY) } else { logit };
                    largest = largest.max(seen);
                    sum = sum.add(logit);
                });
                total += f64::from(sum.sum());
            }
            let largest = largest.largest();
            let (mut sum, mut weighted) = (0.0, 0.0);
            for run in logits.chunks(RUN) {
                let (mut run_sum, mut run_weighted) = (V::splat(0.0), V::splat(0.0));
                for_lanes!(V, run.len(), |i, n| {
                    let below = V::load(run.as_ptr().add(i), n).sub(V::splat(largest));
                    let e = exp(below);
                    let e = if n < V::LANES { e.keep_first(n, 0.0) } else { e };
                    run_sum = run_sum.add(e);
                    run_weighted = e.mul_add(below, run_weighted);
                });
                sum += f64::from(run_sum.sum());
                weighted += f64::from(run_weighted.sum());
            }
            Statistics { largest, sum, weighted, total }
        }
    }
}

/// `kept` holds what [`forward`] left there; the other chunks' logits are computed again.
pub(crate) fn backward(
    cpu: &Cpu,
    hidden: View,
    weights: HeadWeights,
    targets: Targets,
    shape: &HeadShape,
    log_sum_exp: &[f32],
    d_log_prob: &[f32],
    mut gradients: HeadGradients,
    chunk: usize,
    mut kept: ViewMut,
    mut spare: ViewMut,
) {
    let rows = hidden.rows();
    for start in (0..rows).step_by(chunk.max(1)) {
        let range = start..rows.min(start + chunk);
        let is_kept = range.end <= kept.rows();
        let mut logits = place(&mut kept, &mut spare, range.clone());
        if !is_kept {
            multiply(cpu, hidden, &weights, range.clone(), logits.reborrow());
        }
        let rows_of_logits = RowsMut::<f32>::new(logits.reborrow());
        cpu.parallel_for(range.len(), |r| {
            // SAFETY: row `r` belongs to this block alone.
            let logits = unsafe { rows_of_logits.row(r) };
            let predictions = predictions_of(&targets, start + r..start + r + 1);
            let (targets, d) = (&targets.targets[predictions.clone()], &d_log_prob[predictions]);
            differentiate(cpu, logits, shape, log_sum_exp[start + r], targets, d, weights.weight.dtype());
        });
        let gradient = match weights.weight.dtype() {
            DType::F32 => logits.view(),
            DType::Bf16 => logits.front_half(),
        };
        back_from_logits(cpu, gradient, hidden, &weights, range, &mut gradients);
    }
}

/// Carries the gradient of the logits of a range of rows on.
fn back_from_logits(
    cpu: &Cpu,
    gradient: View,
    hidden: View,
    weights: &HeadWeights,
    rows: Range<usize>,
    gradients: &mut HeadGradients,
) {
    let product = |a, b, c, accumulate| {
        Product { a, b, term: None, c, accumulate, bias: None, residual: None }.run(cpu);
    };
    let dhidden = gradients.hidden.reborrow().row_range(rows.clone());
    product(Operand::rows_of(gradient), Operand::columns_of(weights.weight), dhidden, false);
    if let Some(weight) = &mut gradients.weight {
        let hidden = hidden.row_range(rows.clone());
        product(Operand::columns_of(gradient), Operand::columns_of(hidden), weight.reborrow(), true);
    }
    if let Some(bias) = &mut gradients.bias {
        cpu.bias_backward(gradient, bias.reborrow());
    }
    let Some(LowRank { h, b }) = weights.low_rank else { return };
    if let Some(dh) = &mut gradients.h {
        let dh = dh.reborrow().row_range(rows.clone());
        product(Operand::rows_of(gradient), Operand::columns_of(b), dh, false);
    }
    if let Some(db) = &mut gradients.b {
        product(Operand::columns_of(gradient), Operand::columns_of(h.row_range(rows)), db.reborrow(), true);
    }
}

/// Turns a row of raw logits into the gradient of `Σ d · log_prob` with respect to them, in the type of the weights
/// (bf16 stands in the first half of the row).
fn differentiate(
    cpu: &Cpu,
    logits: &mut [f32],
    shape: &HeadShape,
    log_sum_exp: f32,
    targets: &[u32],
    d: &[f32],
    dtype: DType,
) {
    let total: f32 = d.iter().sum();
    scratch::with_f32(targets.len(), |at_targets| {
        // At a target the two terms nearly cancel where the model is sure: they meet in f32, before any rounding.
        for (gradient, &target) in at_targets.iter_mut().zip(targets).filter(|(_, t)| **t != ELSEWHERE) {
            let (p, slope) = probability(logits[target as usize], shape, log_sum_exp);
            let asked: f32 = targets.iter().zip(d).filter(|(t, _)| **t == target).map(|(_, d)| d).sum();
            *gradient = (asked - total * p) * slope;
        }
        with_element!(dtype, E => {
            let row = logits.as_mut_ptr();
            // SAFETY: `row` holds the logits; an E is no wider than the f32 in whose place it comes.
            unsafe { gradients::<E>(cpu.isa(), row, logits.len(), shape, log_sum_exp, total) };
            for (gradient, &target) in at_targets.iter().zip(targets).filter(|(_, t)| **t != ELSEWHERE) {
                // SAFETY: the target is inside the vocabulary, which operations check.
                unsafe { *row.cast::<E>().add(target as usize) = Element::from_f32(*gradient) };
            }
        });
    });
}

/// The probability of a raw logit and the derivative of scale and softcap there.
fn probability(logit: f32, shape: &HeadShape, log_sum_exp: f32) -> (f32, f32) {
    let scale = shape.logit_scale.unwrap_or(1.0);
    let scaled = logit * scale;
    let (shaped, slope) = match shape.softcap {
        Some(cap) => {
            let t = (scaled / cap).tanh();
            (cap * t, scale * (1.0 - t * t))
        }
        None => (scaled, scale),
    };
    ((shaped - log_sum_exp).exp(), slope)
}

vector_kernel! {
    /// `-total · p · slope` for each of `len` raw logits at `row`, written from there on as numbers of type E.
    unsafe fn gradients<V: Vector, E: Element>(
        row: *mut f32,
        len: usize,
        shape: &HeadShape,
        log_sum_exp: f32,
        total: f32,
    ) {
        // SAFETY: inside the row; what is written never passes what is read, and a register is read first.
        unsafe {
            let scale = shape.logit_scale.unwrap_or(1.0);
            let factor = V::splat(-total * scale);
            for_lanes!(V, len, |i, n| {
                let logit = shaped(V::load(row.add(i), n), scale, shape.softcap);
                let mut gradient = exp(logit.sub(V::splat(log_sum_exp))).mul(factor);
                if let Some(cap) = shape.softcap {
                    let t = logit.mul(V::splat(1.0 / cap));
                    gradient = gradient.mul(V::splat(1.0).sub(t.mul(t)));
                }
                gradient.put(row.cast::<E>().add(i), n);
            });
        }
    }
}
