//! Policy gradients from the rewards of a group of answers: GRPO (arXiv 2402.03300) and its kin, as TRL 1.16's
//! `GRPOTrainer` has them.
//!
//! `l_t`, `o_t` and `r_t` are log-probabilities of an answer's tokens under the policy, the weights that
//! sampled the answer, and the reference; `A` is its advantage, `n` its number of tokens. The importance ratio
//! is `c_t = exp(l_t − o_t)`, or for a whole answer (GSPO, arXiv 2507.18071) the exponential of the mean. It is
//! exactly 1 where the weights that sampled are those that train.
//!
//! | loss | of a token | divided by |
//! |---|---|---|
//! | `grpo` | `−min(c A, clip(c) A)`, `clip` to `[1 − ε, 1 + ε_high]` | the answer's tokens, then answers |
//! | `bnpo`, `dapo` (arXiv 2503.14476) | as `grpo` | tokens |
//! | `dr_grpo` (arXiv 2503.20783) | as `grpo` | answers × `max_new_tokens` |
//! | `luspo` (arXiv 2602.05261) | as `grpo` | answers |
//! | `cispo` (arXiv 2506.13585) | `−sg(min(c, ε_high)) A l` | tokens |
//! | `sapo` (arXiv 2511.20347) | `−A · σ(τ (c − 1)) · 4 / τ` | as `grpo` |
//! | `vespo` (arXiv 2602.10693) | `−sg(φ(w)) A l`, `φ(w) = e^λ w^k e^{−λ w}`, `w = exp(Σ l − o)` | tokens |
//!
//! `sg` stops the gradient. Of a server's answers (`s_t`), the loss of a token is multiplied by a bounded
//! `exp(o_t − s_t)`: see [`SamplerCorrection`]; in `vespo` it belongs to `w`. With a reference, `β (exp(r_t − l_t) − (r_t − l_t) − 1)` is added, times `c_t` if
//! [`GrpoOptions::corrects_kl`]. All counts are those of the whole batch.

use super::Loss;
use super::correction::{CorrectionStats, SamplerCorrection};

/// A loss of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyLoss {
    /// Mean over an answer's tokens, then over answers.
    Grpo,
    /// Mean over tokens. TRL's is over those of a micro-batch.
    Bnpo,
    /// Sum over tokens, divided by answers and their greatest length.
    DrGrpo,
    /// Mean over the tokens of the whole batch.
    Dapo,
    /// Clipped weights of the policy gradient, for every token.
    Cispo,
    /// A soft gate in place of the clipping.
    Sapo,
    /// Weights of whole answers by a gamma function.
    Vespo,
    /// Sum over tokens, mean over answers.
    Luspo,
}

impl PolicyLoss {
    /// Every loss with its name, TRL's.
    pub const NAMES: [(&str, Self); 8] = [
        ("grpo", Self::Grpo),
        ("bnpo", Self::Bnpo),
        ("dr_grpo", Self::DrGrpo),
        ("dapo", Self::Dapo),
        ("cispo", Self::Cispo),
        ("sapo", Self::Sapo),
        ("vespo", Self::Vespo),
        ("luspo", Self::Luspo),
    ];

    /// Name in the config.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, loss)| *loss == self).expect("every loss has a name").0
    }

    /// Returns whether ratios are clipped to `[1 − ε, 1 + ε_high]`.
    pub fn clips(self) -> bool {
        !matches!(self, Self::Cispo | Self::Sapo | Self::Vespo)
    }
}

/// Scope of an importance ratio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImportanceSampling {
    /// Each token.
    Token,
    /// The mean over an answer's tokens.
    Sequence,
}

