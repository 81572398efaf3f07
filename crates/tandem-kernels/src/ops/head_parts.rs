//! Vocabulary-parallel head: the statistics of each part, and how scores are made from them.

use crate::ops::HeadScores;

/// Id of a token that another part of the vocabulary or embedding table holds.
pub const ELSEWHERE: u32 = u32::MAX;

/// Numbers per row: largest logit m, Σ exp(l − m), Σ exp(l − m)·(l − m), Σ l, Σ exp(l − m)².
const OF_ROW: usize = 5;
/// Numbers per prediction: the place of the target (one of the constants below) and its logit.
const OF_PREDICTION: usize = 2;

/// The target is in another part.
pub(crate) const NOT_HERE: f64 = 0.0;
/// The target is here, but an earlier logit equals it or a logit here exceeds it.
pub(crate) const PASSED_OVER: f64 = 1.0;
/// The target is here and is the first of the largest logits here.
pub(crate) const FIRST: f64 = 2.0;

/// Statistics of all parts for R rows and P predictions.
#[derive(Clone, Debug)]
pub struct HeadParts {
    /// First part of this rank.
    first: usize,
    /// Part that a kernel works on.
    index: usize,
    rows: usize,
    predictions: usize,
    /// For each part `[R, 5]`, then `[P, 2]`.
    numbers: Vec<f64>,
}

impl HeadParts {
    /// Allocates the numbers of `count` parts, of which those from `index` on are computed here: one for
    /// each block of [`Head::blocks`](crate::ops::Head::blocks).
    ///
    /// # Panics
    /// If there is no such part.
    pub fn new(index: usize, count: usize, rows: usize, predictions: usize) -> Self {
        assert!(index < count, "part {index} of {count}");
        let numbers = vec![0.0; count * Self::num_numbers(rows, predictions)];
        Self { first: index, index, rows, predictions, numbers }
    }

    /// Returns the numbers of all parts, part after part. The caller fills in the other parts
    /// before [`HeadParts::join`].
    pub fn numbers_mut(&mut self) -> &mut [f64] {
        &mut self.numbers
    }

    /// Moves on to the numbers of a block, counted from this rank's first.
    pub(crate) fn work_on(&mut self, block: usize) {
        self.index = self.first + block;
    }

    /// Returns whether there are numbers for so many blocks.
    pub(crate) fn has(&self, blocks: usize) -> bool {
        let len = Self::num_numbers(self.rows, self.predictions);
        (self.first + blocks) * len <= self.numbers.len()
    }

    /// Returns the rows and predictions.
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.rows, self.predictions)
    }

    /// Returns the number of numbers of a part.
    pub(crate) fn num_numbers(rows: usize, predictions: usize) -> usize {
        OF_ROW * rows + OF_PREDICTION * predictions
    }

    /// Returns this part's numbers: rows, then predictions.
    pub(crate) fn own_numbers_mut(&mut self) -> &mut [f64] {
        let len = Self::num_numbers(self.rows, self.predictions);
        &mut self.numbers[self.index * len..(self.index + 1) * len]
    }

    /// Returns this part's numbers of rows `[R, 5]` and of predictions `[P, 2]`.
    pub(crate) fn own_mut(&mut self) -> (&mut [[f64; OF_ROW]], &mut [[f64; OF_PREDICTION]]) {
        let split = OF_ROW * self.rows;
        let (rows, predictions) = self.own_numbers_mut().split_at_mut(split);
        (rows.as_chunks_mut().0, predictions.as_chunks_mut().0)
    }

    /// Makes scores from the numbers of all parts, which together have `vocabulary` tokens. `rows`
    /// are the rows of the predictions. The same numbers give the same bits everywhere.
    ///
    /// # Panics
    /// If the number of rows differs from the number of predictions.
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
            // f32::max ignores NaN, as the kernel's does; the sums carry it.
            let largest = parts().map(|(rows, _)| rows[row][0]).fold(f64::NEG_INFINITY, f64::max);
            let (mut sum, mut weighted, mut total, mut squares) = (0.0, 0.0, 0.0, 0.0);
            for (rows, _) in parts() {
                let [own, own_sum, own_weighted, own_total, own_squares] = rows[row];
                let below = own - largest;
                let factor = if below == 0.0 { 1.0 } else { below.exp() };
                sum += factor * own_sum;
                weighted += factor * (own_weighted + own_sum * below);
                total += own_total;
                squares += factor * factor * own_squares;
            }
            let of_sum = sum.ln();
            scores.log_sum_exp[row] = (largest + of_sum) as f32;
            scores.entropy[row] = (of_sum - weighted / sum) as f32;
            scores.log_sum_squares[row] = (squares.ln() - 2.0 * of_sum) as f32;
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
