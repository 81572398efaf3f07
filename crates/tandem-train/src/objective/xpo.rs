//! Exploratory preference optimisation (arXiv 2405.21046).

use super::Loss;

/// XPO: adds `alpha · log π` of the reference's completions to a pair loss. The policy is pulled
/// away from them, whether they won or lost. `policy` `[S]` are sums over scored tokens per
/// sequence, `explored` the reference's sequences, and `out` holds derivatives per sequence.
pub fn add_exploration(policy: &[f64], explored: &[u32], alpha: f64, out: &mut Loss) {
    for &sequence in explored {
        out.sum += alpha * policy[sequence as usize];
        out.d_log_prob[sequence as usize] += alpha;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objective::tests::config;
    use crate::objective::{BatchTotals, ObjectiveConfig, PairLogProbs, preference_loss};

    /// TRL 0.21's and 1.0's `XPOTrainer._compute_losses` in f64: two prompts, the policy's answer
    /// and the reference's; in the second the reference's is the better one.
    #[test]
    fn the_value_is_trls() {
        let policy = [-3.5, -3.0, -1.8, -2.8];
        let reference = [-3.8, -2.9, -2.0, -2.8];
        let pairs = [[0, 1], [3, 2]];
        for (name, mean, own, others) in [
            ("sigmoid", 0.6592721734773341, [-0.0245000667, 0.0252499917], [0.0295000667, -0.0202499917]),
            ("ipo_sum", 24.071, [-4.6, 5.2], [4.605, -5.195]),
        ] {
            let config = ObjectiveConfig { exploration: 0.01, ..config(&[(name, 1.0)]) };
            let of =
                |values: &[f64]| pairs.as_flattened().iter().map(|&s| values[s as usize]).collect::<Vec<_>>();
            let (of_policy, of_reference) = (of(&policy), of(&reference));
            let batch = PairLogProbs {
                policy: &of_policy,
                reference: Some(&of_reference),
                answer_tokens: &[2; 4],
                scored_tokens: &[2; 4],
                ..PairLogProbs::default()
            };
            let mut out = Loss::default();
            let totals = BatchTotals { pairs: 2, chosen_tokens: 4 };
            preference_loss(&batch, &totals.into(), &config, config.beta, &mut out);
            out.spread(&pairs, &[], 4);
            add_exploration(&policy, &[1, 3], config.exploration, &mut out);
            assert!((out.mean() - mean).abs() < 1e-12 * mean, "{name}: {}", out.mean());
            let found: Vec<f64> = out.d_log_prob.iter().map(|d| d / out.weight).collect();
            for (found, expected) in found.iter().zip([own[0], others[0], own[1], others[1]]) {
                assert!((found - expected).abs() < 1e-9, "{name}: {found}, TRL has {expected}");
            }
        }
    }
}