/// Options of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GrpoOptions {
    /// The loss.
    pub loss: PolicyLoss,
    /// Scope of an importance ratio.
    pub importance_sampling: ImportanceSampling,
    /// Ratios are clipped to `[1 − epsilon, 1 + epsilon_high]`.
    pub epsilon: f64,
    /// See `epsilon`; the most of a `cispo` weight.
    pub epsilon_high: f64,
    /// Bound of the ratio that is not clipped, against large ones where the advantage is negative.
    pub delta: Option<f64>,
    /// τ of `sapo` for advantages above 0 and for others.
    pub sapo_temperatures: [f64; 2],
    /// k and λ of `vespo` for advantages of 0 or more, and for others.
    pub vespo: [[f64; 2]; 2],
    /// Whether the divergence is multiplied by the importance ratio (DeepSeek-V3.2).
    pub corrects_kl: bool,
    /// Answers with a negative advantage count for nothing where the mean of `o_t − l_t` is larger.
    pub off_policy_mask_threshold: Option<f64>,
    /// Part of the tokens, those of the highest entropy, that are learnt from (arXiv 2506.01939); `None` is
    /// all.
    pub top_entropy: Option<f64>,
    /// Correction of a server's answers.
    pub correction: Option<SamplerCorrection>,
    /// Greatest length of an answer, in tokens.
    pub max_new_tokens: usize,
}

/// Stands for a log-probability that a server did not give: no real one is positive.
pub const UNKNOWN_LOG_PROB: f32 = 1.0;

/// Tokens of a micro-batch's answers, in the order of the forest's predictions.
#[derive(Clone, Copy, Debug)]
pub struct PolicyTokens<'a> {
    /// Which answer each token is of `[T]`.
    pub sequence: &'a [u32],
    /// Under the policy `[T]`, nats.
    pub policy: &'a [f32],
    /// Under the weights that sampled `[T]`.
    pub sampled: &'a [f32],
    /// The same by the server that sampled `[T]`, where its arithmetic differs from the trainer's;
    /// [`UNKNOWN_LOG_PROB`] where it gave none.
    pub served: Option<&'a [f32]>,
    /// Entropy of the policy's distribution `[T]`, where only tokens of this entropy or more are learnt from.
    pub high_entropy: Option<(&'a [f32], f32)>,
    /// Under the reference `[T]`, if there is one.
    pub reference: Option<&'a [f32]>,
}

/// An answer of a micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicyAnswer {
    /// Its reward compared with those of its group.
    pub advantage: f64,
    /// Whether the weights that train have sampled it: ratios are 1 then.
    pub is_on_policy: bool,
    /// Whether its tokens count for nothing.
    pub is_masked: bool,
}

/// Sums over what the loss did, for TRL's metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PolicyStats {
    /// The loss; `None` where nothing was added.
    pub loss: Option<PolicyLoss>,
    /// Whether there is a reference.
    pub has_reference: bool,
    /// Σ over tokens that count of the entropy; the loss itself does not know it.
    pub entropy: f64,
    /// Answers, and those of them with a ratio.
    pub answers: [f64; 2],
    /// Tokens that count.
    pub tokens: f64,
    /// Ratios: as many as tokens, or as answers.
    pub ratios: f64,
    /// Σ over tokens of the divergence to the reference.
    pub kl: f64,
    /// Ratios clipped below with a negative advantage, and above with a positive one.
    pub clipped: [f64; 2],
    /// The least part of an answer's ratios that were clipped below, and the largest above.
    pub clipped_range: [f64; 2],
    /// Σ over answers of φ, for `vespo`.
    pub phi: f64,
    /// Tokens whose generator's log-probability is known.
    pub known: f64,
    /// Σ and greatest of these tokens' `|l − o|`, before either is taken for the other; of a server's answers
    /// `|o − s|`.
    pub difference: [f64; 2],
    /// Σ over these tokens of `exp` of the same difference.
    pub ratio: f64,
    /// Ratios of the trainer to the server, as they were applied.
    pub correction: CorrectionStats,
}

/// An answer's tokens, as they are summed.
#[derive(Clone, Copy, Default)]
struct Sums {
    tokens: f64,
    /// Σ l − o.
    log_ratio: f64,
    /// The same, each within ±20.
    bounded: f64,
    /// Σ o − l, or s − l of a server's answers, over the tokens whose generator's log-probability is known.
    drift: f64,
    /// Σ o − s, and each token's weight by itself as a logarithm within `vespo`'s bounds.
    served: [f64; 2],
    /// Derivative by the answer's ratio, times the ratio.
    slope: f64,
    clipped: [f64; 2],
}

