//! Prompts with the answers that a policy gave to them.

use super::generate::{Asked, GenerationRequest};
pub use crate::checkpoint::{Answer, Batch, CompletedPrompt, OnlineState, Turn};
pub(crate) use crate::checkpoint::{JudgeScore, Message};
use crate::metrics::Split;

/// Generation requests of a round of a split, in prompt order, for so many answers each.
pub(crate) fn asked_of(
    round: &[Batch],
    split: Split,
    num_answers: usize,
    is_asked: impl Fn(&GenerationRequest) -> bool,
) -> Asked {
    let requests = round.iter().flat_map(requests_of).filter(is_asked).collect();
    Asked { split, num_answers, requests }
}

/// Every prompt of a batch as a request.
fn requests_of(batch: &Batch) -> impl Iterator<Item = GenerationRequest> {
    batch.prompts.iter().map(|prompt| GenerationRequest { step: batch.step, row: prompt.row })
}

/// Gives the prompts of a round that were asked their answers.
///
/// # Panics
/// The counts differ.
pub(crate) fn fill(round: &mut [Batch], asked: &Asked, answers: Vec<Vec<Answer>>) {
    assert_eq!(asked.requests.len(), answers.len(), "answers to prompts alone");
    let mut answered = asked.requests.iter().zip(answers).peekable();
    for batch in round {
        let step = batch.step;
        for prompt in &mut batch.prompts {
            let request = GenerationRequest { step, row: prompt.row };
            if let Some((_, answers)) = answered.next_if(|(asked, _)| **asked == request) {
                prompt.answers = answers;
            }
        }
    }
    assert!(answered.next().is_none(), "answers to every prompt that was asked");
}
