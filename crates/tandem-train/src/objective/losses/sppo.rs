//! Self-play preference optimisation with hard labels (arXiv 2405.00675, equation 4.7 with P = 1
//! and 0).

use crate::objective::{ObjectiveConfig, Pair, Value};

/// `(chosen_ratio − 1/2β)² + (rejected_ratio + 1/2β)²`.
pub(crate) fn sppo_hard_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let (c, r) = (pair.chosen_ratio - 0.5 / pair.beta, pair.rejected_ratio + 0.5 / pair.beta);
    Value { loss: c * c + r * r, d_chosen: 2.0 * c, d_rejected: 2.0 * r }
}
