//! Prompts with the answers that a policy gave to them.

use super::generate::{Asked, GenerationRequest};
pub use crate::checkpoint::{Answer, Batch, CompletedPrompt, OnlineState, Turn};
pub(crate) use crate::checkpoint::{JudgeScore, Message};
use crate::metrics::Split;

/// Generation requests of a round of a split, in prompt order, for so many answers each.
pub(crate) fn asked_of(round: &[Batch], split: Split, num_answers: usize) -> Asked {
    let asked = |batch: &Batch| {
        let step = batch.step;
        batch
            .prompts
            .iter()
            .map(move |&CompletedPrompt { row, .. }| GenerationRequest { step, row })
            .collect::<Vec<_>>()
    };
    Asked { split, num_answers, requests: round.iter().flat_map(asked).collect() }
}

/// Gives a round's prompts their answers.
///
/// # Panics
/// The counts differ.
pub(crate) fn fill(round: &mut [Batch], answers: Vec<Vec<Answer>>) {
    let prompts = round.iter_mut().flat_map(|batch| &mut batch.prompts);
    let mut answers = answers.into_iter();
    for prompt in prompts {
        prompt.answers = answers.next().expect("answers to every prompt");
    }
    assert!(answers.next().is_none(), "answers to prompts alone");
}
