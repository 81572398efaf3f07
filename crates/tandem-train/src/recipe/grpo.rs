//! Policy gradients: GRPO and its kin.

use super::ScoredBatch;
use crate::objective::{GrpoOptions, Loss, PolicyAnswer, PolicyStats, PolicyTokens, grpo_loss};

/// Computes the loss of a micro-batch into `out`, with the sums behind its metrics.
pub(super) fn loss(batch: &ScoredBatch<'_>, options: &GrpoOptions, beta: f64, out: &mut Loss) {
    let ScoredBatch { micro, scores, reference_scores, .. } = batch;
    let sequence: Vec<u32> = micro.forest.predictions.iter().map(|prediction| prediction.sequence).collect();
    // The predictions of a sequence come in the order of its tokens. A text that begins with the answer has
    // nothing to predict the first one from.
    let unscored = |sequence: usize| (micro.answer_tokens[sequence] - micro.scored_tokens[sequence]) as usize;
    let mut next: Vec<usize> = (0..micro.answers.len()).map(unscored).collect();
    let mut sampled = Vec::with_capacity(sequence.len());
    for (&sequence, &policy) in sequence.iter().zip(&scores.log_prob) {
        let next = &mut next[sequence as usize];
        sampled.push(micro.sampled.get(sequence as usize).map_or(policy, |log_probs| log_probs[*next]));
        *next += 1;
    }
    let reference = Some(&reference_scores.log_prob[..]).filter(|log_probs| !log_probs.is_empty());
    let tokens = PolicyTokens { sequence: &sequence, policy: &scores.log_prob, sampled: &sampled, reference };
    let stats = grpo_loss(&tokens, &micro.answers, options, beta, out);
    out.policy = Some(PolicyStats { entropy: entropy(batch), ..stats });
}

/// Sums the entropy of the tokens that count.
fn entropy(batch: &ScoredBatch<'_>) -> f64 {
    let forest = &batch.micro.forest;
    let (_, rows) = forest.scored_rows();
    let is_counted = |sequence: u32| !batch.micro.answers[sequence as usize].is_masked;
    let counted =
        forest.predictions.iter().zip(rows).filter(|(prediction, _)| is_counted(prediction.sequence));
    counted.map(|(_, row)| f64::from(batch.scores.entropy[row as usize])).sum()
}

/// Answers that a plan assumes.
pub(super) fn assumed(num_sequences: usize) -> Vec<PolicyAnswer> {
    vec![PolicyAnswer { is_on_policy: true, ..PolicyAnswer::default() }; num_sequences]
}
