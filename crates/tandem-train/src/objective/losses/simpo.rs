//! Simple preference optimisation (arXiv 2405.14734).

use crate::objective::losses::logistic::smoothed;
use crate::objective::{ObjectiveConfig, Pair, Value};

/// Equation 6: `−ln σ(x)`, `x = β (p_chosen − p_rejected) − γ` with `p` the mean log-probability of a
/// completion's tokens and γ the target margin, `simpo_gamma`. Label smoothing is as in `cpo`.
pub(crate) fn simpo_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let [chosen, rejected] = pair.mean_log_probs();
    let (loss, slope) =
        smoothed(pair.beta * (chosen - rejected) - config.simpo_gamma, config.label_smoothing);
    Value {
        loss,
        d_chosen: pair.beta * slope / pair.chosen_scored,
        d_rejected: -pair.beta * slope / pair.rejected_scored,
    }
}
