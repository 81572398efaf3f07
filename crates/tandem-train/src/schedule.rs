//! Learning rates over steps, and the clip coefficient; the arithmetic of `transformers` and `torch`.

use std::f64::consts::PI;

/// How the learning rate moves after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Straight down to zero at the last step (`get_linear_schedule_with_warmup`).
    Linear,
    /// Half a cosine down to zero (`get_cosine_schedule_with_warmup`).
    Cosine,
    /// Stays (`get_constant_schedule_with_warmup`).
    Constant,
}

impl Shape {
    /// Every shape with its name in the config.
    pub const NAMES: [(&'static str, Self); 3] =
        [("linear", Self::Linear), ("cosine", Self::Cosine), ("constant", Self::Constant)];
}

/// The learning rate of every step of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// What happens after the warm-up.
    pub shape: Shape,
    /// Steps of linear rise from zero.
    pub warmup_steps: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
}

impl Schedule {
    /// Learning rate of 0-based `step`. The first step of a warm-up has rate 0, as in `transformers`.
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

/// Factor on the gradient that brings its norm down to `max_norm`: `min(1, max_norm / (norm + 1e-6))`, as
/// `torch.nn.utils.clip_grad_norm_`. `None` never clips.
///
/// A norm that is not finite is not a case for clipping: the step must be skipped. It yields NaN or 0 here.
pub fn clip_coefficient(norm: f64, max_norm: Option<f64>) -> f64 {
    match max_norm {
        None => 1.0,
        Some(_) if norm.is_nan() => f64::NAN,
        Some(max) => (max / (norm + 1e-6)).min(1.0),
    }
}
