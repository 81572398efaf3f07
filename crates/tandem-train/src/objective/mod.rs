//! Losses: pure functions from per-sequence log-probabilities to a value and its derivative.
//!
//! A *pair* is a chosen and a rejected answer to one prompt. Pair `i` is the sequences `2i`
//! (chosen) and `2i + 1` (rejected) of its [forest](tandem_kernels::Forest). `B` counts pairs;
//! log-probabilities are sums over the scored tokens of an answer, in nats, f64.
//!
//! Values and derivatives are *sums* over the given pairs; the caller divides by the pairs of the
//! global batch. Cutting a batch into micro-batches therefore does not change the loss. The `sft`
//! term is a mean over tokens and needs [`BatchTotals`] before the first forward pass. Losses that
//! compare the pairs of a batch need the log-probabilities of all of it: [`WholeBatch`].
//!
//! A new loss is one file in `losses` and its two lines in the list there.

mod correction;
mod distill;
mod divergence;
mod grpo;
pub(crate) mod losses;
mod nash_md;
mod reward;
mod xpo;

use serde::{Deserialize, Serialize};

pub use correction::{CorrectionMode, CorrectionStats, SamplerCorrection};
pub use distill::{Average, DistillOptions, DistillStats, distill_loss};
pub use divergence::Divergence;
pub use grpo::{
    GrpoOptions, ImportanceSampling, PolicyAnswer, PolicyLoss, PolicyStats, PolicyTokens, UNKNOWN_LOG_PROB,
    grpo_loss,
};
pub use losses::{PairLoss, Partners, Reward, Smoothing, register};
pub use nash_md::{TokenLogProbs, nash_md_loss};
pub use reward::reward_loss;
pub use xpo::add_exploration;

/// The configured objective.
#[derive(Clone, Debug, PartialEq)]
pub struct ObjectiveConfig {
    /// The losses and their weights; their weighted sum is the loss. Empty for reward models alone,
    /// which have one loss.
    pub terms: Vec<Term>,
    /// Strength of the pull towards the reference, positive: the first, where it changes.
    pub beta: f64,
    /// Later values, in order.
    pub next_betas: Vec<f64>,
    /// Steps that each of them lasts but the last; `None` is an epoch.
    pub beta_every: Option<u64>,
    /// Assumed fraction of flipped labels, in `[0, 1]`; [`Smoothing`] states its meaning per loss.
    pub label_smoothing: f64,
    /// Take the reference's log-probabilities as zero.
    pub reference_free: bool,
    /// Temperature of `discopop`'s blend, positive.
    pub discopop_tau: f64,
    /// Target margin of `simpo`, at least 0.
    pub simpo_gamma: f64,
    /// Weight of `dpop`'s penalty, at least 0.
    pub dpop_lambda: f64,
    /// Weight of desirable completions, positive.
    pub desirable_weight: f64,
    /// Weight of undesirable completions, positive.
    pub undesirable_weight: f64,
    /// LD-DPO's weight of the tokens of a completion beyond the length of the other, in `[0, 1]`.
    pub ld_alpha: Option<f64>,
    /// Weight pairs by their likelihood under the policy: WPO.
    pub use_weighting: bool,
    /// Which divergence to the reference.
    pub divergence: Divergence,
    /// How strongly the policy is pulled away from the reference's own answers: XPO's α, else 0.
    pub exploration: f64,
    /// How strongly the sum of a pair's rewards is pulled towards zero: for reward models.
    pub center_rewards_coefficient: Option<f64>,
    /// Options of policy gradients, for runs that train by them.
    pub grpo: Option<GrpoOptions>,
    /// Interpolation of the divergence from a teacher, for distillation.
    pub distill: Option<DistillOptions>,
}

impl ObjectiveConfig {
    /// All values of beta, in order.
    pub fn betas(&self) -> impl Iterator<Item = f64> {
        std::iter::once(self.beta).chain(self.next_betas.iter().copied())
    }

