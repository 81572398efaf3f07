//! The head: strips of logits, one pass over each row's strip for its statistics or its gradient,
//! and the GEMMs around it.

use std::ops::Range;

use super::elementary::{exp, softcap};
use super::rows::RowsMut;
use super::vector::{Vector, for_lanes, vector_kernel};
use super::{Cpu, scratch};
use crate::ops::{
    FIRST, Head, HeadGradients, HeadParts, HeadShape, HeadWeights, LogitMemory, NOT_HERE, PASSED_OVER, Strip,
    Targets, strips,
};
use crate::{DType, Element, View, ViewMut, with_element};

/// Columns of a strip, and logits summed in f32 before the sum continues in f64. The strip of a
/// chunk's rows stays in the second-level caches from the GEMM that writes it to the GEMM that
/// reads its gradient.
pub(super) const STRIP: usize = 1024;

/// Rows of a strip per task.
pub(super) const ROWS: usize = 16;

/// Returns the width of the buffer for logits that are not kept.
pub(crate) fn strip_width(vocabulary: usize) -> usize {
    STRIP.min(vocabulary)
}

/// Scores rows in chunks.
pub(crate) fn forward(cpu: &Cpu, call: Head, parts: &mut HeadParts, mut memory: LogitMemory) {
    let Head { hidden, weights, targets, ref shape, .. } = call;
    let (of_rows, of_predictions) = begin(parts);
    for strip in strips(hidden.rows(), memory.chunk, weights.weight.rows(), STRIP) {
        let (rows, tokens) = (&strip.rows, &strip.tokens);
        let mut logits = strip.place(&mut memory);
        strip.logits(hidden, &weights, logits.reborrow()).run(cpu);
        see(cpu, logits, rows.start, tokens, &targets, shape, &of_rows, &of_predictions);
    }
}

/// Scores existing logits.
pub(crate) fn score(
    cpu: &Cpu,
    mut logits: ViewMut,
    targets: Targets,
    shape: &HeadShape,
    parts: &mut HeadParts,
) {
    let vocabulary = logits.cols();
    let (of_rows, of_predictions) = begin(parts);
    for start in (0..vocabulary).step_by(STRIP) {
        let tokens = start..vocabulary.min(start + STRIP);
        let logits = logits.reborrow().col_range(tokens.clone());
        see(cpu, logits, 0, &tokens, &targets, shape, &of_rows, &of_predictions);
    }
}

/// Resets the numbers of a part.
fn begin(parts: &mut HeadParts) -> (RowsMut<'_, [f64; 5]>, RowsMut<'_, [f64; 2]>) {
    let (of_rows, of_predictions) = parts.own_mut();
    of_rows.fill(Statistics::NONE);
    of_predictions.fill([NOT_HERE, 0.0]);
    (RowsMut::from_slice(of_rows), RowsMut::from_slice(of_predictions))
}

/// Updates the statistics by a strip of logits whose first row is `first_row`. Scale and softcap
/// are applied in place.
fn see(
    cpu: &Cpu,
    logits: ViewMut,
    first_row: usize,
    tokens: &Range<usize>,
    targets: &Targets,
    shape: &HeadShape,
    of_rows: &RowsMut<[f64; 5]>,
    of_predictions: &RowsMut<[f64; 2]>,
) {
    let count = logits.rows();
    let logits = RowsMut::<f32>::new(logits);
    cpu.parallel_ranges(count, ROWS, |_, range| {
        let mut predictions = targets.of_rows(first_row + range.start..first_row + range.end);
        for r in range {
            let row = first_row + r;
            // SAFETY: this row, its numbers and those of its predictions belong to this block
            // alone.
            unsafe {
                let logits = logits.row(r);
                let found = statistics(cpu.isa(), logits, shape);
                let so_far = &mut of_rows.part(0, row, 1)[0];
                while predictions.start < predictions.end && targets.rows[predictions.start] as usize == row {
                    let i = predictions.start;
                    let target = targets.targets[i] as usize;
                    let place = &mut of_predictions.part(0, i, 1)[0];
                    see_target(place, target, tokens, logits, so_far[0], found.largest);
                    predictions.start += 1;
                }
                *so_far = found.after(*so_far);
            }
        }
    });
}

/// Updates place and logit of a target by a strip. `before` is the largest logit before the strip,
/// `largest` the largest of the strip.
fn see_target(
    [place, logit]: &mut [f64; 2],
    target: usize,
    strip: &Range<usize>,
    logits: &[f32],
    before: f64,
    largest: f32,
) {
    if strip.contains(&target) {
        let (earlier, own) = (&logits[..target - strip.start], logits[target - strip.start]);
        *logit = f64::from(own);
        let is_first = own == largest && before < *logit && !contains(earlier, largest);
        *place = if is_first { FIRST } else { PASSED_OVER };
    } else if *place == FIRST && f64::from(largest) > *logit {
        *place = PASSED_OVER;
    }
}

