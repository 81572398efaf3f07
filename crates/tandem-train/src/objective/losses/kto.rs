//! Losses of completions that are desirable or not, each alone.
//!
//! [`Pair::chosen_ratio`] is the completion's log ratio, and `rejected_ratio` that of a mismatched completion,
//! of which the batch's divergence to the reference is estimated.

use crate::objective::{BatchRewards, ObjectiveConfig, Pair, PairLogProbs, Value, sigmoid};

/// Kahneman–Tversky optimisation (arXiv 2402.01306, equation 8): `w (1 − σ(±β (ratio − z)))`, with `+` and
/// `w = desirable_weight` for a desirable completion, else `−` and `undesirable_weight`. `z` is the
/// estimated divergence, through which no gradient goes.
pub(crate) fn kto_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    one_sided(pair, config, pair.partners[0])
}

/// The unpaired form of APO-zero (arXiv 2408.06266, equation 7), as in TRL: KTO without the divergence.
pub(crate) fn apo_zero_unpaired_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    one_sided(pair, config, 0.0)
}

fn one_sided(pair: &Pair, config: &ObjectiveConfig, shift: f64) -> Value {
    let (sign, weight) = side(pair, config);
    let x = sign * pair.beta * (pair.chosen_ratio - shift);
    let slope = -sigmoid(x) * sigmoid(-x);
    Value { loss: weight * sigmoid(-x), d_chosen: weight * sign * pair.beta * slope, d_rejected: 0.0 }
}

/// The sign and the weight that a completion's label gives it.
pub(super) fn side(pair: &Pair, config: &ObjectiveConfig) -> (f64, f64) {
    if pair.label { (1.0, config.desirable_weight) } else { (-1.0, config.undesirable_weight) }
}

/// For every completion the divergence estimated over the batch: the mean log ratio of its mismatched
/// completions, at least 0.
pub(crate) fn mean_of_mismatched(batch: &PairLogProbs, _: &BatchRewards) -> Vec<[f64; 2]> {
    let mismatched = || (1..batch.policy.len()).step_by(2);
    let sum: f64 = mismatched().map(|s| batch.log_ratio(s)).sum();
    let mean = sum / mismatched().count().max(1) as f64;
    // NaN stays, so that a broken batch is noticed.
    let divergence = if mean < 0.0 { 0.0 } else { mean };
    vec![[divergence, 0.0]; mismatched().count()]
}