    /// The name of a loss without a reference, if no loss compares with one.
    pub fn loss_without_reference(&self) -> Option<&'static str> {
        let is_without = |term: &&Term| term.loss.reward != Reward::LogRatio;
        let without = self.terms.iter().find(is_without)?;
        self.terms.iter().all(|term| !term.loss.of_ratios).then_some(without.loss.name)
    }

    /// Reward of a completion in the metrics.
    pub fn reward(&self) -> Reward {
        match self.loss_without_reference() {
            Some(name) => losses::find(name).map_or(Reward::LogRatio, |loss| loss.reward),
            None => Reward::LogRatio,
        }
    }

    /// Returns whether a loss needs the log-probabilities of the whole batch.
    pub fn needs_whole_batch(&self) -> bool {
        self.terms.iter().any(|term| term.loss.partners.is_some())
    }

    /// Part of the tokens, by their entropy in the whole batch, that a policy gradient learns from; `None`
    /// is all.
    pub fn top_entropy(&self) -> Option<f64> {
        self.grpo.and_then(|grpo| grpo.top_entropy)
    }

    /// Returns whether a loss needs completions of other rows with a row's prompt.
    pub fn needs_mismatched(&self) -> bool {
        self.terms.iter().any(|term| term.loss.mismatched)
    }

    /// Returns whether a loss of that name is a term.
    pub fn has(&self, name: &str) -> bool {
        self.terms.iter().any(|term| term.loss.name == name)
    }

    /// Beta in a 0-based step.
    pub fn beta_at(&self, step: u64, steps_per_epoch: u64) -> f64 {
        let index = step / self.beta_every.unwrap_or(steps_per_epoch);
        let last = self.next_betas.last().copied().unwrap_or(self.beta);
        usize::try_from(index).ok().and_then(|index| self.betas().nth(index)).unwrap_or(last)
    }
}

/// A loss and its weight in the sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Term {
    /// The loss.
    pub loss: &'static PairLoss,
    /// Weight.
    pub weight: f64,
}

/// Log-probabilities of `B` pairs.
#[derive(Clone, Copy, Debug, Default)]
pub struct PairLogProbs<'a> {
    /// Policy `[2B]`, pair by pair: chosen, rejected.
    pub policy: &'a [f64],
    /// Reference `[2B]`; `None` counts as zeros (reference-free).
    pub reference: Option<&'a [f64]>,
    /// Tokens of each answer `[2B]`: the divisor of `ipo` and `sigmoid_norm`.
    pub answer_tokens: &'a [u32],
    /// Tokens of each answer that were scored `[2B]`. Fewer than `answer_tokens` only where an
    /// answer without a prompt starts the text: its first token has nothing before it to predict
    /// it.
    pub scored_tokens: &'a [u32],
    /// Likelihood of the chosen answers, for `sft`, where it is not `policy` and `scored_tokens`.
    pub likelihood: Option<Likelihood<'a>>,
    /// WPO's weight of each pair `[B]`; `None` is 1.
    pub weights: Option<&'a [f64]>,
    /// Number of pairs of the whole batch before these.
    pub first_pair: usize,
    /// Whether the first answer of each pair is desirable `[B]`; empty where answers are compared.
    pub labels: &'a [bool],
}

/// Likelihood of chosen answers, each token counted alike.
#[derive(Clone, Copy, Debug)]
pub struct Likelihood<'a> {
    /// `log π` `[B]`, nats.
    pub log_prob: &'a [f64],
    /// Tokens `[B]`.
    pub tokens: &'a [u32],
}

impl PairLogProbs<'_> {
    /// `B`.
    ///
    /// # Panics
    /// The slices differ in length or the length is odd (a caller's bug).
    pub fn num_pairs(&self) -> usize {
        let n = self.policy.len();
        assert!(
            n.is_multiple_of(2)
                && self.reference.is_none_or(|r| r.len() == n)
                && self.answer_tokens.len() == n
                && self.scored_tokens.len() == n,
            "pair slices: policy {n}, reference {:?}, answer_tokens {}, scored_tokens {}",
            self.reference.map(<[f64]>::len),
            self.answer_tokens.len(),
            self.scored_tokens.len()
        );
        n / 2
    }

    /// `log π` of the chosen answer of pair `i`, each token counted alike, and its tokens.
    pub fn likelihood(&self, i: usize) -> (f64, u32) {
        match self.likelihood {
            Some(Likelihood { log_prob, tokens }) => (log_prob[i], tokens[i]),
            None => (self.policy[2 * i], self.scored_tokens[2 * i]),
        }
    }

    /// `log π(y|x)` of sequence `s` per scored token.
    pub fn mean_log_prob(&self, s: usize) -> f64 {
        self.policy[s] / f64::from(self.scored_tokens[s].max(1))
    }

    /// `log π(y|x) − log π_ref(y|x)` of sequence `s`.
    pub fn log_ratio(&self, s: usize) -> f64 {
        self.policy[s] - self.reference.map_or(0.0, |r| r[s])
    }
}