/// Computes the loss of some answers into `out`, whose buffers are reused, and returns what it did. `beta` is
/// the strength of the divergence to the reference.
///
/// # Panics
/// The slices of `tokens` differ in length.
pub fn grpo_loss(
    tokens: &PolicyTokens<'_>,
    answers: &[PolicyAnswer],
    options: &GrpoOptions,
    beta: f64,
    out: &mut Loss,
) -> PolicyStats {
    let PolicyTokens { sequence, policy, sampled, served, reference, .. } = *tokens;
    let num_tokens = sequence.len();
    assert!(
        policy.len() == num_tokens
            && sampled.len() == num_tokens
            && served.is_none_or(|served| served.len() == num_tokens)
            && reference.is_none_or(|reference| reference.len() == num_tokens),
        "{num_tokens} tokens, {}, {} and {:?} log-probabilities",
        policy.len(),
        sampled.len(),
        reference.map(<[f32]>::len)
    );
    let has_reference = reference.is_some();
    let mut stats = PolicyStats { loss: Some(options.loss), has_reference, ..PolicyStats::default() };
    let mut sums = vec![Sums::default(); answers.len()];
    for (index, &sequence) in sequence.iter().enumerate() {
        let (answer, sums) = (answers[sequence as usize], &mut sums[sequence as usize]);
        if answer.is_masked {
            continue;
        }
        let token = tokens.ratios(index, answer.is_on_policy);
        sums.tokens += 1.0;
        sums.log_ratio += token.log_ratio;
        sums.bounded += token.log_ratio.clamp(-20.0, 20.0);
        sums.served[0] += token.served;
        if token.is_known {
            sums.drift -= token.log_ratio + token.served;
            let [sum, most] = &mut stats.difference;
            (*sum, *most) = (*sum + token.difference.abs(), most.max(token.difference.abs()));
            stats.ratio += token.difference.exp();
            stats.known += 1.0;
        }
        if let Some(correction) = options.correction.filter(|correction| !correction.mode.is_of_answers())
            && served.is_some()
        {
            let weight = correction.weight(token.served);
            sums.served[1] += weight.ln().clamp(LEAST_LOG_WEIGHT, 20.0);
            stats.correction.add(weight);
        }
    }
    if let Some(correction) = options.correction.filter(|correction| correction.mode.is_of_answers())
        && served.is_some()
    {
        sums.iter().for_each(|sums| stats.correction.add(correction.weight(sums.served[0])));
    }
    out.reset();
    out.d_log_prob.resize(answers.len(), 0.0);
    for (index, &sequence) in sequence.iter().enumerate() {
        let (answer, sums) = (answers[sequence as usize], &mut sums[sequence as usize]);
        if answer.is_masked {
            out.d_token.push(0.0);
            continue;
        }
        let new = f64::from(policy[index]);
        let token = tokens.ratios(index, answer.is_on_policy);
        let log_weight = match options.importance_sampling {
            ImportanceSampling::Token => token.log_ratio,
            ImportanceSampling::Sequence => sums.log_ratio / sums.tokens,
        };
        let ratio = log_weight.exp();
        let term = options.term(&answer, sums, ratio, new);
        let mut weight = if served.is_some() { options.server_weight(sums, token.served) } else { 1.0 };
        if tokens.high_entropy.is_some_and(|(entropy, least)| entropy[index] < least) {
            weight = 0.0;
        }
        let [mut value, mut by_token, mut by_ratio] =
            [term.value, term.by_log_prob, term.by_ratio].map(|number| weight * number);
        if let Some(reference) = reference {
            let gap = f64::from(reference[index]) - new;
            let kl = gap.exp() - gap - 1.0;
            let factor = if options.corrects_kl { ratio } else { 1.0 };
            value += beta * kl * factor;
            by_token += beta * (1.0 - gap.exp()) * factor;
            by_ratio += if options.corrects_kl { beta * kl } else { 0.0 };
            stats.kl += kl * factor;
        }
        let share = options.share(sums.tokens);
        out.sum += share * value;
        let slope = by_ratio * ratio;
        match options.importance_sampling {
            ImportanceSampling::Token => out.d_token.push(share * (by_token + slope)),
            ImportanceSampling::Sequence => {
                out.d_token.push(share * by_token);
                sums.slope += share * slope;
            }
        }
        for (clipped, is_clipped) in sums.clipped.iter_mut().zip(options.is_clipped(ratio, answer.advantage))
        {
            *clipped += f64::from(u8::from(is_clipped));
        }
    }
    for (slope, sums) in out.d_log_prob.iter_mut().zip(&sums) {
        *slope = if sums.tokens > 0.0 { sums.slope / sums.tokens } else { 0.0 };
    }
    stats.add_answers(answers, &sums, options);
    out.weight = options.divisor(stats.answers[0], stats.tokens);
    stats
}

