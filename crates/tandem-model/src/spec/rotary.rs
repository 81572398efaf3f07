//! Rotary embedding: the angle per position of each pair of dimensions (RoFormer, arXiv 2104.09864;
//! scalings as in transformers' `modeling_rope_utils.py`).

use std::f64::consts::PI;

use tandem_kernels::ops::{RopePairs, RopeTable};

/// Rotary embedding of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RotarySpec {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// Number of a head's dimensions that rotate; even.
    pub dims: usize,
    /// Dimensions that rotate together.
    pub pairs: RopePairs,
    /// Scaling for longer texts.
    pub scaling: RotaryScaling,
    /// Scale of queries by position.
    pub query_scale: Option<QueryScale>,
}

/// Scale of queries by position: `1 + beta · ln(1 + ⌊position / original_positions⌋)` (Llama 4).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryScale {
    /// `llama_4_scaling_beta`.
    pub beta: f64,
    /// Positions of the first training.
    pub original_positions: f64,
}

/// Scaling of the frequencies for texts longer than those of the first training.
#[derive(Clone, Debug, PartialEq)]
pub enum RotaryScaling {
    /// No scaling.
    Default,
    /// Divides all frequencies by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// NTK-aware scaling by the length of each text. Up to `max_positions` it changes nothing, and no
    /// longer text is taken.
    Dynamic {
        /// `max_position_embeddings`.
        max_positions: usize,
    },
    /// Llama 3.1: divides long waves by `factor`, keeps short ones, and interpolates between.
    Llama3 {
        /// The divisor of long waves.
        factor: f64,
        /// Waves longer than `original_positions / low_frequency` are long.
        low_frequency: f64,
        /// Waves shorter than `original_positions / high_frequency` are short.
        high_frequency: f64,
        /// Positions of the first training.
        original_positions: f64,
    },
    /// YaRN (arXiv 2309.00071): divides the frequencies of slow dimensions, keeps fast ones, with a ramp
    /// between.
    Yarn {
        /// Divisor of slow dimensions.
        factor: f64,
        /// Turns over the first training's positions above which a dimension is fast.
        beta_fast: f64,
        /// Turns below which a dimension is slow.
        beta_slow: f64,
        /// Positions of the first training.
        original_positions: f64,
        /// True if the ramp's ends are whole dimensions.
        truncate: bool,
        /// Factor on cosines and sines.
        attention_factor: f64,
    },
    /// LongRoPE (arXiv 2402.13753): a divisor for each frequency.
    Long {
        /// Divisors for texts up to `original_positions`, `[dims/2]`.
        short: Vec<f64>,
        /// Divisors for longer texts, `[dims/2]`.
        long: Vec<f64>,
        /// Positions of the first training.
        original_positions: usize,
        /// Factor on cosines and sines.
        attention_factor: f64,
    },
}

/// Rotary tables of a layer.
#[derive(Clone, Debug)]
pub(crate) struct Rope {
    /// Table of the queries, and of the keys unless they have their own.
    pub(crate) queries: RopeTable,
    /// Table of the keys, if queries are scaled by position.
    pub(crate) keys: Option<RopeTable>,
}

impl RotarySpec {
    /// Makes a rotary embedding without scaling.
    pub fn plain(theta: f64, dims: usize) -> Self {
        Self { theta, dims, pairs: RopePairs::Halves, scaling: RotaryScaling::Default, query_scale: None }
    }

    /// Returns the radians per position of each rotated pair `[dims/2]`, fastest first, of a model for
    /// texts of up to `positions` tokens. They are rounded to f32 where transformers rounds: angles at
    /// far positions magnify a last bit.
    pub fn inverse_frequencies(&self, positions: usize) -> Vec<f32> {
        let exponents = (0..self.dims).step_by(2).map(|i| i as f32 / self.dims as f32);
        let waves: Vec<f32> = exponents.map(|e| self.theta.powf(f64::from(e)) as f32).collect();
        self.scaling.apply(self, &waves, positions)
    }

    /// Makes the tables of a model for texts of up to `positions` tokens.
    pub(crate) fn tables(&self, positions: usize) -> Rope {
        let table = RopeTable::new(&self.inverse_frequencies(positions), positions).with_pairs(self.pairs);
        let attention_factor = self.scaling.attention_factor() as f32;
        let table = if attention_factor == 1.0 { table } else { table.scaled(|_| attention_factor) };
        let scale = self.query_scale.filter(|scale| positions as f64 > scale.original_positions);
        match scale {
            None => Rope { queries: table, keys: None },
            Some(QueryScale { beta, original_positions }) => {
                let factor = |position: usize| {
                    let times = (position as f64 / original_positions).floor();
                    (1.0 + beta * times.ln_1p()) as f32
                };
                Rope { queries: table.clone().scaled(factor), keys: Some(table) }
            }
        }
    }
}

