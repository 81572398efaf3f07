//! Policy gradients: GRPO and its kin.

use super::ScoredBatch;
use crate::metrics::MetricSums;
use crate::objective::{GrpoOptions, Loss, PolicyAnswer, PolicyStats, PolicyTokens, grpo_loss};

/// Computes the loss of a micro-batch into `out`.
pub(super) fn loss(batch: &ScoredBatch<'_>, options: &GrpoOptions, beta: f64, out: &mut Loss) -> PolicyStats {
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
    let reference = has_reference(batch).then_some(&reference_scores.log_prob[..]);
    let tokens = PolicyTokens { sequence: &sequence, policy: &scores.log_prob, sampled: &sampled, reference };
    grpo_loss(&tokens, &micro.answers, options, beta, out)
}

/// Returns whether a reference has scored the batch.
fn has_reference(batch: &ScoredBatch<'_>) -> bool {
    !batch.reference_scores.log_prob.is_empty()
}

/// Adds the metrics of a micro-batch.
pub(super) fn add_metrics(batch: &ScoredBatch<'_>, options: &GrpoOptions, beta: f64, sums: &mut MetricSums) {
    let stats = loss(batch, options, beta, &mut Loss::default());
    let forest = &batch.micro.forest;
    let (_, rows) = forest.scored_rows();
    let counted = forest.predictions.iter().zip(rows).filter(|(prediction, _)| {
        let answer: &PolicyAnswer = &batch.micro.answers[prediction.sequence as usize];
        !answer.is_masked
    });
    let entropy = counted.map(|(_, row)| f64::from(batch.scores.entropy[row as usize])).sum();
    sums.add_policy(stats, entropy, options.loss, has_reference(batch));
}

/// Answers that a plan assumes.
pub(super) fn assumed(num_sequences: usize) -> Vec<PolicyAnswer> {
    vec![PolicyAnswer { is_on_policy: true, ..PolicyAnswer::default() }; num_sequences]
}
