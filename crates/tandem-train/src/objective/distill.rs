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

/// Options of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DistillOptions {
    /// Interpolation of the divergence.
    pub beta: f64,
    /// Mean over the batch.
    pub average: Average,
}

/// Mean of a loss over the tokens of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Average {
    /// Every token weighs the same.
    Token,
    /// Every completion weighs the same.
    Sequence,
}

impl Average {
    /// Names in the config.
    pub(crate) const NAMES: [(&str, Self); 2] = [("token", Self::Token), ("sequence", Self::Sequence)];
}

/// The divergences of the scored tokens, each with its sequence: their mean, once `sum` is divided by the
/// global `weight`. `lengths` are the sequences' scored tokens. Writes into `out`, whose buffers are reused. The
/// derivative of each sequence is that by the divergence of each of its tokens.
pub fn distill_loss(
    divergences: impl Iterator<Item = (u32, f64)>,
    lengths: &[u32],
    average: Average,
    out: &mut Loss,
) {
    out.reset();
    out.d_log_prob.extend(lengths.iter().map(|&length| match average {
        Average::Token => 1.0,
        Average::Sequence => 1.0 / f64::from(length),
    }));
    for (sequence, divergence) in divergences {
        out.sum += out.d_log_prob[sequence as usize] * divergence;
    }
    out.weight = match average {
        Average::Token => lengths.iter().copied().map(f64::from).sum(),
        Average::Sequence => lengths.len() as f64,
    };
}