/// Differences of a token's log-probabilities.
#[derive(Clone, Copy)]
struct TokenRatios {
    /// l − o; 0 where the weights that train have sampled.
    log_ratio: f64,
    /// o − s; 0 without a server, or where it gave no log-probability.
    served: f64,
    /// l − o, or o − s of a server's answers.
    difference: f64,
    /// Whether the generator gave a log-probability.
    is_known: bool,
}

impl PolicyTokens<'_> {
    fn ratios(&self, index: usize, is_on_policy: bool) -> TokenRatios {
        let (new, sampled) = (f64::from(self.policy[index]), f64::from(self.sampled[index]));
        let gap = |from: f64, to: f32| if to == UNKNOWN_LOG_PROB { 0.0 } else { from - f64::from(to) };
        let difference = gap(new, self.sampled[index]);
        let log_ratio = if is_on_policy { 0.0 } else { difference };
        let is_known = self.served.unwrap_or(self.sampled)[index] != UNKNOWN_LOG_PROB;
        match self.served {
            None => TokenRatios { log_ratio, served: 0.0, difference, is_known },
            Some(served) => {
                let served = gap(if is_on_policy { new } else { sampled }, served[index]);
                TokenRatios { log_ratio, served, difference: served, is_known }
            }
        }
    }
}

/// Least logarithm of a `vespo` weight.
const LEAST_LOG_WEIGHT: f64 = -18.420_680_743_952_367;

/// The loss of a token and its derivatives.
struct Term {
    value: f64,
    /// By the token's own log-probability, with the ratio held.
    by_log_prob: f64,
    by_ratio: f64,
}

impl GrpoOptions {
    /// Returns what the sum over the tokens of so many answers is divided by; 0 where none counts.
    pub fn divisor(&self, answers: f64, tokens: f64) -> f64 {
        match self.loss {
            PolicyLoss::Grpo | PolicyLoss::Sapo | PolicyLoss::Luspo => answers,
            PolicyLoss::DrGrpo => answers * self.max_new_tokens as f64,
            PolicyLoss::Bnpo | PolicyLoss::Dapo | PolicyLoss::Cispo | PolicyLoss::Vespo => tokens,
        }
    }

    /// Returns the factor of a token of an answer with so many.
    fn share(&self, tokens: f64) -> f64 {
        match self.loss {
            PolicyLoss::Grpo | PolicyLoss::Sapo => 1.0 / tokens,
            _ => 1.0,
        }
    }

