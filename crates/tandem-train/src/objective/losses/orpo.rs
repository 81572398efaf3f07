//! Odds ratio preference optimisation (arXiv 2403.07691).

use crate::objective::{ObjectiveConfig, Pair, Value, log_sigmoid, sigmoid};

/// Largest mean log-probability whose odds are told apart: those of 0 are infinite.
const LARGEST: f64 = -1e-7;

/// Equation 7 times β (the paper's λ): `−β ln σ(x)` with `x` the log of the odds ratio, from the mean
/// log-probabilities of the two completions. The paper adds the likelihood of the chosen completions: a term
/// `sft` of weight 1.
pub(crate) fn orpo_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let x = log_odds_ratio(pair.mean_log_probs());
    let [chosen, rejected] = pair.mean_log_probs().map(odds_slope);
    let slope = -pair.beta * sigmoid(-x);
    Value {
        loss: -pair.beta * log_sigmoid(x),
        d_chosen: slope * chosen / pair.chosen_scored,
        d_rejected: -slope * rejected / pair.rejected_scored,
    }
}

/// `ln (odds(chosen) / odds(rejected))` with `odds(p) = e^p / (1 − e^p)`.
pub(crate) fn log_odds_ratio([chosen, rejected]: [f64; 2]) -> f64 {
    log_odds(chosen) - log_odds(rejected)
}

fn log_odds(p: f64) -> f64 {
    let p = bounded(p);
    p - (-p.exp_m1()).ln()
}

/// Derivative of [`log_odds`].
fn odds_slope(p: f64) -> f64 {
    -1.0 / bounded(p).exp_m1()
}

/// `p`, or the largest value with finite odds. NaN stays.
fn bounded(p: f64) -> f64 {
    if p > LARGEST { LARGEST } else { p }
}
