//! Position of a run in its steps and data.

use serde::{Deserialize, Serialize};

use super::OnlineState;
use crate::objective::RewardMean;
use crate::optimizer::Weighting;

/// Everything besides tensors that the next step depends on. Orders and permutations are functions
/// of seed and epoch, so no generator state is needed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cursor {
    /// Steps done, the skipped ones included; the next step's 0-based number.
    pub step: u64,
    /// Optimiser updates done, for bias correction; skipped steps made none.
    pub updates: u64,
    /// 0-based epoch of the next row.
    pub epoch: u64,
    /// Rows of that epoch already consumed.
    pub position: u64,
    /// Seed of the run.
    pub seed: u64,
    /// Hash of the rows, in hex: a run must not go on with other data.
    pub data_hash: String,
    /// Tokens seen.
    pub num_tokens: u64,
    /// Steps skipped for a non-finite loss or gradient.
    pub skipped: u64,
    /// Number of consecutive skipped steps before the next one.
    pub skipped_in_row: u64,
    /// Seconds of training, over all sessions.
    pub seconds: f64,
    /// Online runs: completions that wait to be trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub online: Option<OnlineState>,
    /// With the loss `bco`: the mean of the rewards so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rewards: Option<RewardMean>,
    /// With schedule-free AdamW: the weights of its average so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_free: Option<Weighting>,
    /// Factor of the learning rate, where a training loop has set one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learning_rate_factor: Option<f64>,
    /// With `train.keep_best`: the best evaluation so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<BestEvaluation>,
    /// Whether the evaluation after the last step was left out, for a rank was to stop.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_evaluation_due: bool,
}

impl Cursor {
    /// Returns the position with the part of [`OnlineState`] that does not follow from the weights.
    pub(super) fn beside_weights(&self) -> Self {
        let online = self.online.as_ref().map(|online| online.beside_weights(self.step));
        Self { online, ..self.clone() }
    }
}

/// The best evaluation of a run so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BestEvaluation {
    /// Metric, as `train.keep_best` names it.
    pub metric: String,
    /// Hash of the held-out rows; empty in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub rows: String,
    /// Its value.
    pub value: f64,
    /// Steps done when it was evaluated.
    pub step: u64,
    /// Evaluations since one that differed from the best before by more than `train.early_stopping_threshold`.
    pub evaluations_since: u64,
}