/// Returns whether an element equals `x`. Works in blocks, so that the comparison vectorises.
fn contains(elements: &[f32], x: f32) -> bool {
    elements.chunks(256).any(|chunk| chunk.iter().fold(false, |found, e| found | (*e == x)))
}

/// Statistics of one row of a strip; l are the logits after scale and softcap.
struct Statistics {
    largest: f32,
    /// Σ exp(l − largest).
    sum: f32,
    /// Σ exp(l − largest) · (l − largest).
    weighted: f32,
    /// Σ l.
    total: f32,
    /// Σ exp(l − largest)².
    squares: f32,
}

impl Statistics {
    /// Numbers of a row before the first strip.
    const NONE: [f64; 5] = [f64::NEG_INFINITY, 0.0, 0.0, 0.0, 0.0];

    /// Merges the numbers of earlier strips with this strip.
    fn after(&self, [largest, sum, weighted, total, squares]: [f64; 5]) -> [f64; 5] {
        let own = [self.largest, self.sum, self.weighted, self.total, self.squares].map(f64::from);
        if sum == 0.0 {
            return own;
        }
        let both = largest.max(own[0]);
        // One of the two differences from the larger is 0.
        let shrunk = |[largest, sum, weighted, squares]: [f64; 4]| {
            let below = largest - both;
            let factor = if below == 0.0 { 1.0 } else { below.exp() };
            [factor * sum, factor * (weighted + sum * below), factor * factor * squares]
        };
        let earlier = shrunk([largest, sum, weighted, squares]);
        let own_shrunk = shrunk([own[0], own[1], own[2], own[4]]);
        let [sum, weighted, squares] = std::array::from_fn(|i| earlier[i] + own_shrunk[i]);
        [both, sum, weighted, total + own[3], squares]
    }
}

/// Applies scale and softcap to a logit.
#[inline(always)]
pub(super) fn shaped<V: Vector>(logit: V, scale: f32, cap: Option<f32>) -> V {
    // SAFETY: `logit` exists, so the CPU has V.
    let scaled = logit.mul(unsafe { V::splat(scale) });
    match cap {
        Some(cap) => softcap(scaled, cap),
        None => scaled,
    }
}

vector_kernel! {
    /// Applies scale and softcap in place and returns the statistics, of at most [`STRIP`] logits.
    unsafe fn statistics<V: Vector>(logits: &mut [f32], shape: &HeadShape) -> Statistics {
        // SAFETY: every access is inside the slice.
        unsafe {
            let (scale, len) = (shape.logit_scale.unwrap_or(1.0), logits.len());
            let changes = scale != 1.0 || shape.softcap.is_some();
            let (mut largest, mut total) = (V::splat(f32::NEG_INFINITY), V::splat(0.0));
            let start = logits.as_mut_ptr();
            for_lanes!(V, len, |i, n| {
                let at = start.add(i);
                let mut logit = V::load(at, n);
                if changes {
                    logit = shaped(logit, scale, shape.softcap);
                    logit.store(at, n);
                }
                // Lanes beyond the row are 0, which may exceed every logit.
                let seen = if n < V::LANES { logit.keep_first(n, f32::NEG_INFINITY) } else { logit };
                largest = largest.max(seen);
                total = total.add(logit);
            });
            let largest = largest.largest();
            let (mut sum, mut weighted, mut squares) = (V::splat(0.0), V::splat(0.0), V::splat(0.0));
            for_lanes!(V, len, |i, n| {
                let below = V::load(start.add(i), n).sub(V::splat(largest));
                let e = exp(below);
                let e = if n < V::LANES { e.keep_first(n, 0.0) } else { e };
                sum = sum.add(e);
                weighted = e.mul_add(below, weighted);
                squares = e.mul_add(e, squares);
            });
            Statistics {
                largest,
                sum: sum.sum(),
                weighted: weighted.sum(),
                total: total.sum(),
                squares: squares.sum(),
            }
        }
    }
}

vector_kernel! {
    /// Applies scale and softcap in place.
    pub(crate) unsafe fn shape<V: Vector>(logits: &mut [f32], shape: &HeadShape) {
        let scale = shape.logit_scale.unwrap_or(1.0);
        for_lanes!(V, logits.len(), |i, n| {
            // SAFETY: inside the slice; the CPU has V.
            unsafe {
                let at = logits.as_mut_ptr().add(i);
                shaped(V::load(at, n), scale, shape.softcap).store(at, n);
            }
        });
    }
}

vector_kernel! {
    /// Computes `exp((l − largest) / temperature)` in place.
    pub(crate) unsafe fn relative_weights<V: Vector>(logits: &mut [f32], temperature: f32) {
        let start = logits.as_mut_ptr();
        // SAFETY: inside the slice; the CPU has V.
        unsafe {
            let mut largest = V::splat(f32::NEG_INFINITY);
            for_lanes!(V, logits.len(), |i, n| {
                let logit = V::load(start.add(i), n);
                largest = largest.max(if n < V::LANES { logit.keep_first(n, f32::NEG_INFINITY) } else { logit });
            });
            let (largest, factor) = (V::splat(largest.largest()), V::splat(1.0 / temperature));
            for_lanes!(V, logits.len(), |i, n| {
                let at = start.add(i);
                exp(V::load(at, n).sub(largest).mul(factor)).store(at, n);
            });
        }
    }
}

