//! The loss of a reward model.

use super::{Loss, log_sigmoid, sigmoid};

/// Bradley–Terry (1952) preference loss as in TRL's `RewardTrainer`: `−ln σ(x)`, `x = r_chosen −
/// r_rejected − margin`, plus `centring · (r_chosen + r_rejected)²` to pull rewards towards zero
/// (arXiv 2312.09244). Sums over pairs, written into `out`, whose buffers are reused.
///
/// `rewards` `[2B]` alternate chosen and rejected; `margins` `[B]` are the required leads.
///
/// # Panics
/// The lengths do not match.
pub fn reward_loss(rewards: &[f64], margins: &[f32], centring: Option<f64>, out: &mut Loss) {
    assert_eq!(rewards.len(), 2 * margins.len(), "rewards of pairs, and their margins");
    out.reset();
    let centring = centring.unwrap_or(0.0);
    for (pair, &margin) in rewards.as_chunks::<2>().0.iter().zip(margins) {
        let [chosen, rejected] = *pair;
        let x = chosen - rejected - f64::from(margin);
        let (slope, both) = (-sigmoid(-x), chosen + rejected);
        let pull = 2.0 * centring * both;
        out.sum += centring * both * both - log_sigmoid(x);
        out.weight += 1.0;
        out.d_log_prob.extend([slope + pull, pull - slope]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss(rewards: &[f64], margins: &[f32], centring: Option<f64>) -> Loss {
        let mut out = Loss::default();
        reward_loss(rewards, margins, centring, &mut out);
        out
    }

    /// Equal rewards say nothing: ln 2 a pair.
    #[test]
    fn rewards_that_agree_cost_ln_2() {
        let out = loss(&[0.75, 0.75, -3.0, -3.0], &[0.0, 0.0], None);
        assert_eq!((out.sum, out.weight), (2.0 * std::f64::consts::LN_2, 2.0));
        assert_eq!(out.d_log_prob, [-0.5, 0.5, -0.5, 0.5]);
    }

    /// A lead of as much as the margin asks for is as good as none without.
    #[test]
    fn a_margin_is_a_lead_that_does_not_count() {
        assert_eq!(loss(&[1.5, 1.0], &[0.5], None), loss(&[1.0, 1.0], &[0.0], None));
    }

    /// Central differences of step h are off by h² / 6 times a third derivative of order one, and
    /// by rounding over h.
    #[test]
    fn derivatives_are_those_of_the_value() {
        let (rewards, margins) = ([0.3, -1.2, 2.5, 2.75, -30.0, 40.0], [0.25, -0.5, 0.0]);
        for centring in [None, Some(0.01), Some(0.5)] {
            let out = loss(&rewards, &margins, centring);
            for at in 0..rewards.len() {
                let moved = |by: f64| {
                    let mut rewards = rewards;
                    rewards[at] += by;
                    loss(&rewards, &margins, centring).sum
                };
                let h = 1e-5;
                let slope = (moved(h) - moved(-h)) / (2.0 * h);
                assert!((slope - out.d_log_prob[at]).abs() < 1e-6, "{at}: {slope} {:?}", out.d_log_prob);
            }
        }
    }
}