/// Counts over the global batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchTotals {
    /// Pairs; for policy gradients answers.
    pub pairs: u64,
    /// Scored tokens of the chosen answers; for policy gradients of all that are not masked.
    pub chosen_tokens: u64,
}

/// Mean of the rewards of a run's completions, for `bco`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewardMean {
    /// The mean; 0 before there is one.
    pub mean: f64,
    /// Completions.
    pub count: u64,
}

impl RewardMean {
    /// Adds `count` rewards by their sum.
    #[must_use]
    pub fn with(self, sum: f64, count: u64) -> Self {
        let all = self.count + count;
        if count == 0 {
            return self;
        }
        let (own, share) = (sum / count as f64, count as f64 / all as f64);
        Self { mean: self.mean + (own - self.mean) * share, count: all }
    }
}

/// Rewards before a batch, and how the batch's own are made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BatchRewards {
    /// Mean of the rewards so far.
    pub so_far: RewardMean,
    /// Strength of the pull towards the reference in this step.
    pub beta: f64,
    /// Whether the batch's own rewards belong to the mean: those of training do.
    pub learns: bool,
}

/// What losses need of the whole batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WholeBatch {
    /// Counts.
    pub totals: BatchTotals,
    /// Rewards of the batches before.
    pub rewards: BatchRewards,
    /// Policy gradients only: least entropy of the tokens that are learnt from.
    pub least_entropy: Option<f32>,
    /// Of each term, [`Pair::partners`] per pair; empty for losses of one pair alone.
    partners: Vec<Vec<[f64; 2]>>,
}

impl From<BatchTotals> for WholeBatch {
    fn from(totals: BatchTotals) -> Self {
        Self { totals, ..Self::default() }
    }
}

impl WholeBatch {
    /// Adds what the losses need of the log-probabilities of the batch's pairs: `policy` and
    /// `reference` of `batch`.
    pub fn complete(&mut self, config: &ObjectiveConfig, batch: &PairLogProbs) {
        let of_term = |term: &Term| {
            term.loss.partners.map(|partners| partners(batch, &self.rewards)).unwrap_or_default()
        };
        self.partners = config.terms.iter().map(of_term).collect();
    }

    /// The number that the loss of a name shifts every reward by: KTO's divergence, BCO's mean. `None`
    /// if it is no term.
    pub fn shift(&self, config: &ObjectiveConfig, name: &str) -> Option<f64> {
        let term = config.terms.iter().position(|term| term.loss.name == name)?;
        Some(self.partners.get(term)?.first()?[0])
    }

    /// Takes the least entropy of the part `top` of a batch's tokens, of which there are these entropies:
    /// PyTorch's linear quantile, in f32.
    pub fn set_least_entropy(&mut self, top: f64, entropies: &mut [f32]) {
        entropies.sort_unstable_by(f32::total_cmp);
        let Some(last) = entropies.len().checked_sub(1) else { return };
        let rank = (1.0 - top) as f32 * last as f32;
        let (below, above) = (entropies[rank.floor() as usize], entropies[(rank.ceil() as usize).min(last)]);
        self.least_entropy = Some(below + (above - below) * rank.fract());
    }

    /// Partners of a pair of the batch under a term.
    fn partners(&self, term: usize, pair: usize) -> [f64; 2] {
        self.partners.get(term).and_then(|pairs| pairs.get(pair)).copied().unwrap_or_default()
    }
}

/// A loss over part of a batch, and its derivative. Sums: divide both by the global batch's weight.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loss {
    /// Σ over pairs (over scored tokens, for SFT) of the loss.
    pub sum: f64,
    /// Number of pairs (of scored tokens, for SFT) in `sum`.
    pub weight: f64,
    /// ∂ `sum` / ∂ (policy log-probability, or reward, of sequence `s`).
    pub d_log_prob: Vec<f64>,
    /// Additional derivative per prediction, for token-level losses; else empty.
    pub d_token: Vec<f64>,
    /// Derivative by [`Likelihood::log_prob`] where it is given, per pair, then per sequence; else
    /// empty.
    pub d_likelihood: Vec<f64>,
    /// Sums behind the metrics of policy gradients; `None` for other losses.
    pub policy: Option<PolicyStats>,
}

impl Loss {
    /// `sum / weight`.
    pub fn mean(&self) -> f64 {
        self.sum / self.weight
    }

