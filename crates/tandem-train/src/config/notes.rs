//! Keys that were given and change nothing in this run.

use super::groups::ParameterGroup;
use super::{Config, LoggingConfig, Method, ReferenceKind};

/// Default of `train.sample_tokens`.
pub(super) const SAMPLE_TOKENS: usize = 64;

/// Default of `logging.grace_s`, seconds.
pub(super) const GRACE: f64 = 15.0;

impl Config {
    /// Returns whether the only step of a run is the first of its warm-up, with a learning rate of 0.
    pub fn is_all_warmup(&self, total_steps: u64) -> bool {
        total_steps == 1 && self.train.warmup.steps(total_steps) > 0
    }

    /// Returns a remark about each key that has no effect in a run of `total_steps`. Such a config is not
    /// refused: a trial of few steps has the other keys of the run that it tries.
    pub(crate) fn notes(&self, total_steps: u64) -> Vec<String> {
        let mut notes = Vec::new();
        let mut note = |is_idle: bool, text: String| notes.extend(is_idle.then_some(text));
        let (train, sync) = (&self.train, self.reference.sync.steps);
        note(
            self.reference.kind == ReferenceKind::Sync && sync >= total_steps,
            format!(
                "reference.sync_steps = {sync}: no pull comes before the last of {total_steps} steps, so the reference stays as \
                 it is at the start; lower it, or set reference.kind = \"model\" (\"base\" with an adapter)"
            ),
        );
        let warmup = train.warmup.steps(total_steps);
        note(
            self.is_all_warmup(total_steps),
            "the only step is the first of the warm-up and has a learning rate of 0: the model stays as it is".to_owned(),
        );
        note(
            warmup > 0 && warmup >= total_steps && total_steps > 1,
            format!(
                "the warm-up has {warmup} steps and the run {total_steps}: the learning rate rises to the end and does not \
                 reach train.learning_rate"
            ),
        );
        let tokens = train.evaluation.sample_tokens;
        note(
            tokens != SAMPLE_TOKENS && self.num_samples() == 0,
            format!("train.sample_tokens = {tokens} has no effect: train.samples comes to 0 here"),
        );
        note(
            !self.data.share_prefix && self.online.is_none() && self.method != Method::Dpo,
            format!(
                "data.share_prefix = false has no effect with method = \"{}\", which has no texts with a common prompt",
                self.method
            ),
        );
        let LoggingConfig { run, tensorboard, command, grace_s, mlflow } = &self.logging;
        let has_tracker = tensorboard.is_some() || !command.is_empty() || mlflow.is_some();
        note(
            *grace_s != GRACE && !has_tracker,
            format!("logging.grace_s = {grace_s} has no effect: [logging] names no tracker"),
        );
        let is_named = self.output.file_name().is_none_or(|name| name.to_string_lossy() != *run);
        note(
            is_named && !has_tracker && self.output.file_name().is_some(),
            format!("logging.run = {run:?} has no effect: [logging] names no tracker"),
        );
        if let Some(ParameterGroup { parameters, learning_rate_factor, weight_decay: None, frozen: false }) =
            train.groups.last()
        {
            note(
                *learning_rate_factor == 1.0,
                format!(
                    "train.groups: the last group, parameters = {parameters:?}, has no effect: it trains like parameters of no \
                     group"
                ),
            );
        }
        notes
    }
}
