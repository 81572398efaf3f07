//! Learning rates over steps, and the clip coefficient; the arithmetic of `transformers` and
//! `torch`.

use std::f64::consts::PI;

use crate::config::{Shape, TrainConfig, Warmup};

/// The learning rate of every step of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Decay after warm-up.
    pub shape: Shape,
    /// Steps of linear rise from zero.
    pub warmup_steps: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
}

impl Schedule {
    /// Learning rate of 0-based `step`. The first step of a warm-up has rate 0, as in
    /// `transformers`.
    pub fn at(&self, step: u64) -> f64 {
        self.learning_rate * self.factor(step)
    }

    fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return step as f64 / self.warmup_steps.max(1) as f64;
        }
        let span = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        match self.shape {
            Shape::Linear => (self.total_steps.saturating_sub(step) as f64 / span).max(0.0),
            Shape::Cosine => {
                let progress = (step - self.warmup_steps) as f64 / span;
                (0.5 * (1.0 + (PI * progress).cos())).max(0.0)
            }
            Shape::Constant => 1.0,
        }
    }
}

impl TrainConfig {
    /// The learning rates of a run of `total_steps`.
    pub fn schedule(&self, total_steps: u64) -> Schedule {
        let warmup_steps = match self.warmup {
            Warmup::Steps(steps) => steps,
            Warmup::Ratio(ratio) => (ratio * total_steps as f64).ceil() as u64,
        };
        Schedule { learning_rate: self.learning_rate, shape: self.schedule, warmup_steps, total_steps }
    }
}

/// Factor on the gradient that brings its norm down to `max_norm`: `min(1, max_norm / (norm +
/// 1e-6))`, as `torch.nn.utils.clip_grad_norm_`. `None` never clips.
///
/// A norm that is not finite is not a case for clipping: the step must be skipped. It yields NaN or
/// 0 here.
pub(crate) fn clip_coefficient(norm: f64, max_norm: Option<f64>) -> f64 {
    match max_norm {
        None => 1.0,
        Some(_) if norm.is_nan() => f64::NAN,
        Some(max) => (max / (norm + 1e-6)).min(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(shape: Shape, warmup_steps: u64, total_steps: u64) -> Vec<f64> {
        let schedule = Schedule { learning_rate: 1e-4, shape, warmup_steps, total_steps };
        (0..total_steps.max(7)).map(|step| schedule.at(step)).collect()
    }

    fn assert_equal(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
            // One rounding each of a product and a quotient.
            assert!((found - expected).abs() <= 1e-19, "step {step}: {found}, expected {expected}");
        }
    }

    // The expected numbers are `get_scheduler(NAME, AdamW(lr=1e-4), num_warmup_steps,
    // num_training_steps).get_last_lr()[0]` before each step, NAME being linear, cosine and
    // constant_with_warmup, of transformers 5.23.0.

    #[test]
    fn linear_equals_transformers() {
        let mut expected = vec![0.0, 2.5e-05, 5e-05, 7.500000000000001e-05];
        expected.extend((0..16).map(|i| 1e-4 - 6.25e-6 * f64::from(i)));
        assert_equal(&rates(Shape::Linear, 4, 20), &expected);
        assert_equal(&rates(Shape::Linear, 0, 5), &[1e-4, 8e-5, 6e-5, 4e-5, 2e-5, 0.0, 0.0]);
    }

    #[test]
    fn cosine_equals_transformers() {
        let expected = [
            0.0,
            2.5e-05,
            5e-05,
            7.500000000000001e-05,
            0.0001,
            9.903926402016153e-05,
            9.619397662556435e-05,
            9.157348061512727e-05,
            8.535533905932738e-05,
            7.777851165098012e-05,
            6.91341716182545e-05,
            5.9754516100806423e-05,
            5e-05,
            4.0245483899193595e-05,
            3.086582838174551e-05,
            2.2221488349019903e-05,
            1.4644660940672627e-05,
            8.426519384872733e-06,
            3.8060233744356633e-06,
            9.607359798384785e-07,
        ];
        assert_equal(&rates(Shape::Cosine, 4, 20), &expected);
    }

    #[test]
    fn constant_equals_transformers() {
        assert_equal(
            &rates(Shape::Constant, 4, 7),
            &[0.0, 2.5e-05, 5e-05, 7.500000000000001e-05, 1e-4, 1e-4, 1e-4],
        );
    }

    #[test]
    fn a_warm_up_longer_than_the_run_only_rises() {
        for shape in [Shape::Linear, Shape::Cosine, Shape::Constant] {
            let expected: Vec<f64> = (0..7).map(|step| 1e-4 * f64::from(step) / 7.0).collect();
            assert_equal(&rates(shape, 7, 5), &expected);
        }
    }

    #[test]
    fn clipping_equals_torch() {
        // torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
        assert_eq!(clip_coefficient(4.0, Some(1.0)), 1.0 / 4.000001);
        assert_eq!(clip_coefficient(0.5, Some(1.0)), 1.0);
        assert_eq!(clip_coefficient(0.0, Some(1.0)), 1.0);
        assert_eq!(clip_coefficient(1e9, None), 1.0);
        assert!(clip_coefficient(f64::NAN, Some(1.0)).is_nan());
    }
}
