//! `[train]`: batches, steps, optimiser, evaluation and checkpoints.

use tandem_kernels::StateForm;

use super::error::ConfigError;
use super::reader::{Either, Section};
use super::types::Shape;

/// How to train.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainConfig {
    /// Pairs (rows, for SFT) per optimiser step, over all ranks.
    pub batch_size: usize,
    /// How a batch is cut; evaluation uses the same.
    pub micro_batch: MicroBatch,
    /// How long.
    pub length: Length,
    /// The optimiser and its constants.
    pub optimizer: Optimizer,
    /// What the optimiser's states are kept in.
    pub optimizer_state: StateForm,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// What the learning rate does after the warm-up.
    pub schedule: Shape,
    /// The rise before.
    pub warmup: Warmup,
    /// Largest gradient norm; `None` (written 0) never clips.
    pub max_grad_norm: Option<f64>,
    /// Weight decay; biases and norms are spared.
    pub weight_decay: f64,
    /// Steps between checkpoints; `None` (written 0) saves at the end only.
    pub save_every: Option<u64>,
    /// Whether training goes on while a checkpoint is written, from a copy of the state.
    pub async_checkpoints: bool,
    /// Steps between evaluations; `None` (written 0) evaluates at the end only.
    pub eval_every: Option<u64>,
    /// Checkpoints kept, newest first; `None` (written 0) keeps all.
    pub keep: Option<usize>,
    /// Steps in a row that may be skipped for a non-finite loss or gradient before the run stops.
    pub max_skipped: u64,
    /// Whether the rows of every step are written down.
    pub record_rows: bool,
}

/// How a global batch is cut into what is computed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatch {
    /// As many rows as fit this many tokens of the forest, at least one.
    Tokens(usize),
    /// This many rows (pairs).
    Rows(usize),
}

impl From<MicroBatch> for tandem_data::order::MicroBatch {
    fn from(size: MicroBatch) -> Self {
        match size {
            MicroBatch::Tokens(tokens) => Self::Tokens(tokens),
            MicroBatch::Rows(rows) => Self::Rows(rows),
        }
    }
}

/// How long a run lasts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// Optimiser steps.
    Steps(u64),
    /// Passes over the data; may be a fraction.
    Epochs(f64),
}

impl Length {
    /// Optimiser steps for `num_rows` rows in batches of `batch_size`. An epoch's last batch may be short and is a step, as
    /// in `transformers`; a fraction of an epoch is rounded up.
    pub fn total_steps(self, num_rows: usize, batch_size: usize) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Epochs(epochs) => (epochs * num_rows.div_ceil(batch_size).max(1) as f64).ceil() as u64,
        }
    }
}

/// Warm-up before the schedule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Warmup {
    /// Steps.
    Steps(u64),
    /// A share of all steps, rounded up.
    Ratio(f64),
}

/// The optimiser and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// `torch.optim.AdamW`.
    AdamW {
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Added to the root of the second moment.
        eps: f64,
    },
    /// `torch.optim.RMSprop`, which the original DPO code used.
    RmsProp {
        /// Decay of the squared gradient.
        alpha: f64,
        /// Added to the root.
        eps: f64,
    },
}

impl Optimizer {
    /// The name in the config.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdamW { .. } => "adamw",
            Self::RmsProp { .. } => "rmsprop",
        }
    }
}

const COUNT: std::ops::RangeInclusive<u64> = 0..=i64::MAX as u64;
const POSITIVE: std::ops::RangeInclusive<u64> = 1..=i64::MAX as u64;

