//! Log-probabilities of a micro-batch's sequences.

use tandem_kernels::ops::HeadScores;

use crate::objective::{Likelihood, ObjectiveConfig, PairLogProbs};
use crate::recipe::MicroBatch;

/// Log-probability (or reward) of each sequence under policy and reference.
pub(crate) struct SequenceLogProbs {
    pub(crate) policy: Vec<f64>,
    pub(crate) reference: Option<Vec<f64>>,
    /// The same per pair member, for preference methods.
    paired: Paired,
}

/// Sequence index per pair member; a sequence repeats for each of its pairs.
#[derive(Default)]
struct Paired {
    policy: Vec<f64>,
    reference: Option<Vec<f64>>,
    answer_tokens: Vec<u32>,
    scored_tokens: Vec<u32>,
    /// Per pair, if it is not `policy` and `scored_tokens`.
    likelihood: Option<(Vec<f64>, Vec<u32>)>,
    /// WPO's weight per pair, if pairs have one.
    weights: Option<Vec<f64>>,
    first: usize,
    labels: Vec<bool>,
}

impl SequenceLogProbs {
    /// Sums the policy's scores per sequence. `reference` are such sums.
    pub(crate) fn new(
        scores: &HeadScores,
        reference: Option<Vec<f64>>,
        micro: &MicroBatch,
        objective: &ObjectiveConfig,
    ) -> Self {
        fn of<T: Copy>(values: &[T], micro: &MicroBatch) -> Vec<T> {
            micro.pairs.iter().flatten().map(|&sequence| values[sequence as usize]).collect()
        }
        let policy = micro.sequence_log_probs(scores);
        let paired = Paired {
            policy: of(&policy, micro),
            reference: reference.as_ref().map(|reference| of(reference, micro)),
            answer_tokens: of(&micro.answer_tokens, micro),
            scored_tokens: of(&micro.scored_tokens, micro),
            likelihood: likelihood(micro, scores),
            weights: objective.use_weighting.then(|| weights(micro, scores)),
            first: micro.first_pair,
            labels: micro.labels.clone(),
        };
        Self { policy, reference, paired }
    }

    pub(crate) fn pairs(&self) -> PairLogProbs<'_> {
        let Paired { policy, reference, answer_tokens, scored_tokens, likelihood, weights, first, labels } =
            &self.paired;
        let reference = reference.as_deref();
        let likelihood = likelihood.as_ref().map(|(log_prob, tokens)| Likelihood { log_prob, tokens });
        let (weights, first_pair) = (weights.as_deref(), *first);
        PairLogProbs {
            policy,
            reference,
            answer_tokens,
            scored_tokens,
            likelihood,
            weights,
            first_pair,
            labels,
        }
    }
}

/// Likelihood of the chosen completions where tokens have weights or prompts belong to it.
fn likelihood(micro: &MicroBatch, scores: &HeadScores) -> Option<(Vec<f64>, Vec<u32>)> {
    if micro.token_weights.is_empty() && micro.prompts.is_empty() {
        return None;
    }
    let sums = sums(micro, &scores.log_prob, &[]);
    let prompts = |pair: usize| micro.prompts.get(pair).map(|&prompt| prompt as usize);
    let chosen = || micro.pairs.iter().map(|pair| pair[0] as usize).enumerate();
    let log_prob = chosen().map(|(i, s)| sums[s] + prompts(i).map_or(0.0, |prompt| sums[prompt]));
    let tokens = &micro.scored_tokens;
    let counts = chosen().map(|(i, s)| tokens[s] + prompts(i).map_or(0, |prompt| tokens[prompt]));
    Some((log_prob.collect(), counts.collect()))
}

/// WPO's weight of each pair (arXiv 2406.11827, equation 2): the product over both completions of `e` to
/// the mean over tokens of `log π(token) − log Σ_v π(v)²`. No gradient goes through it.
fn weights(micro: &MicroBatch, scores: &HeadScores) -> Vec<f64> {
    let (_, rows) = micro.forest.scored_rows();
    let aligned = |(log_prob, row): (&f32, &u32)| log_prob - scores.log_sum_squares[*row as usize];
    let aligned: Vec<f32> = scores.log_prob.iter().zip(&rows).map(aligned).collect();
    let sums = sums(micro, &aligned, &[]);
    let mean = |s: u32| sums[s as usize] / f64::from(micro.scored_tokens[s as usize].max(1));
    micro.pairs.iter().map(|&[chosen, rejected]| (mean(chosen) + mean(rejected)).exp()).collect()
}

impl MicroBatch {
    /// Sums token log-probabilities into their sequences, in f64 and in the order of the token axis.
    pub(crate) fn sequence_log_probs(&self, scores: &HeadScores) -> Vec<f64> {
        sums(self, &scores.log_prob, &self.token_weights)
    }
}

/// Sums numbers of predictions into their sequences, each times its weight where there are weights.
fn sums(micro: &MicroBatch, values: &[f32], weights: &[f32]) -> Vec<f64> {
    let mut sums = vec![0.0; micro.forest.num_sequences as usize];
    for (i, (prediction, &value)) in micro.forest.predictions.iter().zip(values).enumerate() {
        let weight = weights.get(i).map_or(1.0, |&weight| f64::from(weight));
        sums[prediction.sequence as usize] += weight * f64::from(value);
    }
    sums
}
