//! `[train]`: batches, steps, optimiser, evaluation and checkpoints.

use tandem_kernels::StateForm;
use toml::Value;

use super::Method;
use super::error::Result;
use super::evaluation::EvaluationConfig;
use super::form::{AT_LEAST_ONE, COUNT, Form, POSITIVE, boolean, choice, custom, integer, number};
use super::keys::{Keys, group, keys};
use super::reader::Entry;
use super::schedule::{self, Shape, Span};

keys! {
    /// Batches, steps, optimiser, evaluation and checkpoints.
    #[derive(Clone, Debug, PartialEq)]
    pub struct TrainConfig(method: Method, has_eval: bool) {
        /// Pairs per optimiser step, over all ranks; rows for SFT, prompts for online runs.
        batch_size: usize = integer(1..=1 << 24).required("the pairs (rows, for SFT) of one optimiser step"),
        /// Division of a batch into micro-batches, also in evaluation.
        micro_batch: MicroBatchSize = group(MicroBatchSize::visit),
        /// Length of the run.
        length: Length = group(Length::visit),
        /// Peak learning rate.
        learning_rate: f64 = number(0.0..).required("the peak learning rate, for example 1e-6 for full DPO"),
        /// The optimiser and its constants.
        optimizer: Optimizer = group(Optimizer::visit),
        /// Storage of AdamW's two states and of RMSprop's one; updates compute in f32. `"f32"`: 4
        /// bytes per parameter. `"bf16"`: 2 bytes, with stochastic rounding. `"8bit"`: 1 + 1/64
        /// bytes, codes of bitsandbytes' dynamic maps with a scale for each 256 elements. See
        /// [ranks.md](ranks.md#optimiser-states-in-fewer-bits).
        optimizer_state: StateForm = choice(StateForm::NAMES).or(StateForm::F32),
        /// Learning rate after the warm-up.
        schedule: Shape = group(|now, keys: &mut Keys| Shape::visit(now, keys, learning_rate)),
        /// Rise of the learning rate before the schedule.
        warmup: Span = group(schedule::warmup),
        /// Largest norm of the gradient over all parameters; 0 never clips.
        max_grad_norm: Option<f64> = number(0.0..).zero_is_none().or(Some(1.0)),
        /// Weight decay. Biases and norms have none.
        weight_decay: f64 = number(0.0..).or(0.0),
        /// Steps between checkpoints; 0 saves at the end only.
        save_every: Option<u64> = integer(COUNT).zero_is_none().or(None).free(),
        /// With `save_every`: training continues while a checkpoint is written. Each rank holds a
        /// copy of its share: weights and optimiser states, 12 bytes per parameter for AdamW and 8
        /// for RMSprop, less with `optimizer_state`. `tandem plan` shows it as "checkpoint copy".
        async_checkpoints: bool = boolean().or(true).free(),
        /// Steps between evaluations; 0 evaluates at the start (`eval_first`) and at the end only.
        eval_every: Option<u64> = integer(COUNT).zero_is_none().or(None).free(),
        /// Evaluations, samples, and the best checkpoint.
        evaluation: EvaluationConfig =
            group(|now, keys: &mut Keys| EvaluationConfig::visit(now, keys, method, has_eval)),
        /// Number of checkpoints kept, beside the one of `keep_best`; 0 keeps all.
        keep: Option<usize> = integer(COUNT).zero_is_none().or(Some(2)).free(),
        /// Consecutive steps that may be skipped for a loss or gradient that is not finite. The run
        /// then stops and names the rows.
        max_skipped: u64 = integer(COUNT).or(3).free(),
        /// Write `rows.jsonl` into the run's folder: for each step the rows of its batch, counted
        /// from 0 over the rows that training keeps.
        record_rows: bool = boolean().or(false).free(),
    }
}

/// Division of a global batch into micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MicroBatchSize {
    /// Rows that fit this many tokens of the forest, at least one.
    Tokens(usize),
    /// This many rows (pairs).
    Rows(usize),
}

impl MicroBatchSize {
    fn visit(now: Option<&Self>, keys: &mut Keys) -> Result<Self> {
        let is_rows = keys.has_second("micro_batch_tokens", "micro_batch_size")?;
        keys! { let keys, now;
            /// Largest micro-batch; a micro-batch has at least one row. It bounds memory; the loss is
            /// the mean over the whole batch.
            micro_batch_tokens = integer(1..=1 << 31).unit("tokens").maybe().or((!is_rows).then_some(4096)),
                if let Self::Tokens(tokens) = *now { Some(tokens) } else { None };
            /// Instead: pairs or rows of a micro-batch.
            micro_batch_size = integer(1..=1 << 24).optional(),
                if let Self::Rows(rows) = *now { Some(rows) } else { None };
        }
        Ok(micro_batch_size.map_or(Self::Tokens(micro_batch_tokens.unwrap_or_default()), Self::Rows))
    }
}