pub(super) fn parse(mut section: Section) -> Result<TrainConfig, ConfigError> {
    let zero_is_none = |x: u64| (x != 0).then_some(x);
    let every = |section: &mut Section, key, default| {
        section.take(key).map_or(Ok(default), |e| e.integer(COUNT)).map(zero_is_none)
    };
    let config = TrainConfig {
        batch_size: section
            .required("batch_size", "the pairs (rows, for SFT) of one optimiser step")?
            .integer(1..=1 << 24)? as usize,
        micro_batch: micro_batch(&mut section)?,
        length: length(&mut section)?,
        optimizer: optimizer(&mut section)?,
        optimizer_state: section
            .take("optimizer_state")
            .map_or(Ok(StateForm::F32), |e| e.one_of(&StateForm::NAMES))?,
        learning_rate: section
            .required("learning_rate", "the peak learning rate, for example 1e-6 for full DPO")?
            .number("a number of at least 0", |x| x >= 0.0)?,
        schedule: section.take("schedule").map_or(Ok(Shape::Linear), |e| e.one_of(&Shape::NAMES))?,
        warmup: warmup(&mut section)?,
        max_grad_norm: section
            .take("max_grad_norm")
            .map_or(Ok(1.0), |e| e.number("a number of at least 0 (0 never clips)", |x| x >= 0.0))
            .map(|x| (x > 0.0).then_some(x))?,
        weight_decay: section
            .take("weight_decay")
            .map_or(Ok(0.0), |e| e.number("a number of at least 0", |x| x >= 0.0))?,
        save_every: every(&mut section, "save_every", 0)?,
        async_checkpoints: section.take("async_checkpoints").map_or(Ok(true), |e| e.boolean())?,
        eval_every: every(&mut section, "eval_every", 0)?,
        keep: every(&mut section, "keep", 2)?.map(|x| x as usize),
        max_skipped: section.take("max_skipped").map_or(Ok(3), |e| e.integer(COUNT))?,
        record_rows: section.take("record_rows").map_or(Ok(false), |e| e.boolean())?,
    };
    section.moved("checkpointing", "compute.checkpointing")?;
    section.finish()?;
    Ok(config)
}

fn micro_batch(section: &mut Section) -> Result<MicroBatch, ConfigError> {
    match section.either("micro_batch_tokens", "micro_batch_size")? {
        Some(Either::First(tokens)) => Ok(MicroBatch::Tokens(tokens.integer(1..=1 << 31)? as usize)),
        Some(Either::Second(rows)) => Ok(MicroBatch::Rows(rows.integer(1..=1 << 24)? as usize)),
        None => Ok(MicroBatch::Tokens(4096)),
    }
}

fn length(section: &mut Section) -> Result<Length, ConfigError> {
    match section.either("steps", "epochs")? {
        Some(Either::First(steps)) => Ok(Length::Steps(steps.integer(POSITIVE)?)),
        Some(Either::Second(epochs)) => Ok(Length::Epochs(epochs.number("a positive number", |x| x > 0.0)?)),
        None => Err(section.missing("steps", "`steps` or `epochs`: how long to train")),
    }
}

fn warmup(section: &mut Section) -> Result<Warmup, ConfigError> {
    match section.either("warmup_steps", "warmup_ratio")? {
        Some(Either::First(steps)) => Ok(Warmup::Steps(steps.integer(COUNT)?)),
        Some(Either::Second(ratio)) => {
            Ok(Warmup::Ratio(ratio.number("a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?))
        }
        None => Ok(Warmup::Steps(0)),
    }
}

fn optimizer(section: &mut Section) -> Result<Optimizer, ConfigError> {
    let is_adamw =
        section.take("optimizer").map_or(Ok(true), |e| e.one_of(&[("adamw", true), ("rmsprop", false)]))?;
    let (betas, alpha) = (section.take("betas"), section.take("alpha"));
    let eps = section.take("eps").map_or(Ok(1e-8), |e| e.number("a positive number", |x| x > 0.0))?;
    let share = |x: f64| (0.0..1.0).contains(&x);
    if is_adamw {
        if let Some(entry) = alpha {
            return Err(entry.conflict("\"adamw\" has `betas`; `alpha` belongs to \"rmsprop\""));
        }
        let [beta1, beta2] = match betas {
            None => [0.9, 0.999],
            Some(entry) => {
                let wrong = entry.wrong("two numbers in [0, 1), for example [0.9, 0.999]");
                let values = entry
                    .items()
                    .iter()
                    .map(|e| e.number("a number in [0, 1)", share))
                    .collect::<Result<Vec<_>, _>>()?;
                values.try_into().map_err(|_| wrong)?
            }
        };
        Ok(Optimizer::AdamW { beta1, beta2, eps })
    } else {
        if let Some(entry) = betas {
            return Err(entry.conflict("\"rmsprop\" has `alpha`; `betas` belong to \"adamw\""));
        }
        let alpha = alpha.map_or(Ok(0.99), |e| e.number("a number in [0, 1)", share))?;
        Ok(Optimizer::RmsProp { alpha, eps })
    }
}
