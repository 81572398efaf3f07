//! DiscoPOP, the blend that a language model found (arXiv 2406.08414, equation 5).

use crate::objective::{ObjectiveConfig, Pair, Value, log_sigmoid, sigmoid};

/// `−(1 − m) ln σ(x) + m e^{−x}` with `x = β (chosen_ratio − rejected_ratio)` and `m = σ(x / τ)`.
pub(crate) fn discopop_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let (x, tau) = (pair.beta * pair.delta(), config.discopop_tau);
    let (m, rest) = (sigmoid(x / tau), sigmoid(-x / tau));
    let logistic = -log_sigmoid(x);
    // m·e^{−x} in one exponent: apart, e^{−x} overflows long before m reaches zero.
    let exponential = (log_sigmoid(x / tau) - x).exp();
    let loss = rest * logistic + exponential;
    let slope = -rest * sigmoid(-x) - m * rest / tau * logistic - exponential + exponential * rest / tau;
    Value::from_difference(loss, slope, pair.beta)
}