impl From<MicroBatchSize> for tandem_data::order::MicroBatchSize {
    fn from(size: MicroBatchSize) -> Self {
        match size {
            MicroBatchSize::Tokens(tokens) => Self::Tokens(tokens),
            MicroBatchSize::Rows(rows) => Self::Rows(rows),
        }
    }
}

/// Length of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// Optimiser steps.
    Steps(u64),
    /// Passes over the data; may be a fraction.
    Epochs(f64),
}

impl Length {
    fn visit(now: Option<&Self>, keys: &mut Keys) -> Result<Self> {
        let is_epochs = keys.has_second("steps", "epochs")?;
        keys! { let keys, now;
            /// Optimiser steps.
            steps = integer(AT_LEAST_ONE)
                .optional()
                .required_if(!is_epochs, "`steps` or `epochs`: how long to train")
                .shown("*this or* `epochs`"),
                if let Self::Steps(steps) = *now { Some(steps) } else { None };
            /// Passes over the data; may be a fraction.
            epochs = number(POSITIVE).optional(),
                if let Self::Epochs(epochs) = *now { Some(epochs) } else { None };
        }
        Ok(epochs.map_or(Self::Steps(steps.unwrap_or_default()), Self::Epochs))
    }

    /// Returns the optimiser steps for `num_rows` rows in batches of `batch_size`. An epoch's last
    /// batch may be short and is a step, as in `transformers`; a fraction of an epoch is rounded up.
    pub fn total_steps(self, num_rows: usize, batch_size: usize) -> u64 {
        match self {
            Self::Steps(steps) => steps,
            Self::Epochs(epochs) => (epochs * num_rows.div_ceil(batch_size).max(1) as f64).ceil() as u64,
        }
    }
}

/// The optimiser and its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// `torch.optim.AdamW`.
    AdamW {
        /// Decay rate of the first moment.
        beta1: f64,
        /// Decay rate of the second moment.
        beta2: f64,
        /// Term added to the root of the second moment.
        eps: f64,
    },
    /// `torch.optim.RMSprop`, which the original DPO code used.
    RmsProp {
        /// Decay rate of the squared gradient.
        alpha: f64,
        /// Term added to the root.
        eps: f64,
    },
}

impl Optimizer {
    fn visit(now: Option<&Self>, keys: &mut Keys) -> Result<Self> {
        keys! { let keys, now;
            /// The optimiser, as in PyTorch.
            optimizer = choice(["adamw", "rmsprop"].map(|name| (name, name))).or("adamw"),
                if matches!(now, Self::AdamW { .. }) { "adamw" } else { "rmsprop" };
            /// AdamW's decay rates.
            betas = betas()
                .or([0.9, 0.999])
                .only(optimizer == "adamw", "\"rmsprop\" has `alpha`; `betas` belong to \"adamw\""),
                if let Self::AdamW { beta1, beta2, .. } = *now { [beta1, beta2] } else { [0.0; 2] };
            /// RMSprop's decay rate.
            alpha = number(0.0..1.0)
                .or(0.99)
                .only(optimizer == "rmsprop", "\"adamw\" has `betas`; `alpha` belongs to \"rmsprop\""),
                if let Self::RmsProp { alpha, .. } = *now { alpha } else { 0.0 };
            /// Term added to the root in the optimiser.
            eps = number(POSITIVE).or(1e-8),
                match *now { Self::AdamW { eps, .. } | Self::RmsProp { eps, .. } => eps };
        }
        let [beta1, beta2] = betas;
        Ok(match optimizer {
            "adamw" => Self::AdamW { beta1, beta2, eps },
            _ => Self::RmsProp { alpha, eps },
        })
    }
}

fn betas<'a>() -> Form<'a, [f64; 2]> {
    let read = |entry: Entry| {
        let wrong = entry.wrong("two numbers in [0, 1), for example [0.9, 0.999]");
        let values = entry
            .items()
            .into_iter()
            .map(|item| (number(0.0..1.0).read)(item))
            .collect::<Result<Vec<_>>>()?;
        values.try_into().map_err(|_| wrong)
    };
    custom("two numbers, ≥ 0, < 1", read, |betas: &[f64; 2]| Value::from(betas.to_vec()))
}