/// Computes gradients in chunks. The logits of chunks that are not kept are computed again.
pub(crate) fn backward(
    cpu: &Cpu,
    call: Head,
    log_sum_exp: &[f32],
    d_log_prob: &[f32],
    mut gradients: HeadGradients,
    mut memory: LogitMemory,
) {
    let Head { hidden, weights, targets, ref shape, .. } = call;
    let (dtype, kept_rows) = (weights.weight.dtype(), memory.kept.rows());
    for strip in strips(hidden.rows(), memory.chunk, weights.weight.rows(), STRIP) {
        let (rows, tokens) = (&strip.rows, &strip.tokens);
        let mut logits = strip.place(&mut memory);
        if rows.end > kept_rows {
            strip.logits(hidden, &weights, logits.reborrow()).run(cpu);
        }
        let rows_of_logits = RowsMut::<f32>::new(logits.reborrow());
        cpu.parallel_ranges(rows.len(), ROWS, |_, range| {
            let mut rest = targets.of_rows(rows.start + range.start..rows.start + range.end);
            for r in range {
                let row = rows.start + r;
                let count = targets.rows[rest.clone()].partition_point(|&r| r as usize == row);
                let predictions = rest.start..rest.start + count;
                rest.start = predictions.end;
                let (targets, d) = (&targets.targets[predictions.clone()], &d_log_prob[predictions]);
                // SAFETY: row `r` belongs to this block alone.
                let logits = unsafe { rows_of_logits.row(r) };
                differentiate(cpu, logits, tokens.start, shape, log_sum_exp[row], targets, d, dtype);
            }
        });
        add_gradients(cpu, &strip, &logits, hidden, &weights, &mut gradients);
    }
}

/// Adds the gradients of a strip, whose derivatives have replaced its logits.
pub(super) fn add_gradients(
    cpu: &Cpu,
    strip: &Strip,
    logits: &ViewMut,
    hidden: View,
    weights: &HeadWeights,
    gradients: &mut HeadGradients,
) {
    let gradient = match weights.weight.dtype() {
        DType::F32 => logits.view(),
        DType::Bf16 => logits.front_half(),
    };
    if let Some(bias) = &mut gradients.bias {
        cpu.bias_backward(gradient, bias.reborrow().col_range(strip.tokens.clone()));
    }
    strip.back(gradient, hidden, weights, gradients).for_each(|product| product.run(cpu));
}

/// Replaces raw logits of a row, from token `first` on, by the gradient of `Σ d · log_prob`, in the
/// type of the weights (bf16 fills the first half of the row).
fn differentiate(
    cpu: &Cpu,
    logits: &mut [f32],
    first: usize,
    shape: &HeadShape,
    log_sum_exp: f32,
    targets: &[u32],
    d: &[f32],
    dtype: DType,
) {
    let total: f32 = d.iter().sum();
    let len = logits.len();
    let place_of = |target: u32| (target as usize).checked_sub(first).filter(|&place| place < len);
    scratch::with_f32(targets.len(), |at_targets| {
        // At a target of high probability the two terms nearly cancel, so they meet in f32 before
        // any rounding.
        for (gradient, &target) in at_targets.iter_mut().zip(targets) {
            let Some(place) = place_of(target) else { continue };
            let (p, slope) = probability(logits[place], shape, log_sum_exp);
            let asked: f32 = targets.iter().zip(d).filter(|(t, _)| **t == target).map(|(_, d)| d).sum();
            *gradient = (asked - total * p) * slope;
        }
        with_element!(dtype, E => {
            let start = logits.as_mut_ptr();
            // SAFETY: the slice holds the logits; an E is no wider than the f32 that it overwrites.
            unsafe { gradients::<E>(cpu.isa(), start, len, shape, log_sum_exp, total) };
            for (gradient, &target) in at_targets.iter().zip(targets) {
                let Some(place) = place_of(target) else { continue };
                // SAFETY: the index is inside the logits.
                unsafe { *start.cast::<E>().add(place) = Element::from_f32(*gradient) };
            }
        });
    });
}

/// Returns the probability of a raw logit and the derivative of scale and softcap.
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
    /// Writes `-total · p · slope` for each of `len` raw logits at `row`, as type E.
    unsafe fn gradients<V: Vector, E: Element>(
        row: *mut f32,
        len: usize,
        shape: &HeadShape,
        log_sum_exp: f32,
        total: f32,
    ) {
        // SAFETY: inside the row; writes never pass reads, and a register is read before it is
        // written.
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
