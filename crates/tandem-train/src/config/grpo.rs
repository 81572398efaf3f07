//! `[grpo]`: the loss of policy gradients, and the advantages that it takes.

use super::Method;
use super::error::Result;
use super::form::{POSITIVE, boolean, choice, integer, number};
use super::keys::{Keys, keys};
use crate::objective::{GrpoOptions, ImportanceSampling, PolicyLoss, SamplerCorrection};

const LEVELS: [(&str, ImportanceSampling); 2] =
    [("token", ImportanceSampling::Token), ("sequence", ImportanceSampling::Sequence)];

keys! {
    /// Policy gradients from the rewards of a group of answers.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct GrpoConfig() {
        /// A loss by TRL's name: [all with their equations](grpo.md#losses).
        loss: PolicyLoss = choice(PolicyLoss::NAMES).or(PolicyLoss::Dapo),
        /// Updates on each answer. Ratios of the first are 1.
        num_iterations: u64 = integer(1..=64).or(1),
        /// Scope of an importance ratio: each `"token"`, or the mean over an answer's
        /// (`"sequence"`: GSPO). Ratios are 1 where the weights that train gave the answers.
        importance_sampling_level: ImportanceSampling = choice(LEVELS).or(ImportanceSampling::Token),
        /// Ratios below 1 − `epsilon` are clipped.
        epsilon: f64 = number(0.0..)
            .or(0.2)
            .only(loss.clips(), format!("the loss \"{}\" does not clip below; remove it", loss.name())),
        /// Ratios above 1 + `epsilon_high` are clipped. With `"cispo"`: the largest weight.
        epsilon_high: f64 = number(0.0..)
            .or(if loss == PolicyLoss::Cispo { 5.0 } else { epsilon })
            .shown("`epsilon`; 5 for `\"cispo\"`")
            .only(
                loss.clips() || loss == PolicyLoss::Cispo,
                format!("the loss \"{}\" clips nothing; remove it", loss.name()),
            ),
        /// Bound of the unclipped ratio too, above 1 + `epsilon_high`, against large ratios of answers
        /// with a negative advantage (arXiv 2505.07291).
        delta: Option<f64> = number(POSITIVE)
            .unless(|delta| (*delta <= 1.0 + epsilon_high).then(|| {
                format!("it must be above 1 + epsilon_high = {}, or it changes nothing but that", 1.0 + epsilon_high)
            }))
            .optional()
            .only(loss.clips(), format!("the loss \"{}\" does not use it; remove it", loss.name())),
        /// Steepness of `"sapo"` where the advantage is positive.
        sapo_temperature_pos: f64 = number(POSITIVE).or(1.0).only(loss == PolicyLoss::Sapo, ONLY_SAPO),
        /// Steepness of `"sapo"` elsewhere.
        sapo_temperature_neg: f64 = number(POSITIVE).or(1.05).only(loss == PolicyLoss::Sapo, ONLY_SAPO),
        /// Exponent of `"vespo"` where the advantage is not negative.
        vespo_k_pos: f64 = number(0.0..).or(2.0).only(loss == PolicyLoss::Vespo, ONLY_VESPO),
        /// Rate of decay of `"vespo"` where the advantage is not negative.
        vespo_lambda_pos: f64 = number(POSITIVE).or(3.0).only(loss == PolicyLoss::Vespo, ONLY_VESPO),
        /// Exponent of `"vespo"` where the advantage is negative.
        vespo_k_neg: f64 = number(0.0..).or(3.0).only(loss == PolicyLoss::Vespo, ONLY_VESPO),
        /// Rate of decay of `"vespo"` where the advantage is negative.
        vespo_lambda_neg: f64 = number(POSITIVE).or(2.0).only(loss == PolicyLoss::Vespo, ONLY_VESPO),
        /// Multiply the divergence to the reference by the importance ratio, which makes its gradient
        /// that of the policy's own answers (arXiv 2512.02556). It matters where ratios are not 1.
        use_bias_correction_kl: bool = boolean().or(true),
        /// Leave out answers with a negative advantage where the policy has moved away from the weights
        /// that gave them: where the mean log-ratio of these to the policy is larger (arXiv 2512.02556).
        off_policy_mask_threshold: Option<f64> = number(POSITIVE).optional(),
        /// Part of the tokens that the policy gradient learns from: those before which the policy's entropy is
        /// highest in the whole batch (arXiv 2506.01939, which recommends 0.2).
        top_entropy_quantile: f64 = number(0.0..=1.0).or(1.0),
        /// Order in which judges' scores are summed by weight and compared: the sum is compared with the
        /// group's (`"sum_then_normalize"`), or each judge's score is, divided by its deviation in the group,
        /// and the sum with the batch's (`"normalize_then_sum"`: GDPO, arXiv 2601.05242).
        aggregation: Aggregation = choice(Aggregation::NAMES).or(Aggregation::SumThenNormalize),
        /// Baseline of a reward: the mean of its group (`"mean"`), or of the others of the
        /// group (`"leave_one_out"`: RLOO, arXiv 2402.14740).
        baseline: Baseline = choice(Baseline::NAMES)
            .or(Baseline::Mean)
            .only(aggregation == Aggregation::SumThenNormalize, ONLY_SUMS),
        /// Divisor of the difference: the deviation of the `"group"`, of the `"batch"` (arXiv
        /// 2508.08221), or nothing (`"none"`, arXiv 2503.20783).
        scale_rewards: ScaleRewards = choice(ScaleRewards::NAMES)
            .or(ScaleRewards::Group)
            .only(aggregation == Aggregation::SumThenNormalize, ONLY_SUMS),
        /// Leave answers that the length limit cut out of the loss (DAPO). Their rewards count in the
        /// group.
        mask_truncated: bool = boolean().or(false),
        /// Tokens below `online.max_new_tokens` over which a penalty grows from 0 to 1, which is
        /// subtracted from the reward (DAPO's soft overlong punishment); 0 is none.
        overlong_tokens: Option<usize> = integer(0..=1 << 24).unit("tokens").zero_is_none().or(None),
        /// Leave out groups whose answers have equal rewards, which have nothing to learn. TRL keeps them:
        /// they count where a loss is divided, and for the divergence to the reference.
        drop_uniform: bool = boolean().or(false),
        /// Times that such groups of a batch are replaced by answers to other prompts, drawn at random, until
        /// none is left (DAPO's dynamic sampling, arXiv 2503.14476); 0 never replaces any.
        max_resamples: u64 = integer(0..=64).or(0),
    }
}

