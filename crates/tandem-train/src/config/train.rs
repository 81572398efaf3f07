//! `[train]`: batches, steps, optimiser, evaluation and checkpoints.

use tandem_kernels::StateForm;

use super::Method;
use super::error::Result;
use super::evaluation::EvaluationConfig;
use super::form::{COUNT, POSITIVE, boolean, choice, integer, number};
use super::groups::{self, ParameterGroup};
use super::keys::{Keys, group, keys};
use super::optimizer::Optimizer;
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
        /// Storage of the optimiser's states (AdamW has two; RMSprop, Lion and SGD with momentum one;
        /// schedule-free AdamW one, and 4 bytes of weights; Muon one for matrices of blocks;
        /// Adafactor a row and a column a matrix);
        /// updates compute in f32. `"f32"`: 4 bytes per parameter. `"bf16"`: 2 bytes, with stochastic rounding. `"8bit"`: 1 + 1/64
        /// bytes, codes of bitsandbytes' dynamic maps with a scale for each 256 elements. See
        /// [ranks.md](ranks.md#optimiser-states-in-fewer-bits).
        optimizer_state: StateForm = choice(StateForm::NAMES)
            .unless(|form| match optimizer {
                _ if *form == StateForm::F32 => None,
                Optimizer::Adafactor => Some(
                    "Adafactor's second moments are sums of rows and columns, which are few and f32; remove it"
                        .to_owned(),
                ),
                Optimizer::Sgd { momentum: 0.0, .. } => {
                    Some("SGD without train.momentum has no states; remove it, or set train.momentum".to_owned())
                }
                _ => None,
            })
            .or(StateForm::F32),
        /// Learning rate after the warm-up.
        schedule: Shape = group(|now, keys: &mut Keys| Shape::visit(now, keys, learning_rate, &optimizer)),
        /// Rise of the learning rate before the schedule.
        warmup: Span = group(schedule::warmup),
        /// Largest norm of the gradient over all parameters; 0 never clips.
        max_grad_norm: Option<f64> = number(0.0..).zero_is_none().or(Some(1.0)),
        /// Weight decay. Biases and norms have none. RMSprop and SGD add it to the gradient, as in
        /// PyTorch; the others decay the weights.
        weight_decay: f64 = number(0.0..).or(0.0),
        /// Decay of an exponential moving average of the weights, f32, 4 bytes per parameter. Evaluations,
        /// samples and `final/` have the average. 0 has none. See
        /// [optimizers.md](optimizers.md#averages-of-the-weights).
        ema_decay: Option<f64> = number(0.0..1.0)
            .zero_is_none()
            .or(None)
            .only(
                !matches!(optimizer, Optimizer::ScheduleFreeAdamW { .. }),
                "schedule-free AdamW has an average of its own, which is evaluated and saved; remove it",
            ),
        /// NEFTune: uniform noise in ±alpha / √(L · D) on the embeddings of the policy's training passes, of L
        /// tokens and D dimensions, for example 5; 0 adds none. See
        /// [optimizers.md](optimizers.md#noise-on-embeddings).
        neftune_noise_alpha: Option<f64> = number(0.0..).zero_is_none().or(None).only(
            !method.generates(),
            "an online run compares with log-probabilities of its own answers, which have no noise; remove it",
        ),
        /// Groups of parameters that train apart: `[[train.groups]]` tables with `parameters` (a
        /// regular expression of tensor names), and `learning_rate_factor`, `weight_decay` or `frozen`.
        /// See [optimizers.md](optimizers.md#parameter-groups).
        groups: Vec<ParameterGroup> = groups::groups().or(Vec::new()),
        /// Steps between checkpoints; 0 saves at the end only.
        save_every: Option<u64> = integer(COUNT).zero_is_none().or(None).free(),
        /// With `save_every`: training continues while a checkpoint is written. Each rank holds a
        /// copy of its share: weights and optimiser states, 12 bytes per parameter for AdamW and 8
        /// with one state, less with `optimizer_state`. `tandem plan` shows it as "checkpoint copy".
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
            /// Largest micro-batch, of at least one row. Completions of a prompt beyond it are in several, each with a
            /// copy of the prompt; those that are compared in pairs stay together. It bounds memory; the loss is the
            /// mean over the whole batch.
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

/// Most steps of a run. The plan looks at the rows of each.
pub(crate) const MAX_STEPS: u64 = 10_000_000;

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
            steps = integer(1..=MAX_STEPS)
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
