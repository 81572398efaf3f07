//! Events of a run for its observer. The library prints nothing itself.

use std::fmt::Display;
use std::path::Path;

use tandem_data::token_cache::TokenCache;

use crate::metrics::{Advice, Record, Sample, Split};

/// A rank's plan, as an observer sees it: its text, and bytes of each memory.
pub trait Planned: Display {
    /// Bytes of the device's arenas.
    fn arena_bytes(&self) -> usize;
    /// Bytes of host memory beside the arenas.
    fn host_bytes(&self) -> usize;
    /// Bytes of the offload file.
    fn file_bytes(&self) -> usize;
}

/// An event.
pub enum Event<'a> {
    /// Rows are being tokenised.
    Tokenizing {
        /// Which data.
        split: Split,
        /// Bytes of input done.
        done: u64,
        /// Bytes of input in all.
        total: u64,
    },
    /// Data is ready.
    Data {
        /// Which data.
        split: Split,
        /// Tokenised rows, with counts and reasons of kept, truncated and dropped rows.
        cache: &'a TokenCache,
    },
    /// The memory plan.
    Plan(&'a dyn Planned),
    /// Log-probabilities of the reference are being computed, once.
    Reference {
        /// Which data.
        split: Split,
        /// Rows done.
        done: u64,
        /// Rows in all.
        total: u64,
    },
    /// The first step is about to run (`step` 0), or the run continues after `step`.
    Started {
        /// Steps already done.
        step: u64,
        /// Steps in all.
        steps: u64,
        /// The checkpoint continued from.
        resumed_from: Option<&'a Path>,
        /// Advice on the steps before it, which an earlier process has given.
        advice: &'a [Advice],
    },
    /// Policy and reference start from different weights: the mean over the first batch's answer
    /// tokens of log π(token) − log ref(token), in nats.
    StartingGap {
        /// Nats per answer token.
        per_token: f64,
    },
    /// A training step or an evaluation is done; the record's split says which.
    Record(&'a Record),
    /// The model has answered the prompts of a few rows.
    Samples {
        /// Steps done.
        step: u64,
        /// The answers, of the same rows each time.
        samples: &'a [Sample],
    },
    /// Training is over, and the model that is written is that of an earlier step, the best one.
    Best {
        /// The step.
        step: u64,
        /// `train.keep_best`.
        metric: &'a str,
        /// The metric's value after that step.
        value: f64,
    },
    /// The run ends before its last step: the metric of `train.keep_best` has not improved.
    StoppedEarly {
        /// Steps done.
        step: u64,
        /// Evaluations without an improvement.
        evaluations: u64,
    },
    /// The run stops because it was told to; its state is saved, if a step was done.
    Stopped {
        /// Steps done.
        step: u64,
    },
    /// A step was left out because its loss or gradient was not finite, or too large for exact sums.
    Skipped {
        /// 1-based step.
        step: u64,
        /// Cause, and the remedy if there is one.
        reason: &'a str,
        /// The rows concerned, as file and line.
        rows: &'a str,
        /// How many steps in a row by now.
        in_a_row: u64,
    },
    /// A checkpoint is complete.
    Saved(&'a Path),
    /// The final model is written.
    Finished(&'a Path),
    /// Some steps were profiled, and the run is over.
    Profiled {
        /// The first rank's profile.
        report: &'a dyn Display,
        /// Folder of all ranks' profiles.
        folder: &'a Path,
    },
    /// The metrics show a known trouble, for the first time in the run.
    Advice(&'a Advice),
    /// A warning for the user.
    Warning(&'a str),
}

/// Observer of a run.
pub trait Observer: Send {
    /// Called on the training thread; should be quick.
    fn event(&mut self, event: &Event<'_>);

    /// Returns whether somebody has asked for a checkpoint since the last call. Called on every rank
    /// between steps; one that says so is enough.
    fn is_to_save(&mut self) -> bool {
        false
    }
}

/// Watches nothing.
#[derive(Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn event(&mut self, _event: &Event<'_>) {}
}
