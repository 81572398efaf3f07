//! Efficient exact optimisation on pairs (arXiv 2402.00856, equation 16).

use crate::objective::{ObjectiveConfig, Pair, Value, log_sigmoid, sigmoid};

/// KL from the policy's preference `(σ(x), σ(−x))` to the smoothed label `(1 − ε, ε)`, `x = β
/// (chosen − rejected)`.
pub(crate) fn exo_pair_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let (x, e) = (pair.beta * pair.delta(), config.label_smoothing);
    let (win, lose) = (sigmoid(x), sigmoid(-x));
    let log_win = log_sigmoid(x) - (-e).ln_1p();
    let log_lose = log_sigmoid(-x) - e.ln();
    // The derivatives of the two logarithms cancel: σ(x)·σ(−x) − σ(−x)·σ(x).
    Value::from_difference(win * log_win + lose * log_lose, win * lose * (log_win - log_lose), pair.beta)
}
