//! Distillation: a mean over tokens of the divergence from a teacher (GKD, arXiv 2306.13649).

use super::Loss;

/// Sums over the answers' tokens behind the metrics of distillation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DistillStats {
    /// Tokens.
    pub tokens: f64,
    /// Σ KL(teacher‖policy).
    pub forward_kl: f64,
    /// Σ KL(policy‖teacher).
    pub reverse_kl: f64,
    /// Σ entropy of the teacher.
    pub teacher_entropy: f64,
}

/// The divergences of the scored tokens: their mean, once `sum` is divided by the global `weight`.
/// Writes into `out`, whose buffers are reused. The derivative of each sequence is that by the
/// divergence of each of its tokens.
pub fn distill_loss(divergences: impl Iterator<Item = f64>, num_sequences: usize, out: &mut Loss) {
    out.reset();
    for divergence in divergences {
        out.sum += divergence;
        out.weight += 1.0;
    }
    out.d_log_prob.resize(num_sequences, 1.0);
}