    /// Scatters from pair members to the forest's sequences; contributions of several pairs add up.
    /// `prompts` are the sequences of the prompts that belong to the likelihood, if any.
    pub fn spread(&mut self, pairs: &[[u32; 2]], prompts: &[u32], num_sequences: usize) {
        let scatter = |sequences: &mut dyn Iterator<Item = u32>, derivatives: &[f64]| {
            let mut of_sequence = vec![0.0; num_sequences];
            for (sequence, derivative) in sequences.zip(derivatives) {
                of_sequence[sequence as usize] += derivative;
            }
            of_sequence
        };
        self.d_log_prob = scatter(&mut pairs.iter().flatten().copied(), &self.d_log_prob);
        if !self.d_likelihood.is_empty() {
            let own = &self.d_likelihood;
            let (chosen, both) = (pairs.iter().map(|pair| pair[0]), [&own[..], &own[..]].concat());
            self.d_likelihood = scatter(&mut chosen.chain(prompts.iter().copied()), &both);
        }
    }

    fn reset(&mut self) {
        self.sum = 0.0;
        self.weight = 0.0;
        self.d_log_prob.clear();
        self.d_token.clear();
        self.d_likelihood.clear();
        self.policy = None;
    }
}

/// Computes the configured preference loss of a micro-batch into `out`, whose buffers are reused.
///
/// `whole` is the global batch that `batch` belongs to.
///
/// # Panics
/// The slices of `batch` differ in length.
pub fn preference_loss(
    batch: &PairLogProbs,
    whole: &WholeBatch,
    config: &ObjectiveConfig,
    beta: f64,
    out: &mut Loss,
) {
    out.reset();
    let totals = &whole.totals;
    let pairs_per_token = totals.pairs as f64 / totals.chosen_tokens.max(1) as f64;
    for i in 0..batch.num_pairs() {
        let (chosen, rejected) = (2 * i, 2 * i + 1);
        let (chosen_ratio, chosen_slope) = config.divergence.score(batch.log_ratio(chosen));
        let (rejected_ratio, rejected_slope) = config.divergence.score(batch.log_ratio(rejected));
        let pair = Pair {
            chosen_ratio,
            rejected_ratio,
            chosen_tokens: f64::from(batch.answer_tokens[chosen].max(1)),
            rejected_tokens: f64::from(batch.answer_tokens[rejected].max(1)),
            chosen_log_prob: batch.policy[chosen],
            likelihood: batch.likelihood(i).0,
            rejected_log_prob: batch.policy[rejected],
            chosen_scored: f64::from(batch.scored_tokens[chosen].max(1)),
            rejected_scored: f64::from(batch.scored_tokens[rejected].max(1)),
            pairs_per_token,
            partners: [0.0; 2],
            label: batch.labels.get(i).copied().unwrap_or(true),
            beta,
        };
        let partners = |term| whole.partners(term, batch.first_pair + i);
        let (value, mut likelihood) = weighted(config, &pair, [chosen_slope, rejected_slope], partners);
        let weight = batch.weights.map_or(1.0, |weights| weights[i]);
        let [loss, mut chosen, rejected] = [value.loss, value.d_chosen, value.d_rejected].map(|x| weight * x);
        likelihood *= weight;
        if batch.likelihood.is_some() {
            out.d_likelihood.push(likelihood);
        } else {
            chosen += likelihood;
        }
        out.sum += loss;
        out.d_log_prob.extend([chosen, rejected]);
        out.weight += 1.0;
    }
}

/// The SFT loss: negative log-likelihood, a mean over scored tokens once `sum` is divided by the
/// global `weight`.
///
/// `log_prob` and `scored_tokens` are per sequence `[B]`. Writes into `out`, whose buffers are
/// reused.
///
/// # Panics
/// The slices differ in length.
pub fn likelihood_loss(log_prob: &[f64], scored_tokens: &[u32], out: &mut Loss) {
    assert_eq!(log_prob.len(), scored_tokens.len(), "log_prob and scored_tokens differ in length");
    out.reset();
    for (&log_prob, &tokens) in log_prob.iter().zip(scored_tokens) {
        out.sum -= log_prob;
        out.weight += f64::from(tokens);
        out.d_log_prob.push(-1.0);
    }
}

