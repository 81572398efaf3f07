//! Contrastive preference optimisation (arXiv 2401.08417): DPO without a reference.

use crate::objective::losses::logistic::smoothed;
use crate::objective::{ObjectiveConfig, Pair, Value};

/// Equation 3's preference term: `−ln σ(x)`, `x = β (log π(chosen) − log π(rejected))`. With label smoothing
/// ε it is `−(1 − ε) ln σ(x) − ε ln σ(−x)`. The paper adds the likelihood of the chosen completions: a
/// term `sft` of weight 1, TRL's `cpo_alpha`.
pub(crate) fn cpo_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let x = pair.beta * (pair.chosen_log_prob - pair.rejected_log_prob);
    let (loss, slope) = smoothed(x, config.label_smoothing);
    Value::from_difference(loss, slope, pair.beta)
}
