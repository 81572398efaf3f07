//! Alignment by optimal transport (arXiv 2406.05882): sorted values of the whole batch against each other.

use crate::objective::losses::logistic::smoothed;
use crate::objective::{BatchRewards, ObjectiveConfig, Pair, PairLogProbs, Value};

/// The paired variant: the policy's k-th smallest margin `log π(chosen) − log π(rejected)` against the
/// reference's: `−ln σ(β (margin − partner))`, with label smoothing as in `sigmoid`.
pub(crate) fn aot_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let margin = pair.chosen_log_prob - pair.rejected_log_prob;
    let (loss, slope) = smoothed(pair.beta * (margin - pair.partners[0]), config.label_smoothing);
    Value::from_difference(loss, slope, pair.beta)
}

/// The reference's margin of the same rank as each pair's own.
pub(crate) fn aot_partners(batch: &PairLogProbs, _: &BatchRewards) -> Vec<[f64; 2]> {
    let margins = |values: &[f64]| values.as_chunks::<2>().0.iter().map(|[c, r]| c - r).collect::<Vec<_>>();
    let policy = margins(batch.policy);
    let reference = batch.reference.map_or_else(|| vec![0.0; policy.len()], margins);
    let mut partners = vec![[0.0; 2]; policy.len()];
    for (of_policy, of_reference) in ranks(&policy).into_iter().zip(ranks(&reference)) {
        partners[of_policy][0] = reference[of_reference];
    }
    partners
}

/// The unpaired variant: the k-th smallest ratio of chosen completions against that of rejected ones. A
/// pair has the loss of its chosen completion.
pub(crate) fn aot_unpaired_loss(pair: &Pair, config: &ObjectiveConfig) -> Value {
    let [rejected, chosen] = pair.partners;
    let of = |chosen: f64, rejected: f64| smoothed(pair.beta * (chosen - rejected), config.label_smoothing);
    let (loss, slope) = of(pair.chosen_ratio, rejected);
    let (_, slope_of_rejected) = of(chosen, pair.rejected_ratio);
    Value { loss, d_chosen: pair.beta * slope, d_rejected: -pair.beta * slope_of_rejected }
}

/// The rejected ratio of the same rank as each pair's chosen one, and the chosen ratio of the same rank as
/// its rejected one.
pub(crate) fn aot_unpaired_partners(batch: &PairLogProbs, _: &BatchRewards) -> Vec<[f64; 2]> {
    let ratios =
        |side: usize| (side..batch.policy.len()).step_by(2).map(|s| batch.log_ratio(s)).collect::<Vec<_>>();
    let (chosen, rejected) = (ratios(0), ratios(1));
    let mut partners = vec![[0.0; 2]; chosen.len()];
    for (of_chosen, of_rejected) in ranks(&chosen).into_iter().zip(ranks(&rejected)) {
        partners[of_chosen][0] = rejected[of_rejected];
        partners[of_rejected][1] = chosen[of_chosen];
    }
    partners
}

/// Indices in ascending order of their values; of equal values the first comes first.
fn ranks(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // Of two zeros of different sign neither is smaller.
    order.sort_by(|&a, &b| (values[a] + 0.0).total_cmp(&(values[b] + 0.0)));
    order
}