/// The loss's exact value where policy and reference agree (ln 2 for `sigmoid`), which a run from
/// equal weights must show at step 0. `None` if the value depends on the log-probabilities
/// themselves (`sft`, reference-free).
pub fn exact_at_start(config: &ObjectiveConfig) -> Option<f64> {
    if config.terms.is_empty() || config.exploration != 0.0 {
        return None;
    }
    // A value for each label.
    if config.desirable_weight != config.undesirable_weight {
        return None;
    }
    // WPO's weights are of the log-probabilities themselves.
    if config.use_weighting
        || config.reference_free
        || config.terms.iter().any(|t| !t.loss.of_ratios && t.weight != 0.0)
    {
        return None;
    }
    let agree = Pair {
        chosen_ratio: 0.0,
        rejected_ratio: 0.0,
        chosen_tokens: 1.0,
        rejected_tokens: 1.0,
        chosen_log_prob: 0.0,
        likelihood: 0.0,
        rejected_log_prob: 0.0,
        chosen_scored: 1.0,
        rejected_scored: 1.0,
        pairs_per_token: 1.0,
        partners: [0.0; 2],
        label: true,
        beta: config.beta,
    };
    Some(weighted(config, &agree, [1.0, 1.0], |_| [0.0; 2]).0.loss)
}

/// The weighted sum of all terms, and its derivative by [`Pair::likelihood`]. `slopes` are the
/// derivatives of the ratios by the log-probabilities: chosen, rejected. `partners` are those of a term.
fn weighted(
    config: &ObjectiveConfig,
    pair: &Pair,
    slopes: [f64; 2],
    partners: impl Fn(usize) -> [f64; 2],
) -> (Value, f64) {
    let (mut total, mut likelihood) = (Value::default(), 0.0);
    for (index, term) in config.terms.iter().enumerate() {
        let value = (term.loss.value)(&Pair { partners: partners(index), ..*pair }, config);
        if term.loss.of_likelihood {
            total.loss += term.weight * value.loss;
            likelihood += term.weight * value.d_chosen;
            continue;
        }
        let [chosen, rejected] = if term.loss.of_ratios { slopes } else { [1.0, 1.0] };
        total.loss += term.weight * value.loss;
        total.d_chosen += term.weight * value.d_chosen * chosen;
        total.d_rejected += term.weight * value.d_rejected * rejected;
    }
    (total, likelihood)
}

/// Inputs of a loss for one pair.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// `log π − log π_ref` of the chosen answer; under a [`Divergence`] other than the reverse KL
    /// its score.
    pub chosen_ratio: f64,
    /// The same for the rejected completion.
    pub rejected_ratio: f64,
    /// Tokens of the chosen answer, at least 1.
    pub chosen_tokens: f64,
    /// Tokens of the rejected answer, at least 1.
    pub rejected_tokens: f64,
    /// `log π` of the chosen answer.
    pub chosen_log_prob: f64,
    /// `log π` of the chosen answer, each token counted alike: all of the text for some runs.
    pub likelihood: f64,
    /// `log π` of the rejected answer.
    pub rejected_log_prob: f64,
    /// Scored tokens of the chosen answer, at least 1.
    pub chosen_scored: f64,
    /// Scored tokens of the rejected answer, at least 1.
    pub rejected_scored: f64,
    /// Pairs of the global batch over its scored chosen tokens: turns a sum over tokens into a mean
    /// over tokens after the division by pairs.
    pub pairs_per_token: f64,
    /// Two numbers that the loss computes from the whole batch: [`PairLoss::partners`].
    pub partners: [f64; 2],
    /// Whether the chosen answer is desirable, for losses of labelled completions.
    pub label: bool,
    /// Strength of the pull towards the reference in this step.
    pub beta: f64,
}

impl Pair {
    /// `chosen_ratio − rejected_ratio`.
    fn delta(&self) -> f64 {
        self.chosen_ratio - self.rejected_ratio
    }

    /// Mean log-probability of the tokens of the chosen and of the rejected answer.
    fn mean_log_probs(&self) -> [f64; 2] {
        [self.chosen_log_prob / self.chosen_scored, self.rejected_log_prob / self.rejected_scored]
    }
}

/// A loss of one pair and its derivatives by the two ratios (by the log-probabilities, where it
/// does not see ratios).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Value {
    /// The loss.
    pub loss: f64,
    /// Derivative by the chosen ratio.
    pub d_chosen: f64,
    /// Derivative by the rejected ratio.
    pub d_rejected: f64,
}

impl Value {
    /// A loss that depends on `scale · (chosen − rejected)` only, with derivative `slope` by that
    /// product.
    fn from_difference(loss: f64, slope: f64, scale: f64) -> Self {
        Self { loss, d_chosen: scale * slope, d_rejected: -scale * slope }
    }
}

/// σ(x) without overflow.
fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + (-x).exp()) } else { x.exp() / (1.0 + x.exp()) }
}

/// ln σ(x) without overflow or cancellation.
pub(crate) fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
pub(crate) mod tests;
