//! Binary classifier optimisation of labelled completions (arXiv 2404.04656).

use crate::objective::losses::kto::side;
use crate::objective::{BatchRewards, ObjectiveConfig, Pair, PairLogProbs, Value, log_sigmoid, sigmoid};

/// Equation 11: `−w ln σ(s (β ratio − δ))`, with `s = 1` for a desirable completion, else −1, and its weight
/// `w`. `δ` is the mean reward of all completions so far, the batch's among them, as in TRL's
/// `BCOTrainer`; no gradient goes through it.
pub(crate) fn bco_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let (sign, weight) = side(pair, config);
    let x = sign * (pair.beta * pair.chosen_ratio - pair.partners[0]);
    let d_chosen = -weight * sign * pair.beta * sigmoid(-x);
    Value { loss: -weight * log_sigmoid(x), d_chosen, d_rejected: 0.0 }
}

/// For every completion the mean reward so far.
pub(crate) fn mean_reward(batch: &PairLogProbs, rewards: &BatchRewards) -> Vec<[f64; 2]> {
    let own = || (0..batch.policy.len()).step_by(2);
    let sum: f64 = own().map(|s| rewards.beta * batch.log_ratio(s)).sum();
    let so_far = if rewards.learns { rewards.so_far.with(sum, own().count() as u64) } else { rewards.so_far };
    vec![[so_far.mean, 0.0]; own().count()]
}
