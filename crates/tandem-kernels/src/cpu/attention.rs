//! Attention over a forest.

use rayon::prelude::*;

use crate::cpu::Cpu;
use crate::cpu::rows::RowsMut;
use crate::ops::{AttentionShape, Visible};
use crate::{Element, Forest, View, ViewMut, with_element};

fn dot<E: Element>(a: &[E], b: &[E]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a.to_f32() * b.to_f32()).sum()
}

/// `sum += factor · x`.
fn add_scaled<E: Element>(sum: &mut [f32], factor: f32, x: &[E]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += factor * x.to_f32();
    }
}

fn store<E: Element>(from: &[f32], to: &mut [E]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = E::from_f32(*from);
    }
}

/// The score after scaling and softcap.
fn score(shape: &AttentionShape, product: f32) -> f32 {
    let scaled = product * shape.scale;
    shape.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh())
}

/// The rows that the token at `position` of a segment sees, into `rows`.
fn visible(forest: &Forest, shape: &AttentionShape, segment: usize, position: u32, rows: &mut Vec<u32>) {
    let first = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
    rows.resize((position + 1 - first) as usize, 0);
    forest.path_rows(segment, first..position + 1, rows);
}

/// Softmax of one query's scores over `rows`, weighted sum of the values in `out`; returns log Σ exp.
fn attend<E: Element>(
    shape: &AttentionShape,
    q: &[E],
    k: View,
    v: View,
    column: usize,
    rows: &[u32],
    weights: &mut Vec<f32>,
    out: &mut [E],
) -> f32 {
    let columns = column..column + shape.head_dim;
    weights.clear();
    weights.extend(rows.iter().map(|&r| score(shape, dot(q, &k.row::<E>(r as usize)[columns.clone()]))));
    let largest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for weight in weights.iter_mut() {
        *weight = (*weight - largest).exp();
        sum += *weight;
    }
    let mut mean = vec![0.0; shape.head_dim];
    for (&r, weight) in rows.iter().zip(weights.iter()) {
        add_scaled(&mut mean, weight / sum, &v.row::<E>(r as usize)[columns.clone()]);
    }
    store(&mean, out);
    largest + sum.ln()
}

pub(crate) fn forward(
    cpu: &Cpu,
    q: View,
    k: View,
    v: View,
    forest: &Forest,
    shape: &AttentionShape,
    out: ViewMut,
    log_sum_exp: ViewMut,
) {
    let group = shape.heads / shape.kv_heads;
    let width = shape.head_dim;
    let lse = RowsMut::<f32>::new(log_sum_exp);
    with_element!(q.dtype(), E => {
        let out = RowsMut::<E>::new(out);
        cpu.pool.install(|| (0..shape.heads).into_par_iter().for_each(|head| {
            let (mut rows, mut weights) = (Vec::new(), Vec::new());
            for (s, segment) in forest.segments.iter().enumerate() {
                for t in segment.range.start as usize..segment.range.end as usize {
                    visible(forest, shape, s, forest.positions[t], &mut rows);
                    let q = &q.row::<E>(t)[head * width..][..width];
                    // SAFETY: this head's columns belong to this task alone.
                    let (out, lse) = unsafe { (out.part(t, head * width, width), lse.part(t, head, 1)) };
                    lse[0] = attend(shape, q, k, v, head / group * width, &rows, &mut weights, out);
                }
            }
        }));
    });
}

pub(crate) fn backward(
    cpu: &Cpu,
    q: View,
    k: View,
    v: View,
    out: View,
    log_sum_exp: View,
    d_out: View,
    forest: &Forest,
    shape: &AttentionShape,
    dq: ViewMut,
    dk: ViewMut,
    dv: ViewMut,
    sums: ViewMut,
) {
    let group = shape.heads / shape.kv_heads;
    let width = shape.head_dim;
    let sums = RowsMut::<f32>::new(sums);
    with_element!(q.dtype(), E => {
        let (dq, dk, dv) = (RowsMut::<E>::new(dq), RowsMut::<E>::new(dk), RowsMut::<E>::new(dv));
        cpu.pool.install(|| (0..shape.kv_heads).into_par_iter().for_each(|kv_head| {
            let columns = kv_head * width..(kv_head + 1) * width;
            // SAFETY: this key/value head's columns belong to this task alone, and only one part lives at a time.
            let sum = |row: usize, values: usize| unsafe {
                sums.part(row, (values * shape.kv_heads + kv_head) * width, width)
            };
            for t in 0..q.rows() {
                sum(t, 0).fill(0.0);
                sum(t, 1).fill(0.0);
            }
            let mut rows = Vec::new();
            let mut sum_dq = vec![0.0; width];
            for (s, segment) in forest.segments.iter().enumerate() {
                for t in segment.range.start as usize..segment.range.end as usize {
                    visible(forest, shape, s, forest.positions[t], &mut rows);
                    for head in kv_head * group..(kv_head + 1) * group {
                        let own = head * width..(head + 1) * width;
                        let q = &q.row::<E>(t)[own.clone()];
                        let d_out = &d_out.row::<E>(t)[own.clone()];
                        let lse = log_sum_exp.row::<f32>(t)[head];
                        let mean = dot(d_out, &out.row::<E>(t)[own]);
                        sum_dq.fill(0.0);
                        for &r in &rows {
                            let r = r as usize;
                            let (k, v) = (&k.row::<E>(r)[columns.clone()], &v.row::<E>(r)[columns.clone()]);
                            let score = score(shape, dot(q, k));
                            let p = (score - lse).exp();
                            let capped = shape.softcap.map_or(1.0, |cap| 1.0 - (score / cap).powi(2));
                            let ds = p * (dot(d_out, v) - mean) * capped * shape.scale;
                            add_scaled(&mut sum_dq, ds, k);
                            add_scaled(sum(r, 0), ds, q);
                            add_scaled(sum(r, 1), p, d_out);
                        }
                        // SAFETY: this head's columns belong to this task alone.
                        store(&sum_dq, unsafe { dq.part(t, head * width, width) });
                    }
                }
            }
            for t in 0..forest.num_tokens() {
                // SAFETY: as above.
                unsafe {
                    store(sum(t, 0), dk.part(t, columns.start, width));
                    store(sum(t, 1), dv.part(t, columns.start, width));
                }
            }
        }));
    });
}

pub(crate) fn decode(
    cpu: &Cpu,
    q: View,
    k: View,
    v: View,
    visible: &Visible,
    shape: &AttentionShape,
    out: ViewMut,
) {
    let group = shape.heads / shape.kv_heads;
    let width = shape.head_dim;
    with_element!(q.dtype(), E => {
        let out = RowsMut::<E>::new(out);
        cpu.pool.install(|| (0..q.rows() * shape.heads).into_par_iter().for_each(|task| {
            let (t, head) = (task / shape.heads, task % shape.heads);
            let mut rows: Vec<u32> = visible.of(t).iter().cloned().flatten().collect();
            let hidden = shape.window.map_or(0, |window| rows.len().saturating_sub(window as usize));
            rows.drain(..hidden);
            let q = &q.row::<E>(t)[head * width..][..width];
            // SAFETY: this row's part of this head belongs to this task alone.
            let out = unsafe { out.part(t, head * width, width) };
            attend(shape, q, k, v, head / group * width, &rows, &mut Vec::new(), out);
        }));
    });
}
