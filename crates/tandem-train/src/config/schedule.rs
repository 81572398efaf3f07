//! Learning rates of `[train]`: the schedule, its constants and the warm-up. Names are those of
//! `transformers`.

use super::error::Result;
use super::form::{AT_LEAST_ONE, COUNT, POSITIVE, choice, integer, number};
use super::keys::{Keys, keys};
use super::optimizer::Optimizer;

/// Learning rate after the warm-up, as a share of the peak.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// Straight down to zero at the last step (`get_linear_schedule_with_warmup`).
    Linear,
    /// Half a cosine down to zero (`get_cosine_schedule_with_warmup`).
    Cosine,
    /// Half a cosine down to a share of the peak
    /// (`get_cosine_with_min_lr_schedule_with_warmup`).
    CosineWithMinLr {
        /// Share of the peak at the end.
        min_lr_rate: f64,
    },
    /// Several half cosines, each from the peak
    /// (`get_cosine_with_hard_restarts_schedule_with_warmup`).
    CosineWithRestarts {
        /// Number of half cosines.
        num_cycles: u64,
    },
    /// A power of the remaining share of steps
    /// (`get_polynomial_decay_schedule_with_warmup`).
    Polynomial {
        /// Learning rate at the end.
        lr_end: f64,
        /// The power.
        power: f64,
    },
    /// Inverse square root of the step (`get_inverse_sqrt_schedule`).
    InverseSqrt {
        /// Steps until the rate is 1/√2 of the peak, about; `None` is the warm-up's, or 10,000.
        timescale: Option<u64>,
    },
    /// Peak until the last steps, which fall (`get_wsd_schedule`).
    WarmupStableDecay {
        /// Steps of the fall.
        decay: Span,
        /// How it falls.
        decay_type: DecayType,
        /// Share of the peak at the beginning of the warm-up and at the end.
        min_lr_rate: f64,
    },
    /// Stays (`get_constant_schedule_with_warmup`).
    Constant,
}

impl Shape {
    /// Names of all schedules in the config.
    pub const NAMES: [&'static str; 8] = [
        "linear",
        "cosine",
        "cosine_with_min_lr",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
        "constant",
    ];

