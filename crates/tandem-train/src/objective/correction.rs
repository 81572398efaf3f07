//! Importance sampling of answers that a server gave: its probabilities differ from the trainer's at the
//! same weights, as in TRL 1.16's `GRPOTrainer` with vLLM.
//!
//! The ratio is `exp(o − s)`, of the trainer's log-probability `o` to the server's `s` at the weights that
//! sampled. It is a weight of the policy gradient, without a gradient of its own.

/// Bounds of the ratios, and their scope.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplerCorrection {
    /// How ratios are bounded.
    pub mode: CorrectionMode,
    /// Least ratio.
    pub min: Option<f64>,
    /// Largest ratio.
    pub max: Option<f64>,
}

/// How ratios are bounded, by TRL's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorrectionMode {
    /// The ratio of each token, clamped to the bounds.
    TokenTruncate,
    /// The ratio of each token, 0 outside the bounds.
    TokenMask,
    /// The ratio of an answer, clamped to the bounds.
    SequenceTruncate,
    /// The ratio of an answer, 0 outside the bounds.
    SequenceMask,
}

impl CorrectionMode {
    /// Returns whether a ratio is of a whole answer.
    pub fn is_of_answers(self) -> bool {
        matches!(self, Self::SequenceTruncate | Self::SequenceMask)
    }

    fn truncates(self) -> bool {
        matches!(self, Self::TokenTruncate | Self::SequenceTruncate)
    }
}

impl SamplerCorrection {
    /// Returns the weight of a token, or of an answer, whose log-ratio this is.
    pub fn weight(&self, log_ratio: f64) -> f64 {
        let ratio = log_ratio.exp();
        let (least, most) = (self.min.unwrap_or(0.0), self.max.unwrap_or(f64::INFINITY));
        let bounded = ratio.min(most).max(least);
        if self.mode.truncates() || bounded == ratio { bounded } else { 0.0 }
    }
}

/// Ratios as they were applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CorrectionStats {
    /// Ratios: as many as tokens, or as answers.
    pub count: f64,
    /// Their sum.
    pub sum: f64,
    /// The least and the largest.
    pub range: [f64; 2],
}

impl Default for CorrectionStats {
    fn default() -> Self {
        Self { count: 0.0, sum: 0.0, range: [f64::INFINITY, f64::NEG_INFINITY] }
    }
}

impl CorrectionStats {
    /// Adds a ratio.
    pub fn add(&mut self, ratio: f64) {
        self.merge(&Self { count: 1.0, sum: ratio, range: [ratio; 2] });
    }

    /// Adds another's ratios.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.range = [self.range[0].min(other.range[0]), self.range[1].max(other.range[1])];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_outside_the_bounds_are_clamped_or_dropped() {
        let weights = |mode| {
            let correction = SamplerCorrection { mode, min: Some(0.5), max: Some(2.0) };
            [0.25_f64, 1.25, 3.0].map(|ratio| correction.weight(ratio.ln()))
        };
        let is_close = |found: [f64; 3], expected: [f64; 3]| {
            found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-15)
        };
        assert!(is_close(weights(CorrectionMode::TokenTruncate), [0.5, 1.25, 2.0]));
        assert!(is_close(weights(CorrectionMode::SequenceMask), [0.0, 1.25, 0.0]));
        let unbounded = SamplerCorrection { mode: CorrectionMode::TokenMask, min: None, max: None };
        assert!((unbounded.weight(5.0) - 5.0_f64.exp()).abs() < 1e-12);
    }
}
