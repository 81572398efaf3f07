//! The hinge on the scaled margin (SLiC, arXiv 2309.06657).

use crate::objective::{ObjectiveConfig, Pair, Value};

/// `max(0, 1 − β (chosen_ratio − rejected_ratio))`. At the kink the derivative is 0, as
/// `torch.relu`'s.
pub(crate) fn hinge_loss(pair: &Pair, _: &ObjectiveConfig) -> Value {
    let slack = 1.0 - pair.beta * pair.delta();
    // Asked this way round, NaN goes to the second branch and is seen; it must not vanish as a zero
    // loss.
    if slack <= 0.0 { Value::default() } else { Value::from_difference(slack, -1.0, pair.beta) }
}