impl RotaryScaling {
    /// Returns the factor on cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn { attention_factor, .. } | Self::Long { attention_factor, .. } => *attention_factor,
            _ => 1.0,
        }
    }

    /// Turns `waves` `[dims/2]`, positions per radian, into scaled frequencies.
    fn apply(&self, spec: &RotarySpec, waves: &[f32], positions: usize) -> Vec<f32> {
        let plain = waves.iter().map(|wave| 1.0 / wave);
        match self {
            Self::Default | Self::Dynamic { .. } => plain.collect(),
            Self::Linear { factor } => plain.map(|f| f / *factor as f32).collect(),
            Self::Llama3 { .. } => plain.map(|f| self.llama3(f)).collect(),
            Self::Yarn { factor, beta_fast, beta_slow, original_positions, truncate, .. } => {
                let (dims, base) = (spec.dims as f64, spec.theta);
                let turns_at =
                    |turns: f64| dims * (original_positions / (turns * 2.0 * PI)).ln() / (2.0 * base.ln());
                let (mut low, mut high) = (turns_at(*beta_fast), turns_at(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(dims - 1.0));
                if low == high {
                    high += 0.001;
                }
                let scaled = waves.iter().enumerate().map(|(i, wave)| {
                    let slow = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    let fast = 1.0 - slow;
                    1.0 / (*factor as f32 * wave) * (1.0 - fast) + 1.0 / wave * fast
                });
                scaled.collect()
            }
            Self::Long { short, long, original_positions, .. } => {
                let divisors = if positions > *original_positions { long } else { short };
                divisors.iter().zip(waves).map(|(divisor, wave)| 1.0 / (*divisor as f32 * wave)).collect()
            }
        }
    }

    fn llama3(&self, frequency: f32) -> f32 {
        let Self::Llama3 { factor, low_frequency, high_frequency, original_positions } = *self else {
            unreachable!("asked of Llama 3's scaling alone");
        };
        let wave = std::f32::consts::TAU / frequency;
        let (longest, shortest) = (original_positions / low_frequency, original_positions / high_frequency);
        if f64::from(wave) > longest {
            frequency / factor as f32
        } else if f64::from(wave) < shortest {
            frequency
        } else {
            let smooth = (original_positions as f32 / wave - low_frequency as f32)
                / (high_frequency - low_frequency) as f32;
            (1.0 - smooth) * (frequency / factor as f32) + smooth * frequency
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_frequencies_fall_geometrically() {
        assert_eq!(RotarySpec::plain(10_000.0, 8).inverse_frequencies(1), [1.0, 0.1, 0.01, 0.001]);
    }

    #[test]
    fn llama3_keeps_short_waves_divides_long_ones_and_interpolates_between() {
        let scaling = RotaryScaling::Llama3 {
            factor: 8.0,
            low_frequency: 1.0,
            high_frequency: 4.0,
            original_positions: 64.0,
        };
        // Waves of 6.3 (shorter than 64/4), 628 (longer than 64/1) and 32 (64/32 = 2: a third of
        // the way from 1 to 4).
        assert_eq!(scaling.llama3(1.0), 1.0);
        assert_eq!(scaling.llama3(0.01), 0.01 / 8.0);
        let between = std::f32::consts::TAU / 32.0;
        let expected = between * (2.0 / 3.0 / 8.0 + 1.0 / 3.0);
        assert!((scaling.llama3(between) / expected - 1.0).abs() < 1e-6, "f32 rounding only");
    }

    #[test]
    fn longrope_takes_the_long_divisors_for_texts_beyond_the_first_training() {
        let scaling = RotaryScaling::Long {
            short: vec![1.0, 2.0],
            long: vec![4.0, 8.0],
            original_positions: 16,
            attention_factor: 1.0,
        };
        let spec = RotarySpec { scaling, ..RotarySpec::plain(10_000.0, 4) };
        assert_eq!(spec.inverse_frequencies(16), [1.0, 0.005]);
        assert_eq!(spec.inverse_frequencies(17), [0.25, 0.00125]);
    }
}
