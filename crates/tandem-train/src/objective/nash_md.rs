//! Nash mirror descent (arXiv 2312.00886).

use super::Loss;

/// The scored tokens of some answers.
#[derive(Clone, Copy, Debug)]
pub struct TokenLogProbs<'a> {
    /// Which answer each token is of `[T]`.
    pub sequence: &'a [u32],
    /// Under the policy `[T]`, nats.
    pub policy: &'a [f32],
    /// Under the reference `[T]`.
    pub reference: &'a [f32],
}

/// Nash-MD: `β · Σ_t sg(a_t − r_t) · a_t − (p − ½) · Σ_t a_t` per completion. `a_t` and `r_t` are
/// token log-probabilities under policy and reference, `sg` stops the gradient, `p` is the
/// probability that the completion beats the mixture's. The first term contributes the token-level
/// gradient of the divergence. Writes into `out`, whose buffers are reused.
///
/// `advantages` `[S]` are `p − ½`.
pub fn nash_md_loss(tokens: &TokenLogProbs<'_>, advantages: &[f64], beta: f64, out: &mut Loss) {
    out.reset();
    out.weight = advantages.len() as f64;
    out.d_log_prob.resize(advantages.len(), 0.0);
    for ((&sequence, &policy), &reference) in tokens.sequence.iter().zip(tokens.policy).zip(tokens.reference)
    {
        let (policy, advantage) = (f64::from(policy), advantages[sequence as usize]);
        let slope = beta * (policy - f64::from(reference)) - advantage;
        out.sum += slope * policy;
        out.d_token.push(slope);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// TRL 0.21's and 1.0's `NashMDTrainer._compute_losses` in f64, with score differences of 0.75
    /// and −0.5.
    #[test]
    fn the_value_is_trls() {
        let tokens = TokenLogProbs {
            sequence: &[0, 0, 0, 1, 1],
            policy: &[-1.0, -2.0, -0.5, -0.7, -1.1],
            reference: &[-1.2, -1.7, -0.9, -0.6, -1.4],
        };
        let advantages = [0.75f64, -0.5].map(|difference| 1.0 / (1.0 + (-difference).exp()) - 0.5);
        let mut out = Loss::default();
        nash_md_loss(&tokens, &advantages, 0.1, &mut out);
        // Log-probabilities are f32.
        assert!((out.mean() - 0.20034932547526857).abs() < 1e-7, "{}", out.mean());
        let expected = [-0.0795893496, -0.1045893496, -0.0695893496, 0.0562296656, 0.0762296656];
        for (found, expected) in out.d_token.iter().zip(expected) {
            assert!((found / out.weight - expected).abs() < 1e-8, "{found}, TRL has {expected}");
        }
        assert_eq!((out.d_log_prob.len(), out.d_token.len()), (2, 5));
    }
}
