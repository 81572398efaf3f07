//! Policy gradients: GRPO and its kin.

use tandem_kernels::Prediction;
use tandem_kernels::ops::HeadScores;

use super::{LossTerms, MicroBatch, ScoredBatch};
use crate::objective::{GrpoOptions, Loss, PolicyAnswer, PolicyStats, PolicyTokens, grpo_loss};

/// Computes the loss of a micro-batch into `out`, with the sums behind its metrics.
pub(super) fn loss(batch: &ScoredBatch<'_>, options: &GrpoOptions, terms: &LossTerms<'_>, out: &mut Loss) {
    let ScoredBatch { micro, scores, reference_scores, .. } = batch;
    let sequence: Vec<u32> = micro.forest.predictions.iter().map(|prediction| prediction.sequence).collect();
    let entropy = entropies(micro, scores);
    // A plan's answers were not sampled.
    let sampled = of_tokens(micro, &micro.sampled).unwrap_or_else(|| scores.log_prob.clone());
    let served = of_tokens(micro, &micro.served);
    let reference = Some(&reference_scores.log_prob[..]).filter(|log_probs| !log_probs.is_empty());
    let tokens = PolicyTokens {
        sequence: &sequence,
        policy: &scores.log_prob,
        sampled: &sampled,
        served: served.as_deref(),
        high_entropy: terms.whole.least_entropy.map(|least| (&entropy[..], least)),
        reference,
    };
    let stats = grpo_loss(&tokens, &micro.answers, options, terms.beta, out);
    let counted = counted(micro).map(|token| f64::from(entropy[token]));
    out.policy = Some(PolicyStats { entropy: counted.sum(), ..stats });
}

/// The numbers of each answer's tokens in the order of the forest's predictions; `None` where there are
/// none.
fn of_tokens(micro: &MicroBatch, answers: &[Vec<f32>]) -> Option<Vec<f32>> {
    if answers.is_empty() {
        return None;
    }
    // The predictions of a sequence come in the order of its tokens.
    let mut next: Vec<usize> = (0..answers.len()).map(|answer| micro.num_unpredicted(answer)).collect();
    let of_token = |prediction: &Prediction| {
        let next = &mut next[prediction.sequence as usize];
        *next += 1;
        answers[prediction.sequence as usize][*next - 1]
    };
    Some(micro.forest.predictions.iter().map(of_token).collect())
}

/// Entropy before each predicted token, nats.
fn entropies(micro: &MicroBatch, scores: &HeadScores) -> Vec<f32> {
    let (_, rows) = micro.forest.scored_rows();
    rows.iter().map(|&row| scores.entropy[row as usize]).collect()
}

/// The predictions of answers that count.
fn counted(micro: &MicroBatch) -> impl Iterator<Item = usize> + '_ {
    let is_counted = |sequence: u32| !micro.answers[sequence as usize].is_masked;
    let predictions = micro.forest.predictions.iter().enumerate();
    predictions.filter(move |(_, prediction)| is_counted(prediction.sequence)).map(|(token, _)| token)
}

/// Entropies before the tokens that count.
pub(crate) fn counted_entropies(micro: &MicroBatch, scores: &HeadScores) -> Vec<f32> {
    let entropy = entropies(micro, scores);
    counted(micro).map(|token| entropy[token]).collect()
}

/// Answers that a plan assumes.
pub(super) fn assumed(num_sequences: usize) -> Vec<PolicyAnswer> {
    vec![PolicyAnswer { is_on_policy: true, ..PolicyAnswer::default() }; num_sequences]
}
