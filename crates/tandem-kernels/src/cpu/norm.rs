//! RMSNorm and LayerNorm.

use rayon::prelude::*;

use crate::cpu::Cpu;
use crate::cpu::rows::RowsMut;
use crate::ops::BLOCK_ROWS;
use crate::{Element, View, ViewMut, with_element};

pub(crate) fn rms_norm(cpu: &Cpu, x: View, w: View, offset: f32, eps: f32, y: ViewMut, inverse_rms: ViewMut) {
    let w = w.as_slice::<f32>();
    let inverse = inverse_rms.into_slice::<f32>();
    with_element!(x.dtype(), X => with_element!(y.dtype(), Y => {
        let y = RowsMut::<Y>::new(y);
        cpu.pool.install(|| inverse.par_iter_mut().enumerate().for_each(|(t, inverse)| {
            let x = x.row::<X>(t);
            // SAFETY: row `t` belongs to this task alone.
            let y = unsafe { y.row(t) };
            let mean = x.iter().map(|x| x.to_f32() * x.to_f32()).sum::<f32>() / x.len() as f32;
            *inverse = 1.0 / (mean + eps).sqrt();
            for i in 0..x.len() {
                y[i] = Y::from_f32(x[i].to_f32() * *inverse * (w[i] + offset));
            }
        }));
    }));
}

/// `partial` has a row for each block of rows (none if there is no `dw`).
pub(crate) fn rms_norm_backward(
    cpu: &Cpu,
    x: View,
    w: View,
    offset: f32,
    inverse_rms: View,
    dy: View,
    dx: ViewMut,
    dw: Option<ViewMut>,
    mut partial: ViewMut,
) {
    let (tokens, width) = (x.rows(), x.cols());
    let w = w.as_slice::<f32>();
    let inverse = inverse_rms.as_slice::<f32>();
    let dx = RowsMut::<f32>::new(dx);
    let sums = RowsMut::<f32>::new(partial.reborrow());
    with_element!(x.dtype(), X => with_element!(dy.dtype(), Y => cpu.pool.install(|| {
        (0..tokens.div_ceil(BLOCK_ROWS)).into_par_iter().for_each(|block| {
            // SAFETY: row `block` belongs to this task alone.
            let sums = if dw.is_some() { unsafe { sums.row(block) } } else { &mut [] };
            sums.fill(0.0);
            for t in block * BLOCK_ROWS..tokens.min((block + 1) * BLOCK_ROWS) {
                // SAFETY: row `t` lies in this task's block.
                let dx = unsafe { dx.row(t) };
                let (x, dy, r) = (x.row::<X>(t), dy.row::<Y>(t), inverse[t]);
                let mut dot = 0.0;
                for i in 0..width {
                    dot += dy[i].to_f32() * (w[i] + offset) * x[i].to_f32();
                }
                let shift = dot * r * r * r / width as f32;
                for i in 0..width {
                    dx[i] += dy[i].to_f32() * (w[i] + offset) * r - x[i].to_f32() * shift;
                }
                for i in 0..sums.len() {
                    sums[i] += dy[i].to_f32() * x[i].to_f32() * r;
                }
            }
        });
    })));
    if let Some(dw) = dw {
        add_rows(partial.view(), dw);
    }
}

pub(crate) fn layer_norm(cpu: &Cpu, x: View, w: View, b: View, eps: f32, y: ViewMut, mean_inverse: ViewMut) {
    let (w, b) = (w.as_slice::<f32>(), b.as_slice::<f32>());
    let statistics = mean_inverse.into_slice::<f32>();
    with_element!(x.dtype(), X => with_element!(y.dtype(), Y => {
        let y = RowsMut::<Y>::new(y);
        cpu.pool.install(|| statistics.par_chunks_mut(2).enumerate().for_each(|(t, statistics)| {
            let x = x.row::<X>(t);
            // SAFETY: row `t` belongs to this task alone.
            let y = unsafe { y.row(t) };
            let count = x.len() as f32;
            let mean = x.iter().map(|x| x.to_f32()).sum::<f32>() / count;
            let variance = x.iter().map(|x| (x.to_f32() - mean).powi(2)).sum::<f32>() / count;
            let inverse = 1.0 / (variance + eps).sqrt();
            statistics.copy_from_slice(&[mean, inverse]);
            for i in 0..x.len() {
                y[i] = Y::from_f32((x[i].to_f32() - mean) * inverse * w[i] + b[i]);
            }
        }));
    }));
}

/// `partial` has a row `dw, db` for each block of rows (none if they are not wanted).
pub(crate) fn layer_norm_backward(
    cpu: &Cpu,
    x: View,
    w: View,
    mean_inverse: View,
    dy: View,
    dx: ViewMut,
    dw_db: Option<(ViewMut, ViewMut)>,
    mut partial: ViewMut,
) {
    let (tokens, width) = (x.rows(), x.cols());
    let w = w.as_slice::<f32>();
    let dx = RowsMut::<f32>::new(dx);
    let sums = RowsMut::<f32>::new(partial.reborrow());
    with_element!(x.dtype(), X => with_element!(dy.dtype(), Y => cpu.pool.install(|| {
        (0..tokens.div_ceil(BLOCK_ROWS)).into_par_iter().for_each(|block| {
            // SAFETY: row `block` belongs to this task alone.
            let sums = if dw_db.is_some() { unsafe { sums.row(block) } } else { &mut [] };
            sums.fill(0.0);
            let (dw, db) = sums.split_at_mut(sums.len() / 2);
            for t in block * BLOCK_ROWS..tokens.min((block + 1) * BLOCK_ROWS) {
                // SAFETY: row `t` lies in this task's block.
                let dx = unsafe { dx.row(t) };
                let (x, dy) = (x.row::<X>(t), dy.row::<Y>(t));
                let [mean, inverse] = *mean_inverse.row::<f32>(t) else { unreachable!("two columns") };
                let (mut sum, mut dot) = (0.0, 0.0);
                for i in 0..width {
                    let g = dy[i].to_f32() * w[i];
                    sum += g;
                    dot += g * (x[i].to_f32() - mean) * inverse;
                }
                let (sum, dot) = (sum / width as f32, dot / width as f32);
                for i in 0..width {
                    let normal = (x[i].to_f32() - mean) * inverse;
                    dx[i] += (dy[i].to_f32() * w[i] - sum - normal * dot) * inverse;
                }
                for i in 0..dw.len() {
                    dw[i] += dy[i].to_f32() * (x[i].to_f32() - mean) * inverse;
                    db[i] += dy[i].to_f32();
                }
            }
        });
    })));
    if let Some((dw, db)) = dw_db {
        let partial = partial.view();
        add_rows(partial.col_range(0..width), dw);
        add_rows(partial.col_range(width..2 * width), db);
    }
}

/// `sum[1,N] += Σ_r x[r,N]`, in order of rows.
fn add_rows(x: View, sum: ViewMut) {
    let sum = sum.into_slice::<f32>();
    for r in 0..x.rows() {
        for (sum, x) in sum.iter_mut().zip(x.row::<f32>(r)) {
            *sum += x;
        }
    }
}
