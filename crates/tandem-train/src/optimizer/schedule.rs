//! Learning rates over steps, and the clip coefficient; the arithmetic of `transformers` and
//! `torch`.

use std::f64::consts::PI;

use crate::config::{DecayType, Optimizer, Shape, TrainConfig};

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
    /// Whether the first step of a warm-up has a share of the peak already, as in schedule-free
    /// optimisers; in `transformers` it has rate 0.
    pub starts_above_zero: bool,
}

impl Schedule {
    /// Learning rate of 0-based `step`. The first step of a warm-up has rate 0, as in
    /// `transformers`.
    pub fn at(&self, step: u64) -> f64 {
        self.learning_rate * self.factor(step)
    }

    /// Share of the peak, in the order of operations of `transformers`.
    fn factor(&self, step: u64) -> f64 {
        let (at, warmup, total) = (step as f64, self.warmup_steps as f64, self.total_steps as f64);
        if step < self.warmup_steps {
            let factor = (at + f64::from(u8::from(self.starts_above_zero))) / warmup.max(1.0);
            return match self.shape {
                Shape::WarmupStableDecay { min_lr_rate, .. } => raised(factor, min_lr_rate),
                _ => factor,
            };
        }
        let span = (total - warmup).max(1.0);
        let progress = (at - warmup) / span;
        let half_cosine = |progress: f64| 0.5 * (1.0 + (PI * progress).cos());
        match self.shape {
            Shape::Linear => ((total - at) / span).max(0.0),
            Shape::Cosine => half_cosine(progress).max(0.0),
            Shape::CosineWithMinLr { min_lr_rate } => raised(half_cosine(progress), min_lr_rate).max(0.0),
            Shape::CosineWithRestarts { .. } if progress >= 1.0 => 0.0,
            Shape::CosineWithRestarts { num_cycles } => {
                half_cosine((num_cycles as f64 * progress) % 1.0).max(0.0)
            }
            Shape::Polynomial { lr_end, .. } if at > total => lr_end / self.learning_rate,
            Shape::Polynomial { lr_end, power } => {
                let decay = (self.learning_rate - lr_end) * (1.0 - progress).powf(power) + lr_end;
                decay / self.learning_rate
            }
            Shape::InverseSqrt { timescale } => {
                let timescale =
                    timescale.unwrap_or(if self.warmup_steps == 0 { 10_000 } else { self.warmup_steps });
                1.0 / ((at + (timescale as f64 - warmup)) / timescale as f64).sqrt()
            }
            Shape::WarmupStableDecay { decay, decay_type, min_lr_rate } => {
                let decay = decay.steps(self.total_steps) as f64;
                let stable = total - warmup - decay;
                if at < warmup + stable {
                    return 1.0;
                }
                if at >= warmup + stable + decay {
                    return min_lr_rate;
                }
                let progress = (at - warmup - stable) / decay.max(1.0);
                let factor = match decay_type {
                    DecayType::Linear => 1.0 - progress,
                    DecayType::Cosine => half_cosine(progress),
                    DecayType::OneMinusSqrt => 1.0 - progress.sqrt(),
                };
                raised(factor, min_lr_rate).max(0.0)
            }
            Shape::Constant => 1.0,
        }
    }
}

/// Moves a factor from [0, 1] to [`least`, 1].
fn raised(factor: f64, least: f64) -> f64 {
    factor * (1.0 - least) + least
}

impl TrainConfig {
    /// The learning rates of a run of `total_steps`.
    pub fn schedule(&self, total_steps: u64) -> Schedule {
        let warmup_steps = self.warmup.steps(total_steps);
        Schedule {
            learning_rate: self.learning_rate,
            shape: self.schedule,
            warmup_steps,
            total_steps,
            starts_above_zero: matches!(self.optimizer, Optimizer::ScheduleFreeAdamW { .. }),
        }
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

    use std::path::Path;

    use serde_json::Value;

    use crate::config::Span;

    /// Learning rates of `get_scheduler` of transformers before each step, made by
    /// `goldens/optimizer_golden.py`.
    #[test]
    fn schedules_equal_transformers() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/optimizers/schedules.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let mut seen = Vec::new();
        for run in golden["runs"].as_array().unwrap() {
            let count = |value: &Value| value.as_u64();
            let number = |key: &str| run["options"][key].as_f64().unwrap();
            let shape = match run["name"].as_str().unwrap() {
                "linear" => Shape::Linear,
                "cosine" => Shape::Cosine,
                "cosine_with_min_lr" => Shape::CosineWithMinLr { min_lr_rate: number("min_lr_rate") },
                "cosine_with_restarts" => {
                    Shape::CosineWithRestarts { num_cycles: count(&run["options"]["num_cycles"]).unwrap() }
                }
                "polynomial" => Shape::Polynomial { lr_end: number("lr_end"), power: number("power") },
                "inverse_sqrt" => Shape::InverseSqrt { timescale: count(&run["options"]["timescale"]) },
                "warmup_stable_decay" => Shape::WarmupStableDecay {
                    decay: Span::Steps(count(&run["options"]["num_decay_steps"]).unwrap()),
                    decay_type: DecayType::NAMES
                        .into_iter()
                        .find(|(name, _)| run["options"]["decay_type"] == *name)
                        .unwrap()
                        .1,
                    min_lr_rate: number("min_lr_ratio"),
                },
                "constant_with_warmup" => Shape::Constant,
                other => panic!("{other} is no schedule"),
            };
            seen.push(shape.name());
            let learning_rate = run["learning_rate"].as_f64().unwrap();
            let (warmup_steps, total_steps) =
                (count(&run["warmup_steps"]).unwrap(), count(&run["steps"]).unwrap());
            let schedule =
                Schedule { learning_rate, shape, warmup_steps, total_steps, starts_above_zero: false };
            let expected = run["rates"].as_array().unwrap();
            assert!(!expected.is_empty());
            for (step, expected) in expected.iter().enumerate() {
                let (found, expected) = (schedule.at(step as u64), expected.as_f64().unwrap());
                // A few roundings of sums and products, and the library's cosine, power and root.
                assert!(
                    (found - expected).abs() <= 1e-15 * learning_rate,
                    "{run}: step {step}: {found}, expected {expected}"
                );
            }
        }
        assert!(Shape::NAMES.iter().all(|name| seen.contains(name)), "{seen:?}");
    }

    #[test]
    fn a_share_of_falling_steps_is_rounded_up() {
        let of = |decay| Schedule {
            learning_rate: 1.0,
            shape: Shape::WarmupStableDecay { decay, decay_type: DecayType::Linear, min_lr_rate: 0.0 },
            warmup_steps: 0,
            total_steps: 10,
            starts_above_zero: false,
        };
        let rates = |decay| (0..10).map(|step| of(decay).at(step)).collect::<Vec<_>>();
        assert_eq!(rates(Span::Ratio(0.31)), rates(Span::Steps(4)));
        assert_eq!(rates(Span::Steps(4))[5..8], [1.0, 1.0, 0.75]);
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
