//! The head: chunks of logits, their statistics and their gradient.

use rayon::prelude::*;

use crate::cpu::Cpu;
use crate::cpu::rows::RowsMut;
use crate::ops::{HeadScores, HeadShape, Targets};
use crate::{Element, View, ViewMut, with_element};

/// Indices of the predictions that score rows `rows`.
fn predictions_of(targets: &Targets, rows: &std::ops::Range<usize>) -> std::ops::Range<usize> {
    let before = |row: usize| targets.rows.partition_point(|&r| (r as usize) < row);
    before(rows.start)..before(rows.end)
}

/// `logits[r, V] = cap(scale · (hidden wᵀ + bias))` of the given rows.
fn logits_of(cpu: &Cpu, hidden: View, w: View, bias: Option<View>, shape: &HeadShape, logits: ViewMut) {
    let scale = shape.logit_scale.unwrap_or(1.0);
    let logits = RowsMut::<f32>::new(logits);
    with_element!(w.dtype(), E => cpu.pool.install(|| {
        (0..hidden.rows()).into_par_iter().for_each(|r| {
            let hidden = hidden.row::<E>(r);
            // SAFETY: row `r` belongs to this task alone.
            for (token, logit) in unsafe { logits.row(r) }.iter_mut().enumerate() {
                let product: f32 = hidden.iter().zip(w.row::<E>(token)).map(|(h, w)| h.to_f32() * w.to_f32()).sum();
                *logit = scale * (product + bias.map_or(0.0, |bias| bias.row::<f32>(0)[token]));
                if let Some(cap) = shape.softcap {
                    *logit = cap * (*logit / cap).tanh();
                }
            }
        });
    }));
}

pub(crate) fn forward(
    cpu: &Cpu,
    hidden: View,
    w: View,
    bias: Option<View>,
    targets: Targets,
    shape: &HeadShape,
    scores: &mut HeadScores,
    mut logits: ViewMut,
) {
    let (chunk, rows) = (logits.rows(), hidden.rows());
    for start in (0..rows).step_by(chunk.max(1)) {
        let range = start..rows.min(start + chunk);
        logits_of(
            cpu,
            hidden.row_range(range.clone()),
            w,
            bias,
            shape,
            logits.reborrow().row_range(0..range.len()),
        );
        for row in range.clone() {
            let logits = logits.view().row::<f32>(row - start);
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let best = logits.iter().position(|&l| l == largest);
            let (mut sum, mut weighted, mut total) = (0.0f64, 0.0f64, 0.0f64);
            for &logit in logits {
                let e = f64::from(logit - largest).exp();
                sum += e;
                weighted += e * f64::from(logit - largest);
                total += f64::from(logit);
            }
            let lse = f64::from(largest) + sum.ln();
            scores.log_sum_exp[row] = lse as f32;
            scores.entropy[row] = (sum.ln() - weighted / sum) as f32;
            scores.mean_logit[row] = (total / logits.len() as f64) as f32;
            for i in predictions_of(&targets, &(row..row + 1)) {
                let target = targets.targets[i] as usize;
                scores.log_prob[i] = (f64::from(logits[target]) - lse) as f32;
                scores.hit[i] = best == Some(target);
            }
        }
    }
}

pub(crate) fn backward(
    cpu: &Cpu,
    hidden: View,
    w: View,
    bias: Option<View>,
    targets: Targets,
    shape: &HeadShape,
    log_sum_exp: &[f32],
    d_log_prob: &[f32],
    mut dhidden: ViewMut,
    mut dw: Option<ViewMut>,
    mut dbias: Option<ViewMut>,
    mut logits: ViewMut,
) {
    let (chunk, rows) = (logits.rows(), hidden.rows());
    let scale = shape.logit_scale.unwrap_or(1.0);
    for start in (0..rows).step_by(chunk.max(1)) {
        let range = start..rows.min(start + chunk);
        let count = range.len();
        let hidden = hidden.row_range(range.clone());
        logits_of(cpu, hidden, w, bias, shape, logits.reborrow().row_range(0..count));
        let slots = RowsMut::<f32>::new(logits.reborrow());
        cpu.pool.install(|| {
            range.clone().into_par_iter().for_each(|row| {
                // SAFETY: this row belongs to this task alone.
                let logits = unsafe { slots.row(row - start) };
                let predictions = predictions_of(&targets, &(row..row + 1));
                let total: f32 = d_log_prob[predictions.clone()].iter().sum();
                let capped = |logit: f32| shape.softcap.map_or(1.0, |cap| 1.0 - (logit / cap).powi(2));
                let picked: Vec<f32> =
                    predictions.clone().map(|i| capped(logits[targets.targets[i] as usize])).collect();
                for logit in logits.iter_mut() {
                    *logit = -total * (*logit - log_sum_exp[row]).exp() * capped(*logit) * scale;
                }
                for (i, capped) in predictions.zip(picked) {
                    logits[targets.targets[i] as usize] += d_log_prob[i] * capped * scale;
                }
            })
        });
        let logits = logits.view().row_range(0..count);
        with_element!(w.dtype(), E => {
            with_element!(dhidden.dtype(), H => {
                let dhidden = RowsMut::<H>::new(dhidden.reborrow().row_range(range));
                cpu.pool.install(|| (0..count).into_par_iter().for_each(|r| {
                    let mut sum = vec![0.0; w.cols()];
                    for (token, d) in logits.row::<f32>(r).iter().enumerate() {
                        let d = E::from_f32(*d).to_f32();
                        sum.iter_mut().zip(w.row::<E>(token)).for_each(|(sum, w)| *sum += d * w.to_f32());
                    }
                    // SAFETY: row `r` belongs to this task alone.
                    let row = unsafe { dhidden.row(r) };
                    row.iter_mut().zip(sum).for_each(|(row, sum)| *row = H::from_f32(sum));
                }));
            });
            if let Some(dw) = &mut dw {
                let dw = RowsMut::<f32>::new(dw.reborrow());
                cpu.pool.install(|| (0..w.rows()).into_par_iter().for_each(|token| {
                    // SAFETY: row `token` belongs to this task alone.
                    let dw = unsafe { dw.row(token) };
                    for r in 0..count {
                        let d = E::from_f32(logits.row::<f32>(r)[token]).to_f32();
                        dw.iter_mut().zip(hidden.row::<E>(r)).for_each(|(dw, h)| *dw += d * h.to_f32());
                    }
                }));
            }
        });
        if let Some(dbias) = &mut dbias {
            let dbias = dbias.reborrow().into_slice::<f32>();
            for r in 0..count {
                dbias.iter_mut().zip(logits.row::<f32>(r)).for_each(|(dbias, d)| *dbias += d);
            }
        }
    }
}
