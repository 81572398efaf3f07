//! Losses of one pair by TRL's names: one file each, one line in [`LOSSES`].

mod apo;
mod discopop;
mod exo;
mod hinge;
mod ipo;
mod logistic;
mod pointwise;
mod sft;
mod sppo;

use super::{ObjectiveConfig, Pair, Value};

/// A loss on one pair.
pub struct PairLoss {
    /// Name in the config, TRL's.
    pub name: &'static str,
    /// Value and derivatives on one pair.
    pub value: fn(&Pair, &ObjectiveConfig) -> Value,
    /// Meaning of `label_smoothing`.
    pub smoothing: Smoothing,
    /// Whether the loss depends only on ratios to the reference. Its value is then one constant
    /// wherever policy and reference agree.
    pub of_ratios: bool,
    /// Whether a [`Divergence`](crate::objective::Divergence) other than the reverse KL may be chosen; not for
    /// losses derived from each ratio alone.
    pub any_divergence: bool,
}

/// Meaning of `label_smoothing` for a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Smoothing {
    /// None: a value other than 0 is refused.
    Unused,
    /// Any value in `[0, 1]`.
    Any,
    /// A value in `[0, 0.5)`: the loss divides by `1 − 2ε`.
    BelowHalf,
    /// A value in `(0, 1)`: the loss takes `ln ε`.
    Positive,
}

impl std::fmt::Debug for PairLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for PairLoss {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

const fn loss(
    name: &'static str,
    value: fn(&Pair, &ObjectiveConfig) -> Value,
    smoothing: Smoothing,
) -> PairLoss {
    PairLoss { name, value, smoothing, of_ratios: true, any_divergence: true }
}

/// A loss that knows the reverse KL alone.
const fn reverse_kl_loss(name: &'static str, value: fn(&Pair, &ObjectiveConfig) -> Value) -> PairLoss {
    PairLoss { any_divergence: false, ..loss(name, value, Smoothing::Unused) }
}

pub(crate) static LOSSES: &[PairLoss] = &[
    loss("sigmoid", logistic::sigmoid_loss, Smoothing::Any),
    loss("sigmoid_norm", logistic::sigmoid_norm_loss, Smoothing::Any),
    loss("robust", logistic::robust_loss, Smoothing::BelowHalf),
    loss("hinge", hinge::hinge_loss, Smoothing::Unused),
    loss("ipo", ipo::ipo_loss, Smoothing::Unused),
    loss("ipo_sum", ipo::ipo_sum_loss, Smoothing::Unused),
    loss("exo_pair", exo::exo_pair_loss, Smoothing::Positive),
    reverse_kl_loss("nca_pair", pointwise::nca_pair_loss),
    reverse_kl_loss("bco_pair", pointwise::bco_pair_loss),
    reverse_kl_loss("sppo_hard", sppo::sppo_hard_loss),
    reverse_kl_loss("apo_zero", apo::apo_zero_loss),
    reverse_kl_loss("apo_down", apo::apo_down_loss),
    loss("discopop", discopop::discopop_loss, Smoothing::Unused),
    PairLoss { of_ratios: false, ..loss("sft", sft::sft_loss, Smoothing::Unused) },
];

/// Losses of TRL that sort the batch's pairs against each other, so that a micro-batch alone does
/// not define them.
pub(crate) const NOT_YET: [&str; 2] = ["aot", "aot_unpaired"];

pub(crate) fn find(name: &str) -> Option<&'static PairLoss> {
    LOSSES.iter().find(|l| l.name == name)
}
