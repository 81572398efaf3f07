//! Losses that judge each answer against the reference on its own.

use crate::objective::{ObjectiveConfig, Pair, Value, log_sigmoid, sigmoid};

/// Noise contrastive alignment on pairs (arXiv 2402.05369): with rewards `c`, `r` (β times the log
/// ratios), `−ln σ(c) − ½ ln σ(−c) − ½ ln σ(−r)`.
pub(crate) fn nca_pair_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let (c, r) = (pair.beta * pair.chosen_ratio, pair.beta * pair.rejected_ratio);
    Value {
        loss: -log_sigmoid(c) - 0.5 * log_sigmoid(-c) - 0.5 * log_sigmoid(-r),
        d_chosen: pair.beta * (-sigmoid(-c) + 0.5 * sigmoid(c)),
        d_rejected: pair.beta * 0.5 * sigmoid(r),
    }
}

/// Binary classifier optimisation on pairs (arXiv 2404.04656), without its running shift, as TRL's
/// `bco_pair`: `−ln σ(c) − ln σ(−r)`.
pub(crate) fn bco_pair_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let (c, r) = (pair.beta * pair.chosen_ratio, pair.beta * pair.rejected_ratio);
    Value {
        loss: -log_sigmoid(c) - log_sigmoid(-r),
        d_chosen: -pair.beta * sigmoid(-c),
        d_rejected: pair.beta * sigmoid(r),
    }
}
