//! DPO-positive (arXiv 2402.13228).

use crate::objective::{ObjectiveConfig, Pair, Value, log_sigmoid, sigmoid};

/// Equation 3: `−ln σ(x)`, `x = β (chosen_ratio − rejected_ratio − λ max(0, −chosen_ratio))`. The last part,
/// with λ = `dpop_lambda`, keeps the chosen completion at least as likely as under the reference.
pub(crate) fn dpop_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let lambda = if pair.chosen_ratio < 0.0 { config.dpop_lambda } else { 0.0 };
    let x = pair.beta * (pair.delta() + lambda * pair.chosen_ratio);
    let slope = -pair.beta * sigmoid(-x);
    Value { loss: -log_sigmoid(x), d_chosen: slope * (1.0 + lambda), d_rejected: -slope }
}
