//! A head whose vocabulary is split: what each part knows of a row's logits, and how the parts make scores.
//!
//! A part holds the weights of some tokens. Of every row it tells four numbers, of every prediction two; their size does
//! not depend on the vocabulary. A whole head is the only part.

use crate::ops::HeadScores;

/// Stands for a token that another part of a split table or vocabulary holds.
pub const ELSEWHERE: u32 = u32::MAX;

/// Numbers of a row: its largest logit m, Σ exp(l − m), Σ exp(l − m)·(l − m), Σ l.
const OF_ROW: usize = 4;
/// Numbers of a prediction: what the part says of the target (one of the constants below), and its logit.
const OF_PREDICTION: usize = 2;

/// The target is in another part.
pub(crate) const NOT_HERE: f64 = 0.0;
/// It is here, and a logit before it is as large or one here is larger.
pub(crate) const PASSED_OVER: f64 = 1.0;
/// It is here, and is the first of the largest here.
pub(crate) const FIRST: f64 = 2.0;

/// What all parts of a head tell of R rows and P predictions.
#[derive(Clone, Debug)]
pub struct HeadParts {
    index: usize,
    rows: usize,
    predictions: usize,
    /// By part: `[R, 4]`, then `[P, 2]`.
    numbers: Vec<f64>,
}

impl HeadParts {
    /// Room for the numbers of `count` parts, of which this one is part `index`.
    ///
    /// # Panics
    /// If there is no such part.
    pub fn new(index: usize, count: usize, rows: usize, predictions: usize) -> Self {
        assert!(index < count, "part {index} of {count}");
        let numbers = vec![0.0; count * Self::num_numbers(rows, predictions)];
        Self { index, rows, predictions, numbers }
    }

    /// The numbers of all parts, one part's after another's, each as many: those of the other parts are to be written here
    /// before [`HeadParts::join`].
    pub fn numbers_mut(&mut self) -> &mut [f64] {
        &mut self.numbers
    }

    /// Rows and predictions.
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.rows, self.predictions)
    }

    /// Numbers of a part.
    pub(crate) fn num_numbers(rows: usize, predictions: usize) -> usize {
        OF_ROW * rows + OF_PREDICTION * predictions
    }

    /// This part's numbers: those of rows, and then those of predictions.
    pub(crate) fn own_numbers_mut(&mut self) -> &mut [f64] {
        let len = Self::num_numbers(self.rows, self.predictions);
        &mut self.numbers[self.index * len..(self.index + 1) * len]
    }

    /// This part's numbers: those of rows `[R, 4]`, and of predictions `[P, 2]`.
    pub(crate) fn own_mut(&mut self) -> (&mut [[f64; OF_ROW]], &mut [[f64; OF_PREDICTION]]) {
        let split = OF_ROW * self.rows;
        let (rows, predictions) = self.own_numbers_mut().split_at_mut(split);
        (rows.as_chunks_mut().0, predictions.as_chunks_mut().0)
    }

    /// Makes scores of the numbers of all parts, which together have `vocabulary` tokens. `rows` are those of the
    /// predictions. The same numbers give the same bits everywhere.
    ///
    /// # Panics
    /// If there is not one row for each prediction.
    pub fn join(&self, rows: &[u32], vocabulary: usize, scores: &mut HeadScores) {
        assert_eq!(rows.len(), self.predictions, "rows of the predictions");
        scores.resize(self.rows, self.predictions);
        if self.numbers.is_empty() {
            return;
        }
        let parts = || {
            let len = Self::num_numbers(self.rows, self.predictions);
            self.numbers.chunks_exact(len).map(|part| {
                let (rows, predictions) = part.split_at(OF_ROW * self.rows);
                (rows.as_chunks::<OF_ROW>().0, predictions.as_chunks::<OF_PREDICTION>().0)
            })
        };
        // Each row's largest logit and log Σ exp, in f64.
        let mut of_rows = Vec::with_capacity(self.rows);
        for row in 0..self.rows {
            // f32::max passes over NaN, as the kernel's does; the sums carry it.
            let largest = parts().map(|(rows, _)| rows[row][0]).fold(f64::NEG_INFINITY, f64::max);
            let (mut sum, mut weighted, mut total) = (0.0, 0.0, 0.0);
            for (rows, _) in parts() {
                let [own, own_sum, own_weighted, own_total] = rows[row];
                let below = own - largest;
                let factor = if below == 0.0 { 1.0 } else { below.exp() };
                sum += factor * own_sum;
                weighted += factor * (own_weighted + own_sum * below);
                total += own_total;
            }
            let of_sum = sum.ln();
            scores.log_sum_exp[row] = (largest + of_sum) as f32;
            scores.entropy[row] = (of_sum - weighted / sum) as f32;
            scores.mean_logit[row] = (total / vocabulary as f64) as f32;
            of_rows.push((largest, largest + of_sum));
        }
        for (i, &row) in rows.iter().enumerate() {
            let row = row as usize;
            let (largest, lse) = of_rows[row];
            let mut is_before = true;
            for (rows, predictions) in parts() {
                let [place, logit] = predictions[i];
                if place != NOT_HERE {
                    scores.log_prob[i] = (logit - lse) as f32;
                    scores.hit[i] = place == FIRST && logit == largest && is_before;
                    break;
                }
                // An equal one in an earlier part comes first.
                is_before &= rows[row][0] < largest;
            }
        }
    }
}
