//! Second moments of Adafactor and directions by them.

use std::ops::Range;

use super::rows::RowsMut;
use super::vector::vector_kernel;
use super::{Cpu, scratch};
use crate::{View, ViewMut};

/// Added to squares, as `eps[0]` of transformers' `Adafactor`.
const EPS: f32 = 1e-30;

/// Elements of a task.
const BLOCK: usize = 1 << 14;

/// Rows whose squares are added up in turns.
const TOGETHER: usize = 8;

/// Columns of a block of column sums.
const COLUMNS: usize = 128;

fn square(g: f32) -> f32 {
    g * g + EPS
}

/// Parts of an average that the old and the new number have.
fn shares(beta: f64) -> [f32; 2] {
    [beta as f32, (1.0 - beta) as f32]
}

vector_kernel! {
    /// Adds up the squares of up to [`TOGETHER`] rows, each from its first to its last element.
    unsafe fn sum_rows<V: Vector>(g: &View, rows: Range<usize>) -> [f64; TOGETHER] {
        let mut sums = [0.0; TOGETHER];
        let row_of = |i: usize| g.row::<f32>(rows.start + i.min(rows.len() - 1));
        let of_rows: [&[f32]; TOGETHER] = std::array::from_fn(row_of);
        for col in 0..of_rows[0].len() {
            // Each addition of a row waits for the one before it: rows take turns.
            for i in 0..TOGETHER {
                sums[i] += f64::from(square(of_rows[i][col]));
            }
        }
        sums
    }
}

vector_kernel! {
    /// Adds up the squares of columns.
    unsafe fn sum_columns<V: Vector>(g: &View, cols: Range<usize>, sums: &mut [f64]) {
        for row in 0..g.rows() {
            for (sum, &g) in sums.iter_mut().zip(&g.row::<f32>(row)[cols.clone()]) {
                *sum += f64::from(square(g));
            }
        }
    }
}

vector_kernel! {
    /// Computes `1 / √x`.
    unsafe fn inverse_roots<V: Vector>(x: &[f32], to: &mut [f32]) {
        for (to, x) in to.iter_mut().zip(x) {
            *to = 1.0 / x.sqrt();
        }
    }
}

vector_kernel! {
    /// Computes `g *= of_row · of_col`.
    unsafe fn direct_row<V: Vector>(g: &mut [f32], of_row: f32, of_cols: &[f32]) {
        for (g, of_col) in g.iter_mut().zip(of_cols) {
            *g *= of_row * of_col;
        }
    }
}

vector_kernel! {
    /// Moves second moments, and computes `g /= √v`.
    unsafe fn direct_whole<V: Vector>(g: &mut [f32], v: &mut [f32], shares: [f32; 2]) {
        for (g, v) in g.iter_mut().zip(v) {
            *v = *v * shares[0] + square(*g) * shares[1];
            *g *= 1.0 / v.sqrt();
        }
    }
}

impl Cpu {
    pub(crate) fn factored_moments(&self, g: View, beta: f64, row: &mut [f32], col: &mut [f32]) {
        let ((rows, cols), [old, new]) = (g.shape(), shares(beta));
        let (of_rows, of_cols) = (RowsMut::from_slice(row), RowsMut::from_slice(col));
        let block = (BLOCK / cols.max(1)).max(1).next_multiple_of(TOGETHER);
        self.parallel_ranges(rows, block, |_, range| {
            // SAFETY: ranges are disjoint.
            let means = unsafe { of_rows.part(0, range.start, range.len()) };
            for (means, first) in means.chunks_mut(TOGETHER).zip(range.step_by(TOGETHER)) {
                // SAFETY: these rows exist.
                let sums = unsafe { sum_rows(self.isa(), &g, first..first + means.len()) };
                for (mean, sum) in means.iter_mut().zip(sums) {
                    *mean = *mean * old + (sum / cols as f64) as f32 * new;
                }
            }
        });
        self.parallel_ranges(cols, COLUMNS, |_, range| {
            let mut sums = [0.0; COLUMNS];
            // SAFETY: these columns exist.
            unsafe { sum_columns(self.isa(), &g, range.clone(), &mut sums[..range.len()]) };
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
        scratch::with_f32(cols, |of_cols| {
            // SAFETY: the lengths are equal.
            unsafe { inverse_roots(self.isa(), col, of_cols) };
            let of_cols = &*of_cols;
            self.parallel_ranges(rows, (BLOCK / cols.max(1)).max(1), |_, range| {
                for index in range {
                    let of_row = 1.0 / (row[index] / mean).sqrt();
                    // SAFETY: rows are disjoint, and as long as there are columns.
                    unsafe { direct_row(self.isa(), g.part(index, 0, cols), of_row, of_cols) };
                }
            });
        });
    }

    pub(crate) fn whole_moments(&self, g: &mut [f32], beta: f64, v: &mut [f32]) {
        let (len, shares) = (g.len(), shares(beta));
        let (g, v) = (RowsMut::from_slice(g), RowsMut::from_slice(v));
        self.parallel_ranges(len, BLOCK, |_, range| {
            // SAFETY: ranges are disjoint, and of equal lengths.
            unsafe {
                let [g, v] = [&g, &v].map(|rows| rows.part(0, range.start, range.len()));
                direct_whole(self.isa(), g, v, shares);
            }
        });
    }
}
