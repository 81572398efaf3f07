//! Rotary embedding: the angle per position of each pair of dimensions (RoFormer, arXiv 2104.09864;
//! scalings as in transformers' `modeling_rope_utils.py`).

use std::f64::consts::PI;

use tandem_kernels::ops::RopePairs;

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
    /// NTK-aware scaling: a text of more than `max_positions` tokens has the base of its length.
    Dynamic {
        /// Growth of the base.
        factor: f64,
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
    /// Divides all frequencies by `factor`; pairs beyond the first `turning` do not rotate.
    Proportional {
        /// Divisor.
        factor: f64,
        /// Rotated pairs.
        turning: usize,
    },
}

impl RotarySpec {
    /// Makes a rotary embedding without scaling.
    pub fn plain(theta: f64, dims: usize) -> Self {
        Self { theta, dims, pairs: RopePairs::Halves, scaling: RotaryScaling::Default, query_scale: None }
    }

    /// Returns the radians per position of each rotated pair `[dims/2]`, fastest first, in a text of
    /// `length` tokens. They are rounded to f32 where transformers rounds: angles at far positions
    /// magnify a last bit.
    pub fn inverse_frequencies(&self, length: usize) -> Vec<f32> {
        let base = self.scaling.base(self, length);
        let exponents = (0..self.dims).step_by(2).map(|i| i as f32 / self.dims as f32);
        let waves: Vec<f32> = exponents.map(|e| base.powf(f64::from(e)) as f32).collect();
        self.scaling.apply(self, &waves, length)
    }
}

impl QueryScale {
    /// Returns the factor on the query at a position.
    pub(crate) fn factor(&self, position: u32) -> f32 {
        let times = (f64::from(position) / self.original_positions).floor();
        (1.0 + self.beta * times.ln_1p()) as f32
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

    /// Returns the length up to which texts rotate alike, if longer ones rotate otherwise.
    pub fn same_up_to(&self) -> Option<usize> {
        match self {
            Self::Long { original_positions, .. } => Some(*original_positions),
            Self::Dynamic { max_positions, .. } => Some(*max_positions),
            _ => None,
        }
    }

    /// Returns the base of the frequencies in a text of `length` tokens.
    fn base(&self, spec: &RotarySpec, length: usize) -> f64 {
        match self {
            // transformers has the length in a tensor, so what follows from it is rounded to f32.
            Self::Dynamic { factor, max_positions } if length > *max_positions => {
                let times = (*factor * length as f64) as f32 / *max_positions as f32 - (factor - 1.0) as f32;
                let exponent = (spec.dims as f64 / (spec.dims as f64 - 2.0)) as f32;
                let stretch = f64::from(times).powf(f64::from(exponent)) as f32;
                f64::from(spec.theta as f32 * stretch)
            }
            _ => spec.theta,
        }
    }

    /// Turns `waves` `[dims/2]`, positions per radian, into scaled frequencies.
    fn apply(&self, spec: &RotarySpec, waves: &[f32], length: usize) -> Vec<f32> {
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
                let divisors = if length > *original_positions { long } else { short };
                divisors.iter().zip(waves).map(|(divisor, wave)| 1.0 / (*divisor as f32 * wave)).collect()
            }
            Self::Proportional { factor, turning } => {
                let turn = |(pair, f): (usize, f32)| if pair < *turning { f / *factor as f32 } else { 0.0 };
                plain.enumerate().map(turn).collect()
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
    fn dynamic_stretches_the_base_with_the_length_beyond_the_models() {
        let scaling = RotaryScaling::Dynamic { factor: 2.0, max_positions: 16 };
        let spec = RotarySpec { scaling, ..RotarySpec::plain(10_000.0, 4) };
        assert_eq!(spec.inverse_frequencies(16), [1.0, 0.01]);
        // Times 2 · 24 / 16 − 1 = 2, to the power 4 / (4 − 2): the base is 40,000.
        assert_eq!(spec.inverse_frequencies(24), [1.0, 0.005]);
        assert!(spec.inverse_frequencies(25)[1] < 0.005);
    }

    #[test]
    fn proportional_turns_the_first_pairs_alone_with_the_exponents_of_whole_heads() {
        let scaling = RotaryScaling::Proportional { factor: 2.0, turning: 2 };
        let spec = RotarySpec { scaling, ..RotarySpec::plain(10_000.0, 8) };
        assert_eq!(spec.inverse_frequencies(1), [0.5, 0.05, 0.0, 0.0]);
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
