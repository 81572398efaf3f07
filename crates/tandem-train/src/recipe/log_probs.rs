//! Log-probabilities of a micro-batch's sequences.

use crate::objective::PairLogProbs;
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
}

impl SequenceLogProbs {
    pub(crate) fn new(policy: Vec<f64>, reference: Option<Vec<f64>>, micro: &MicroBatch) -> Self {
        fn of<T: Copy>(values: &[T], micro: &MicroBatch) -> Vec<T> {
            micro.pairs.iter().flatten().map(|&sequence| values[sequence as usize]).collect()
        }
        let paired = Paired {
            policy: of(&policy, micro),
            reference: reference.as_ref().map(|reference| of(reference, micro)),
            answer_tokens: of(&micro.answer_tokens, micro),
            scored_tokens: of(&micro.scored_tokens, micro),
        };
        Self { policy, reference, paired }
    }

    pub(crate) fn pairs(&self) -> PairLogProbs<'_> {
        let Paired { policy, reference, answer_tokens, scored_tokens } = &self.paired;
        PairLogProbs { policy, reference: reference.as_deref(), answer_tokens, scored_tokens }
    }
}
