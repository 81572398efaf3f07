//! Identity preference optimisation (arXiv 2310.12036, equation 17).

use crate::objective::{ObjectiveConfig, Pair, Value};

/// `(δ − 1 / 2β)²` with δ the difference of the two ratios, each divided by its answer's length, as
/// TRL (and IPO's authors) do.
pub(crate) fn ipo_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let delta = pair.chosen_ratio / pair.chosen_tokens - pair.rejected_ratio / pair.rejected_tokens;
    let error = delta - 0.5 / pair.beta;
    Value {
        loss: error * error,
        d_chosen: 2.0 * error / pair.chosen_tokens,
        d_rejected: -2.0 * error / pair.rejected_tokens,
    }
}

/// The same over unnormalised ratios, as in Mitchell's code and TRL's `OnlineDPOTrainer`.
pub(crate) fn ipo_sum_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let error = pair.delta() - 0.5 / pair.beta;
    Value::from_difference(error * error, 2.0 * error, 1.0)
}
