//! Result of a verification.

use super::Stretch;
use crate::checkpoint::Comparison;
use crate::metrics::Split;

/// Result of a recomputation.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Steps that were computed again, unless a difference ended it earlier.
    pub stretch: Stretch,
    /// Number of ranks of the recomputation.
    pub ranks: usize,
    /// Remarks: other bits that were expected, and what is not known.
    pub notes: Vec<String>,
    /// Steps whose records were compared.
    pub num_steps: u64,
    /// Evaluations whose records were compared.
    pub num_evaluations: u64,
    /// Metrics of a record that were compared.
    pub num_metrics: usize,
    /// The first metric with other bits.
    pub metric: Option<MetricDifference>,
    /// Compared checkpoints, in the order of steps; the last one may differ.
    pub checkpoints: Vec<CheckpointVerdict>,
    /// Comparison of the trained model.
    pub model: ModelVerdict,
}

/// Comparison of the weights in `final/` with those that were computed again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelVerdict {
    /// It was not compared, for this reason.
    NotCompared(String),
    /// All bytes of its files of weights were compared.
    Compared {
        /// Step of the weights.
        step: u64,
        /// Names of the files.
        files: Vec<String>,
        /// Names of the files that are missing in `final/` or have other bytes there.
        different: Vec<String>,
    },
}

/// A metric of other bits.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricDifference {
    /// Step.
    pub step: u64,
    /// Rows that it is about.
    pub split: Split,
    /// Name.
    pub name: String,
    /// Value in the record; `None` if it is not finite or not there.
    pub recorded: Option<f64>,
    /// Value that was computed again.
    pub found: Option<f64>,
}

/// A checkpoint that was compared.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointVerdict {
    /// Steps done.
    pub step: u64,
    /// Hash of all state that was computed again.
    pub state: blake3::Hash,
    /// Hash that the run has recorded, if it has.
    pub recorded: Option<blake3::Hash>,
    /// Comparison of all elements; `None` if the run has deleted the checkpoint.
    pub comparison: Option<Comparison>,
    /// Damage of the run's checkpoint: its files are not those that were written.
    pub damage: Option<String>,
}

impl Verdict {
    /// Returns whether all that was compared has the same bits.
    pub fn is_same(&self) -> bool {
        self.metric.is_none()
            && self.checkpoints.iter().all(CheckpointVerdict::is_same)
            && self.model.is_same()
    }
}

impl ModelVerdict {
    fn is_same(&self) -> bool {
        match self {
            Self::NotCompared(_) => true,
            Self::Compared { different, .. } => different.is_empty(),
        }
    }
}

impl CheckpointVerdict {
    /// Returns whether all state has the same bits.
    pub fn is_same(&self) -> bool {
        self.damage.is_none()
            && self.recorded.is_none_or(|recorded| recorded == self.state)
            && self.comparison.as_ref().is_none_or(Comparison::is_same)
    }
}
