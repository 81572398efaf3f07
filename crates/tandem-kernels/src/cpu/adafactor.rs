//! Second moments of Adafactor and directions by them.

use super::Cpu;
use super::rows::RowsMut;
use crate::{View, ViewMut};

/// Added to squares, as `eps[0]` of transformers' `Adafactor`.
const EPS: f32 = 1e-30;

/// Elements of a task.
const BLOCK: usize = 1 << 14;

/// Columns of a block of column sums.
const COLUMNS: usize = 128;

fn square(g: f32) -> f32 {
    g * g + EPS
}

/// Parts of an average that the old and the new number have.
fn shares(beta: f64) -> [f32; 2] {
    [beta as f32, (1.0 - beta) as f32]
}

impl Cpu {
    pub(crate) fn factored_moments(&self, g: View, beta: f64, row: &mut [f32], col: &mut [f32]) {
        let ((rows, cols), [old, new]) = (g.shape(), shares(beta));
        let (of_rows, of_cols) = (RowsMut::from_slice(row), RowsMut::from_slice(col));
        self.parallel_ranges(rows, (BLOCK / cols.max(1)).max(1), |_, range| {
            // SAFETY: ranges are disjoint.
            let means = unsafe { of_rows.part(0, range.start, range.len()) };
            for (mean, row) in means.iter_mut().zip(range) {
                let sum: f64 = g.row::<f32>(row).iter().map(|&g| f64::from(square(g))).sum();
                *mean = *mean * old + (sum / cols as f64) as f32 * new;
            }
        });
        self.parallel_ranges(cols, COLUMNS, |_, range| {
            let mut sums = [0.0; COLUMNS];
            for row in 0..rows {
                for (sum, &g) in sums.iter_mut().zip(&g.row::<f32>(row)[range.clone()]) {
                    *sum += f64::from(square(g));
                }
            }
            // SAFETY: ranges are disjoint.
            let means = unsafe { of_cols.part(0, range.start, range.len()) };
            for (mean, sum) in means.iter_mut().zip(sums) {
                *mean = *mean * old + (sum / rows as f64) as f32 * new;
            }
        });
    }

    pub(crate) fn factored_direction(&self, g: ViewMut, row: &[f32], col: &[f32]) {
        let (rows, cols) = g.shape();
        let mean = (row.iter().map(|&x| f64::from(x)).sum::<f64>() / rows.max(1) as f64) as f32;
        let g = RowsMut::<f32>::new(g);
        self.parallel_ranges(rows, (BLOCK / cols.max(1)).max(1), |_, range| {
            for index in range {
                // SAFETY: rows are disjoint.
                let g = unsafe { g.part(index, 0, cols) };
                let of_row = 1.0 / (row[index] / mean).sqrt();
                for (g, col) in g.iter_mut().zip(col) {
                    *g *= of_row * (1.0 / col.sqrt());
                }
            }
        });
    }

    pub(crate) fn whole_moments(&self, g: &mut [f32], beta: f64, v: &mut [f32]) {
        let (len, [old, new]) = (g.len(), shares(beta));
        let (g, v) = (RowsMut::from_slice(g), RowsMut::from_slice(v));
        self.parallel_ranges(len, BLOCK, |_, range| {
            // SAFETY: ranges are disjoint.
            let [g, v] = [&g, &v].map(|rows| unsafe { rows.part(0, range.start, range.len()) });
            for (g, v) in g.iter_mut().zip(v) {
                *v = *v * old + square(*g) * new;
                *g *= 1.0 / v.sqrt();
            }
        });
    }
}