    fn term(&self, answer: &PolicyAnswer, sums: &Sums, ratio: f64, log_prob: f64) -> Term {
        let advantage = answer.advantage;
        let is_left_out = self
            .off_policy_mask_threshold
            .is_some_and(|threshold| advantage < 0.0 && sums.drift / sums.tokens > threshold);
        if is_left_out {
            return Term { value: 0.0, by_log_prob: 0.0, by_ratio: 0.0 };
        }
        let weighted = |weight: f64| Term {
            value: -weight * advantage * log_prob,
            by_log_prob: -weight * advantage,
            by_ratio: 0.0,
        };
        let of_ratio = |value, by_ratio| Term { value, by_log_prob: 0.0, by_ratio };
        match self.loss {
            PolicyLoss::Cispo => weighted(ratio.min(self.epsilon_high)),
            PolicyLoss::Vespo => weighted(self.phi(advantage, sums.bounded + sums.served[1])),
            PolicyLoss::Sapo => {
                let [positive, other] = self.sapo_temperatures;
                let temperature = if advantage > 0.0 { positive } else { other };
                let gate = super::sigmoid(temperature * (ratio - 1.0));
                of_ratio(-gate * 4.0 / temperature * advantage, -4.0 * gate * (1.0 - gate) * advantage)
            }
            _ => {
                let (least, most) = (1.0 - self.epsilon, 1.0 + self.epsilon_high);
                let bounded = self.delta.map_or(ratio, |delta| ratio.min(delta));
                let (free, clipped) = (bounded * advantage, ratio.clamp(least, most) * advantage);
                let by_free = f64::from(u8::from(self.delta.is_none_or(|delta| ratio <= delta)));
                let by_clipped = f64::from(u8::from((least..=most).contains(&ratio)));
                // Equal ones share the derivative, as in torch.
                let slope = match free.total_cmp(&clipped) {
                    _ if free == clipped => (by_free + by_clipped) / 2.0,
                    std::cmp::Ordering::Less => by_free,
                    _ => by_clipped,
                };
                of_ratio(-free.min(clipped), -slope * advantage)
            }
        }
    }

    /// Returns the weight of the loss of a server's token, whose log-ratio to the trainer is `served`.
    fn server_weight(&self, sums: &Sums, served: f64) -> f64 {
        match self.correction {
            // Its weights are in φ.
            _ if self.loss == PolicyLoss::Vespo => 1.0,
            Some(correction) if correction.mode.is_of_answers() => correction.weight(sums.served[0]),
            Some(correction) => correction.weight(served),
            None => 1.0,
        }
    }

    /// Returns the weight of an answer whose log-ratios have this sum.
    fn phi(&self, advantage: f64, log_ratio: f64) -> f64 {
        let [not_negative, negative] = self.vespo;
        let [k, lambda] = if advantage >= 0.0 { not_negative } else { negative };
        let lambda = lambda.max(1e-4);
        let log_weight = log_ratio.clamp(LEAST_LOG_WEIGHT, 20.0);
        let phi = (lambda + k * log_weight - lambda * log_weight.exp()).exp();
        if phi.is_finite() { phi } else { 0.0 }
    }

    /// Returns whether a ratio is clipped below, and whether it is clipped above.
    fn is_clipped(&self, ratio: f64, advantage: f64) -> [bool; 2] {
        match self.loss {
            PolicyLoss::Cispo => [false, ratio > self.epsilon_high && advantage > 0.0],
            PolicyLoss::Sapo | PolicyLoss::Vespo => [false; 2],
            _ => {
                let ratio = self.delta.map_or(ratio, |delta| ratio.min(delta));
                [
                    ratio < 1.0 - self.epsilon && advantage < 0.0,
                    ratio > 1.0 + self.epsilon_high && advantage > 0.0,
                ]
            }
        }
    }
}

impl PolicyStats {
    fn add_answers(&mut self, answers: &[PolicyAnswer], sums: &[Sums], options: &GrpoOptions) {
        for (answer, sums) in answers.iter().zip(sums) {
            self.answers[0] += 1.0;
            if options.loss == PolicyLoss::Vespo {
                self.phi += options.phi(answer.advantage, sums.bounded + sums.served[1]);
            }
            let ratios = match options.importance_sampling {
                ImportanceSampling::Token => sums.tokens,
                ImportanceSampling::Sequence => 1.0,
            };
            self.ratios += ratios;
            if ratios == 0.0 {
                continue;
            }
            // A masked answer has one ratio of 1 or none.
            let part = sums.clipped.map(|clipped| clipped / sums.tokens.max(1.0));
            let [least, most] = self.clipped_range;
            let is_first = self.answers[1] == 0.0;
            self.clipped_range = [if is_first { part[0] } else { least.min(part[0]) }, most.max(part[1])];
            self.answers[1] += 1.0;
            self.tokens += sums.tokens;
            for (all, part) in self.clipped.iter_mut().zip(part) {
                *all += part * ratios;
            }
        }
    }
}

#[cfg(test)]
mod tests;
