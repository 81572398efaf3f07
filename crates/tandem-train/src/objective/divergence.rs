//! Divergences to the reference other than the reverse KL (f-DPO, arXiv 2309.16240).

use std::f64::consts::LN_2;

use super::{log_sigmoid, sigmoid};

/// Which divergence between policy and reference the loss is a bound of.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Divergence {
    /// KL from the policy to the reference: DPO itself.
    #[default]
    ReverseKl,
    /// KL from the reference to the policy.
    ForwardKl,
    /// Jensen–Shannon.
    JensenShannon,
    /// The α-divergence; α = 1 is the reverse KL.
    Alpha(f64),
}

impl Divergence {
    /// The name in the config, the one TRL uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReverseKl => "reverse_kl",
            Self::ForwardKl => "forward_kl",
            Self::JensenShannon => "js_divergence",
            Self::Alpha(_) => "alpha_divergence",
        }
    }

    /// Replacement of the log ratio: `f′(e^ratio)` up to a constant that cancels in every
    /// difference and makes a ratio of 0 give 0; and its derivative by the ratio.
    pub(super) fn score(self, ratio: f64) -> (f64, f64) {
        match self {
            Self::ReverseKl => (ratio, 1.0),
            Self::ForwardKl => (-(-ratio).exp_m1(), (-ratio).exp()),
            Self::JensenShannon => (LN_2 + log_sigmoid(ratio), sigmoid(-ratio)),
            Self::Alpha(alpha) if (alpha - 1.0).abs() < 1e-6 => (ratio, 1.0),
            Self::Alpha(alpha) => {
                let power = (alpha - 1.0) * ratio;
                (power.exp_m1() / (alpha - 1.0), power.exp())
            }
        }
    }
}
