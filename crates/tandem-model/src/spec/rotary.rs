//! Rotary embedding: the angle per position of each pair of dimensions (RoFormer, arXiv 2104.09864;
//! scalings as in transformers).

/// Rotary embedding of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotarySpec {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// Number of a head's dimensions that rotate; even.
    pub dims: usize,
    /// Scaling for longer texts.
    pub scaling: RotaryScaling,
}

/// Scaling of the frequencies for texts longer than those of the first training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RotaryScaling {
    /// No scaling.
    Default,
    /// Divides all frequencies by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
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
}

impl RotarySpec {
    /// Returns the radians per position of each rotated pair `[dims/2]`, fastest first. They are
    /// rounded to f32 where transformers rounds: angles at far positions magnify a last bit.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let exponents = (0..self.dims).step_by(2).map(|i| i as f32 / self.dims as f32);
        let plain = exponents.map(|e| 1.0 / (self.theta.powf(f64::from(e)) as f32));
        plain.map(|f| self.scaling.apply(f)).collect()
    }
}

impl RotaryScaling {
    fn apply(self, frequency: f32) -> f32 {
        match self {
            Self::Default => frequency,
            Self::Linear { factor } => frequency / factor as f32,
            Self::Llama3 { factor, low_frequency, high_frequency, original_positions } => {
                let wave = std::f32::consts::TAU / frequency;
                let (longest, shortest) =
                    (original_positions / low_frequency, original_positions / high_frequency);
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_frequencies_fall_geometrically() {
        let spec = RotarySpec { theta: 10_000.0, dims: 8, scaling: RotaryScaling::Default };
        assert_eq!(spec.inverse_frequencies(), [1.0, 0.1, 0.01, 0.001]);
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
        assert_eq!(scaling.apply(1.0), 1.0);
        assert_eq!(scaling.apply(0.01), 0.01 / 8.0);
        let between = std::f32::consts::TAU / 32.0;
        let expected = between * (2.0 / 3.0 / 8.0 + 1.0 / 3.0);
        assert!((scaling.apply(between) / expected - 1.0).abs() < 1e-6, "f32 rounding only");
    }
}
