//! Anchored preference optimisation (arXiv 2408.06266). The form depends on whether the completions
//! are better than the model.

use crate::objective::{ObjectiveConfig, Pair, Value, sigmoid};

/// Equation 7, for chosen answers better than the model's: `1 − σ(β chosen_ratio) + σ(β
/// rejected_ratio)`.
pub(crate) fn apo_zero_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let (c, r) = (pair.beta * pair.chosen_ratio, pair.beta * pair.rejected_ratio);
    Value {
        loss: sigmoid(-c) + sigmoid(r),
        d_chosen: -pair.beta * slope(c),
        d_rejected: pair.beta * slope(r),
    }
}

/// Equation 8, for chosen answers worse than the model's: `σ(β chosen_ratio) + 1 − σ(β
/// (chosen_ratio − rejected_ratio))`.
pub(crate) fn apo_down_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let (c, x) = (pair.beta * pair.chosen_ratio, pair.beta * pair.delta());
    Value {
        loss: sigmoid(c) + sigmoid(-x),
        d_chosen: pair.beta * (slope(c) - slope(x)),
        d_rejected: pair.beta * slope(x),
    }
}

/// σ′(x).
fn slope(x: f64) -> f64 {
    sigmoid(x) * sigmoid(-x)
}