const ONLY_SUMS: &str = "aggregation = \"normalize_then_sum\" compares each judge's scores by group and their sum by batch; remove it";
const ONLY_SAPO: &str = "only loss = \"sapo\" has it; remove it";
const ONLY_VESPO: &str = "only loss = \"vespo\" has it; remove it";

/// Baseline of a reward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// The mean of its group.
    Mean,
    /// The mean of the others of its group.
    LeaveOneOut,
}

impl Baseline {
    const NAMES: [(&str, Self); 2] = [("mean", Self::Mean), ("leave_one_out", Self::LeaveOneOut)];
}

/// Divisor of an advantage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleRewards {
    /// The deviation of its group.
    Group,
    /// The deviation of all rewards of a step.
    Batch,
    /// Nothing.
    None,
}

impl ScaleRewards {
    const NAMES: [(&str, Self); 3] = [("group", Self::Group), ("batch", Self::Batch), ("none", Self::None)];
}

/// Order of summing judges' scores and comparing them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregation {
    /// The weighted sum is compared.
    SumThenNormalize,
    /// Each judge's scores are compared, and then their weighted sum.
    NormalizeThenSum,
}

impl Aggregation {
    const NAMES: [(&str, Self); 2] =
        [("sum_then_normalize", Self::SumThenNormalize), ("normalize_then_sum", Self::NormalizeThenSum)];
}

impl GrpoConfig {
    /// Returns whether an answer is left out of the loss, given whether it came to an end of its own.
    pub fn is_masked(&self, is_ended: bool) -> bool {
        self.mask_truncated && !is_ended
    }

    /// Options of the loss, for answers of at most this many tokens, which a server gave if there is a
    /// `correction`.
    pub fn options(&self, max_new_tokens: usize, correction: Option<SamplerCorrection>) -> GrpoOptions {
        GrpoOptions {
            loss: self.loss,
            importance_sampling: self.importance_sampling_level,
            epsilon: self.epsilon,
            epsilon_high: self.epsilon_high,
            delta: self.delta,
            sapo_temperatures: [self.sapo_temperature_pos, self.sapo_temperature_neg],
            vespo: [[self.vespo_k_pos, self.vespo_lambda_pos], [self.vespo_k_neg, self.vespo_lambda_neg]],
            corrects_kl: self.use_bias_correction_kl,
            off_policy_mask_threshold: self.off_policy_mask_threshold,
            top_entropy: Some(self.top_entropy_quantile).filter(|top| *top < 1.0),
            correction,
            max_new_tokens,
        }
    }
}

/// Visits the table if the method has it.
pub(super) fn visit(now: Option<&GrpoConfig>, keys: &mut Keys, method: Method) -> Result<Option<GrpoConfig>> {
    // The reference page lists every table.
    if method == Method::Grpo || matches!(keys, Keys::List(_)) {
        let grpo = keys.table("grpo", now, GrpoConfig::visit)?;
        return Ok((method == Method::Grpo).then_some(grpo));
    }
    keys.refuse(
        "grpo",
        &format!("method = \"{method}\" has no [grpo] table; remove it, or set method = \"grpo\""),
    )?;
    Ok(None)
}
