//! Losses through the log-sigmoid of the scaled margin: DPO and its label-noise variants.

use crate::objective::{ObjectiveConfig, Pair, Value, log_sigmoid, sigmoid};

/// DPO (arXiv 2305.18290, equation 7): `−ln σ(x)`, `x = β (chosen_ratio − rejected_ratio)`. With
/// label smoothing ε it is conservative DPO, `−(1 − ε) ln σ(x) − ε ln σ(−x)`, as in Mitchell's
/// `preference_loss`.
pub(crate) fn sigmoid_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let (loss, slope) = smoothed(pair.beta * pair.delta(), config.label_smoothing);
    Value::from_difference(loss, slope, pair.beta)
}

/// The same over ratios divided by completion length (TRL's `sigmoid_norm`).
pub(crate) fn sigmoid_norm_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let delta = pair.chosen_ratio / pair.chosen_tokens - pair.rejected_ratio / pair.rejected_tokens;
    let (loss, slope) = smoothed(pair.beta * delta, config.label_smoothing);
    Value {
        loss,
        d_chosen: pair.beta * slope / pair.chosen_tokens,
        d_rejected: -pair.beta * slope / pair.rejected_tokens,
    }
}

/// Robust DPO (arXiv 2403.00409, equation 11): unbiased where a share ε of the labels is flipped,
/// `(−(1 − ε) ln σ(x) + ε ln σ(−x)) / (1 − 2ε)`.
pub(crate) fn robust_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let (x, e) = (pair.beta * pair.delta(), config.label_smoothing);
    let loss = -(1.0 - e) * log_sigmoid(x) + e * log_sigmoid(-x);
    let slope = -(1.0 - e) * sigmoid(-x) - e * sigmoid(x);
    let debias = 1.0 / (1.0 - 2.0 * e);
    Value::from_difference(loss * debias, slope * debias, pair.beta)
}

/// `−(1 − ε) ln σ(x) − ε ln σ(−x)` and its derivative.
pub(super) fn smoothed(x: f64, e: f64) -> (f64, f64) {
    let loss = -(1.0 - e) * log_sigmoid(x) - e * log_sigmoid(-x);
    (loss, -(1.0 - e) * sigmoid(-x) + e * sigmoid(x))
}
