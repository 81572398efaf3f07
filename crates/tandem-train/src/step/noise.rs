//! NEFTune: noise on the embeddings of the policy's training passes (arXiv 2310.05914).
//!
//! The draws are a function of seed, update, dataset row, position and column. Micro-batches, ranks, packing
//! and a shared prompt change none of them.

use tandem_kernels::ops::NoiseRow;
use tandem_model::Decoder;

use crate::config::Config;
use crate::draw::draw;
use crate::recipe::MicroBatch;

/// Noise on embeddings.
pub(super) struct EmbeddingNoise {
    /// `None` adds no noise.
    alpha: Option<f64>,
    hidden_size: usize,
    seed: u64,
    /// 1-based update that the step leads to.
    update: u64,
    /// Of each token of the last micro-batch.
    rows: Vec<NoiseRow>,
}

impl EmbeddingNoise {
    pub(super) fn new(config: &Config, decoder: &Decoder) -> Self {
        let (alpha, hidden_size) = (config.train.neftune_noise_alpha, decoder.spec().hidden_size);
        Self { alpha, hidden_size, seed: config.seed, update: 0, rows: Vec::new() }
    }

    /// Draws anew from now on.
    pub(super) fn begin_step(&mut self, update: u64) {
        self.update = update;
    }

    /// Returns the noise of each token: uniform in ±alpha / √(L·D), where L is the length of the row's
    /// longest text in tokens.
    pub(super) fn of(&mut self, micro: &MicroBatch) -> Option<&[NoiseRow]> {
        let alpha = self.alpha?;
        let forest = &micro.forest;
        self.rows.clear();
        for (&row, &end) in micro.sources.iter().zip(&micro.row_ends) {
            let key = draw(&[self.seed, self.update, u64::from(row), PURPOSE]);
            for token in self.rows.len()..end as usize {
                let elements = f64::from(forest.lengths[token]) * self.hidden_size as f64;
                // Positions are far apart in the sequence of draws of a row, which a column counts.
                let key = key.wrapping_add(u64::from(forest.positions[token]).wrapping_mul(POSITION));
                self.rows.push(NoiseRow { key, scale: (alpha / elements.sqrt()) as f32 });
            }
        }
        // Rows that a plan assumes have no ends.
        self.rows.resize(forest.num_tokens(), NoiseRow::default());
        Some(&self.rows)
    }
}

/// Separates these draws from others with the same numbers.
const PURPOSE: u64 = 0x4e45_4654;

/// An odd number without a small multiple near that of the draws' increment.
const POSITION: u64 = 0xd1b5_4a32_d192_ed03;
