//! Losses of one pair by TRL's names: one file each, one line in [`LOSSES`].

mod aot;
mod apo;
mod bco;
mod cpo;
mod discopop;
mod dpop;
mod exo;
mod hinge;
mod ipo;
mod kto;
mod logistic;
pub(crate) mod orpo;
mod pointwise;
mod sft;
mod simpo;
mod sppo;

use std::sync::{PoisonError, RwLock};

use super::{BatchRewards, ObjectiveConfig, Pair, PairLogProbs, Value};

/// Computes two numbers for each pair of a batch from the log-probabilities of all.
pub type Partners = fn(&PairLogProbs, &BatchRewards) -> Vec<[f64; 2]>;

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
    /// Reward in the metrics.
    pub reward: Reward,
    /// Whether the loss is of the chosen completion's likelihood, every token of it counted alike.
    pub of_likelihood: bool,
    /// Whether the loss is of labelled completions: the first of each pair, and the second is a
    /// mismatched one.
    pub unpaired: bool,
    /// Whether the loss needs the mismatched completions.
    pub mismatched: bool,
    /// Computes two numbers for each pair from the log-probabilities of the whole batch:
    /// [`Pair::partners`].
    pub partners: Option<Partners>,
}

/// Reward of a completion in the metrics, divided by β.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reward {
    /// The log ratio to the reference.
    LogRatio,
    /// The log-probability: the loss has no reference.
    LogProb,
    /// The log-probability divided by the completion's tokens: the loss has no reference. `logps` in the
    /// metrics are divided, too, as in TRL.
    MeanLogProb,
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

impl PairLoss {
    /// A loss of the ratios to the reference, without label smoothing, under the reverse KL.
    pub const fn new(name: &'static str, value: fn(&Pair, &ObjectiveConfig) -> Value) -> Self {
        Self {
            name,
            value,
            smoothing: Smoothing::Unused,
            of_ratios: true,
            any_divergence: false,
            reward: Reward::LogRatio,
            of_likelihood: false,
            unpaired: false,
            mismatched: false,
            partners: None,
        }
    }

    /// A loss of the policy's log-probabilities alone.
    const fn without_reference(
        name: &'static str,
        value: fn(&Pair, &ObjectiveConfig) -> Value,
        smoothing: Smoothing,
        reward: Reward,
    ) -> Self {
        Self { smoothing, of_ratios: false, reward, ..Self::new(name, value) }
    }
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
    PairLoss { smoothing, any_divergence: true, ..PairLoss::new(name, value) }
}

pub(crate) static LOSSES: &[PairLoss] = &[
    loss("sigmoid", logistic::sigmoid_loss, Smoothing::Any),
    loss("sigmoid_norm", logistic::sigmoid_norm_loss, Smoothing::Any),
    loss("robust", logistic::robust_loss, Smoothing::BelowHalf),
    loss("hinge", hinge::hinge_loss, Smoothing::Unused),
    loss("ipo", ipo::ipo_loss, Smoothing::Unused),
    loss("ipo_sum", ipo::ipo_sum_loss, Smoothing::Unused),
    loss("exo_pair", exo::exo_pair_loss, Smoothing::Positive),
    PairLoss::new("nca_pair", pointwise::nca_pair_loss),
    PairLoss::new("bco_pair", pointwise::bco_pair_loss),
    PairLoss::new("sppo_hard", sppo::sppo_hard_loss),
    PairLoss::new("apo_zero", apo::apo_zero_loss),
    PairLoss::new("apo_down", apo::apo_down_loss),
    loss("discopop", discopop::discopop_loss, Smoothing::Unused),
    PairLoss::new("dpop", dpop::dpop_loss),
    PairLoss::without_reference("cpo", cpo::cpo_loss, Smoothing::Any, Reward::LogProb),
    PairLoss::without_reference("simpo", simpo::simpo_loss, Smoothing::Any, Reward::MeanLogProb),
    PairLoss::without_reference("orpo", orpo::orpo_loss, Smoothing::Unused, Reward::MeanLogProb),
    PairLoss {
        smoothing: Smoothing::Any,
        partners: Some(aot::aot_partners),
        ..PairLoss::new("aot", aot::aot_loss)
    },
    PairLoss {
        smoothing: Smoothing::Any,
        partners: Some(aot::aot_unpaired_partners),
        ..PairLoss::new("aot_unpaired", aot::aot_unpaired_loss)
    },
    PairLoss {
        unpaired: true,
        mismatched: true,
        partners: Some(kto::mean_of_mismatched),
        ..PairLoss::new("kto", kto::kto_loss)
    },
    PairLoss { unpaired: true, partners: Some(bco::mean_reward), ..PairLoss::new("bco", bco::bco_loss) },
    PairLoss { unpaired: true, ..PairLoss::new("apo_zero_unpaired", kto::apo_zero_unpaired_loss) },
    PairLoss { of_ratios: false, of_likelihood: true, ..loss("sft", sft::sft_loss, Smoothing::Unused) },
];

/// Losses of the program that uses this library.
static OWN: RwLock<Vec<&'static PairLoss>> = RwLock::new(Vec::new());

/// Makes a loss known by its name, so that `objective.loss` can name it, also where a run resumes: a program
/// registers its losses before it reads a configuration. The same loss may be registered again.
///
/// # Panics
/// Another loss has the name.
pub fn register(loss: &'static PairLoss) {
    let mut own = OWN.write().unwrap_or_else(PoisonError::into_inner);
    if own.iter().any(|other| std::ptr::eq(*other, loss)) {
        return;
    }
    let is_taken = LOSSES.iter().chain(own.iter().copied()).any(|other| other.name == loss.name);
    assert!(!is_taken, "there is a loss {:?} already", loss.name);
    own.push(loss);
}

pub(crate) fn find(name: &str) -> Option<&'static PairLoss> {
    let own = OWN.read().unwrap_or_else(PoisonError::into_inner);
    LOSSES.iter().chain(own.iter().copied()).find(|loss| loss.name == name)
}

/// Names of all losses, those of the program last.
pub(crate) fn names() -> Vec<&'static str> {
    let own = OWN.read().unwrap_or_else(PoisonError::into_inner);
    LOSSES.iter().chain(own.iter().copied()).map(|loss| loss.name).collect()
}