    /// Name in the config.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Cosine => "cosine",
            Self::CosineWithMinLr { .. } => "cosine_with_min_lr",
            Self::CosineWithRestarts { .. } => "cosine_with_restarts",
            Self::Polynomial { .. } => "polynomial",
            Self::InverseSqrt { .. } => "inverse_sqrt",
            Self::WarmupStableDecay { .. } => "warmup_stable_decay",
            Self::Constant => "constant",
        }
    }

    pub(super) fn visit(
        now: Option<&Self>,
        keys: &mut Keys,
        learning_rate: f64,
        optimizer: &Optimizer,
    ) -> Result<Self> {
        let is_free = matches!(optimizer, Optimizer::ScheduleFreeAdamW { .. });
        let has_ratio = keys.has_second("decay_steps", "decay_ratio")?;
        let belongs = |schedule: &str, to: &str| {
            format!("train.schedule is \"{schedule}\", and the key belongs to {to}; remove it")
        };
        keys! { let keys, now;
            /// Learning rate after the warm-up, by the names of `transformers`. See
            /// [optimizers.md](optimizers.md#schedules).
            schedule = choice(Self::NAMES.map(|name| (name, name)))
                .unless(|name| {
                    (is_free && *name != "constant").then(|| format!(
                        "train.optimizer is \"{}\", whose average does a schedule's work; remove it, or set it to \
                         \"constant\"",
                        optimizer.name()
                    ))
                })
                .or(if is_free { "constant" } else { "linear" })
                .shown("\"linear\"; \"constant\" for \"schedule_free_adamw\""),
                now.name();
            /// Share of the peak that "cosine_with_min_lr" ends at, and that "warmup_stable_decay" begins
            /// and ends at.
            min_lr_rate = number(0.0..=1.0)
                .or(0.0)
                .required_if(
                    schedule == "cosine_with_min_lr",
                    "the share of the peak learning rate at the end, for example 0.1",
                )
                .shown("0; required for \"cosine_with_min_lr\"")
                .only(
                    matches!(schedule, "cosine_with_min_lr" | "warmup_stable_decay"),
                    belongs(schedule, "\"cosine_with_min_lr\" and \"warmup_stable_decay\""),
                ),
                match *now {
                    Self::CosineWithMinLr { min_lr_rate } | Self::WarmupStableDecay { min_lr_rate, .. } => min_lr_rate,
                    _ => 0.0,
                };
            /// Number of half cosines of "cosine_with_restarts".
            num_cycles = integer(AT_LEAST_ONE)
                .or(1)
                .only(schedule == "cosine_with_restarts", belongs(schedule, "\"cosine_with_restarts\"")),
                if let Self::CosineWithRestarts { num_cycles } = *now { num_cycles } else { 1 };
            /// Learning rate, not a share, that "polynomial" ends at.
            lr_end = number(0.0..)
                .unless(|end| {
                    (schedule == "polynomial" && *end >= learning_rate).then(|| format!(
                        "it is not below train.learning_rate = {learning_rate:e}, from which the rate falls; \
                         lower it (0 ends at 0)"
                    ))
                })
                .or(1e-7)
                .only(schedule == "polynomial", belongs(schedule, "\"polynomial\"")),
                if let Self::Polynomial { lr_end, .. } = *now { lr_end } else { 0.0 };
            /// Power of "polynomial"; 1 is a straight line.
            power = number(POSITIVE)
                .or(1.0)
                .only(schedule == "polynomial", belongs(schedule, "\"polynomial\"")),
                if let Self::Polynomial { power, .. } = *now { power } else { 1.0 };
            /// Timescale of "inverse_sqrt" in steps: the rate is the peak over √((step − warm-up + timescale)
            /// / timescale).
            timescale = integer(AT_LEAST_ONE)
                .optional()
                .shown("the warm-up's steps, or 10000 without")
                .only(schedule == "inverse_sqrt", belongs(schedule, "\"inverse_sqrt\"")),
                if let Self::InverseSqrt { timescale } = *now { timescale } else { None };
            /// Last steps of "warmup_stable_decay", which fall.
            decay_steps = integer(COUNT)
                .optional()
                .required_if(
                    schedule == "warmup_stable_decay" && !has_ratio,
                    "`decay_steps` or `decay_ratio`: the last steps, in which the learning rate falls",
                )
                .shown("*this or* `decay_ratio`")
                .only(schedule == "warmup_stable_decay", belongs(schedule, "\"warmup_stable_decay\"")),
                if let Self::WarmupStableDecay { decay: Span::Steps(steps), .. } = *now { Some(steps) } else { None };
            /// Instead: a share of all steps, rounded up.
            decay_ratio = number(0.0..=1.0)
                .optional()
                .only(schedule == "warmup_stable_decay", belongs(schedule, "\"warmup_stable_decay\"")),
                if let Self::WarmupStableDecay { decay: Span::Ratio(ratio), .. } = *now { Some(ratio) } else { None };
            /// How "warmup_stable_decay" falls.
            decay_type = choice(DecayType::NAMES)
                .or(DecayType::Cosine)
                .only(schedule == "warmup_stable_decay", belongs(schedule, "\"warmup_stable_decay\"")),
                if let Self::WarmupStableDecay { decay_type, .. } = *now { decay_type } else { DecayType::Cosine };
        }
        Ok(match schedule {
            "linear" => Self::Linear,
            "cosine" => Self::Cosine,
            "cosine_with_min_lr" => Self::CosineWithMinLr { min_lr_rate },
            "cosine_with_restarts" => Self::CosineWithRestarts { num_cycles },
            "polynomial" => Self::Polynomial { lr_end, power },
            "inverse_sqrt" => Self::InverseSqrt { timescale },
            "warmup_stable_decay" => Self::WarmupStableDecay {
                decay: decay_ratio.map_or(Span::Steps(decay_steps.unwrap_or_default()), Span::Ratio),
                decay_type,
                min_lr_rate,
            },
            _ => Self::Constant,
        })
    }
}

/// How the last steps of a warmup-stable-decay schedule fall.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DecayType {
    /// In a straight line.
    Linear,
    /// As half a cosine.
    #[default]
    Cosine,
    /// As 1 − √(share of the fall).
    OneMinusSqrt,
}

impl DecayType {
    /// Every type with its name in the config.
    pub const NAMES: [(&'static str, Self); 3] =
        [("linear", Self::Linear), ("cosine", Self::Cosine), ("1-sqrt", Self::OneMinusSqrt)];
}

/// Some of a run's steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Span {
    /// Steps.
    Steps(u64),
    /// A share of all steps, rounded up.
    Ratio(f64),
}

impl Span {
    /// The steps of a run of `total_steps`.
    pub fn steps(self, total_steps: u64) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Ratio(ratio) => (ratio * total_steps as f64).ceil() as u64,
        }
    }
}

/// Visits the warm-up before the schedule.
pub(super) fn warmup(now: Option<&Span>, keys: &mut Keys) -> Result<Span> {
    let is_ratio = keys.has_second("warmup_steps", "warmup_ratio")?;
    keys! { let keys, now;
        /// Steps of linear rise from 0; with "schedule_free_adamw" the first step has a share already.
        warmup_steps = integer(COUNT).maybe().or((!is_ratio).then_some(0)),
            if let Span::Steps(steps) = *now { Some(steps) } else { None };
        /// Instead: a share of all steps, rounded up.
        warmup_ratio = number(0.0..=1.0).optional(),
            if let Span::Ratio(ratio) = *now { Some(ratio) } else { None };
    }
    Ok(warmup_ratio.map_or(Span::Steps(warmup_steps.unwrap_or_default()), Span::Ratio))
}
