//! Order of rows in an epoch, and the rows of each step and micro-batch.
//!
//! All of it depends on seed, epoch, number of rows and batch size, and not on the number of ranks.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::batch::mersenne::Mersenne;

/// The order of an epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// A permutation by seed and epoch.
    #[default]
    Shuffled,
    /// The files' order in every epoch.
    Sequential,
}

/// Returns the rows of an epoch in the order of visits `[num_rows]`.
///
/// `Shuffled` equals `torch.randperm(num_rows)` of torch 2.15 with a CPU generator seeded `seed +
/// epoch`, as accelerate's `SeedableRandomSampler` seeds it. Above 2³²/20 rows torch uses 64-bit
/// numbers and the order differs.
pub fn epoch_order(num_rows: usize, order: Order, seed: u64, epoch: u64) -> Vec<u32> {
    assert!(u32::try_from(num_rows).is_ok(), "{num_rows} rows, at most 2^32 are numbered");
    let mut rows: Vec<u32> = (0..num_rows as u32).collect();
    if order == Order::Shuffled {
        let mut generator = Mersenne::new(seed.wrapping_add(epoch));
        for i in 0..num_rows.saturating_sub(1) {
            let offset = generator.next_u32() as usize % (num_rows - i);
            rows.swap(i, i + offset);
        }
    }
    rows
}

/// Sampler of global batches: step `s` takes rows of epoch `s / steps_per_epoch`.
///
/// The last batch of an epoch may be smaller, as in the HF Trainer.
pub struct BatchSampler {
    num_rows: usize,
    batch_size: usize,
    order: Order,
    seed: u64,
    /// Epoch whose order `rows` holds.
    epoch: Option<u64>,
    rows: Vec<u32>,
}

impl BatchSampler {
    /// Creates a sampler of `batch_size` rows or pairs per step, over all ranks.
    ///
    /// # Panics
    /// If there are no rows or the batch size is 0.
    pub fn new(num_rows: usize, batch_size: usize, order: Order, seed: u64) -> Self {
        assert!(num_rows > 0 && batch_size > 0, "{num_rows} rows in batches of {batch_size}");
        Self { num_rows, batch_size, order, seed, epoch: None, rows: Vec::new() }
    }

    /// Returns the number of steps of an epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        self.num_rows.div_ceil(self.batch_size) as u64
    }

    /// Returns the epoch of a 0-based step, and the epochs completed after it, as `epoch` in TRL's
    /// log.
    pub fn epoch(&self, step: u64) -> (u64, f64) {
        (step / self.steps_per_epoch(), (step + 1) as f64 / self.steps_per_epoch() as f64)
    }

    /// Returns the rows of a 0-based step.
    pub fn rows(&mut self, step: u64) -> &[u32] {
        let epoch = step / self.steps_per_epoch();
        if self.epoch != Some(epoch) {
            self.rows = epoch_order(self.num_rows, self.order, self.seed, epoch);
            self.epoch = Some(epoch);
        }
        let start = (step % self.steps_per_epoch()) as usize * self.batch_size;
        &self.rows[start..(start + self.batch_size).min(self.num_rows)]
    }
}

/// Size limit of one forward and backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MicroBatchSize {
    /// Maximum number of forest tokens, shared prefixes counted once.
    Tokens(usize),
    /// Number of rows.
    Rows(usize),
}

/// Divides the rows of a global batch into micro-batches, greedily and in order. `tokens[i]` is the
/// number of tokens that row `i` adds. A row larger than the limit forms a micro-batch of its own.
///
/// # Panics
/// If the limit is 0.
pub fn cut(tokens: &[usize], budget: MicroBatchSize) -> Vec<Range<usize>> {
    let (MicroBatchSize::Tokens(limit) | MicroBatchSize::Rows(limit)) = budget;
    assert!(limit > 0, "a micro-batch of nothing");
    let mut cuts: Vec<Range<usize>> = Vec::new();
    let mut used = 0;
    for (row, &tokens) in tokens.iter().enumerate() {
        let cost = if matches!(budget, MicroBatchSize::Rows(_)) { 1 } else { tokens };
        match cuts.last_mut() {
            Some(last) if used + cost <= limit => {
                last.end = row + 1;
                used += cost;
            }
            _ => {
                cuts.push(row..row + 1);
                used = cost;
            }
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference: the first five numbers of torch 2.15's `randperm` and `Σ (i+1)·p[i]`.
    #[test]
    fn shuffling_is_torch_randperm() {
        let cases: [(usize, u64, [u32; 5], u64); 5] = [
            (10, 42, [2, 6, 1, 8, 4], 268),
            (256, 43, [68, 64, 43, 252, 197], 4_249_170),
            (65_536, 42, [56422, 2463, 59940, 8691, 57862], 70_329_901_969_499),
            (70_000, (1 << 32) + 5, [53411, 50200, 53621, 48915, 22746], 85_908_184_540_399),
            (1 << 20, 42, [121_958, 674_418, 139_722, 368_094, 271_174], 288_246_523_124_694_932),
        ];
        for (num_rows, seed, first, sum) in cases {
            for epoch in [0, 3] {
                let order = epoch_order(num_rows, Order::Shuffled, seed - epoch, epoch);
                assert_eq!(order[..5], first, "n = {num_rows}");
                let found: u64 = order.iter().zip(1..).map(|(&row, i)| u64::from(row) * i).sum();
                assert_eq!(found, sum, "n = {num_rows}");
            }
        }
        assert!(epoch_order(0, Order::Shuffled, 1, 1).is_empty());
        assert_eq!(epoch_order(1, Order::Shuffled, 1, 1), [0]);
        assert_eq!(epoch_order(4, Order::Sequential, 1, 1), [0, 1, 2, 3]);
    }

    #[test]
    fn an_epoch_visits_every_row_once_and_keeps_the_last_incomplete_batch() {
        let mut batches = BatchSampler::new(10, 4, Order::Shuffled, 7);
        assert_eq!(batches.steps_per_epoch(), 3);
        for epoch in 0..2 {
            let mut seen: Vec<u32> = (0..3).flat_map(|s| batches.rows(3 * epoch + s).to_vec()).collect();
            assert_eq!(seen, epoch_order(10, Order::Shuffled, 7, epoch));
            seen.sort_unstable();
            assert_eq!(seen, (0..10).collect::<Vec<_>>());
        }
        assert_eq!(batches.rows(2).len(), 2);
        // Going back, as a resumed run does, gives the same rows.
        let again = batches.rows(0).to_vec();
        assert_eq!(again, BatchSampler::new(10, 4, Order::Shuffled, 7).rows(0));
        assert_eq!(batches.epoch(3), (1, 4.0 / 3.0));
    }

    #[test]
    fn micro_batches_are_greedy_in_order() {
        assert_eq!(cut(&[3, 3, 3, 9, 1, 1], MicroBatchSize::Tokens(6)), [0..2, 2..3, 3..4, 4..6]);
        assert_eq!(cut(&[3, 3, 3, 9, 1], MicroBatchSize::Rows(2)), [0..2, 2..4, 4..5]);
        assert!(cut(&[], MicroBatchSize::Tokens(6)).is_empty());
    }
}
