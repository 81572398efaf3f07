//! Packs rows into a [`Forest`]: no padding, and what two answers share is computed once.
//!
//! A pair's root segment is the longest common prefix of prompt+chosen and prompt+rejected. It may reach into the
//! answers; predictions inside it then appear once for each sequence. What remains of either is a child segment, if
//! anything remains. Where truncation cut the beginning of one of them, they share nothing and are two trees.

use tandem_kernels::{Forest, Prediction, Segment};

use crate::error::DataError;
pub use crate::rows::tokens::{PairTokens, RowCounts, ScoredTokens};

/// Collects rows into a forest. Pair `i` becomes the sequences `2i` (chosen) and `2i + 1` (rejected), a scored row one
/// sequence. Predictions come out sorted, and a token is scored if it is in the answer and not the sequence's first
/// (nothing predicts that).
///
/// ```
/// use tandem_data::forest::{ForestBuilder, PairTokens};
///
/// let mut builder = ForestBuilder::default();
/// builder.push_pair(&PairTokens { prompt: &[1, 2], unseen: [0, 0], chosen: &[3, 4, 5], rejected: &[3, 6] });
/// let forest = builder.finish()?;
/// assert_eq!(forest.tokens, [1, 2, 3, /* chosen */ 4, 5, /* rejected */ 6]);
/// assert_eq!(forest.segments.iter().map(|s| s.parent).collect::<Vec<_>>(), [None, Some(0), Some(0)]);
/// // The shared 3 is predicted for both sequences, and the row of the 3 predicts both 4 and 6.
/// let predictions: Vec<_> = forest.predictions.iter().map(|p| (p.hidden_row, p.target, p.sequence)).collect();
/// assert_eq!(predictions, [(1, 3, 0), (1, 3, 1), (2, 4, 0), (2, 6, 1), (3, 5, 0)]);
/// # Ok::<(), tandem_data::DataError>(())
/// ```
#[derive(Debug)]
pub struct ForestBuilder {
    share_prefix: bool,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    segments: Vec<Segment>,
    predictions: Vec<Prediction>,
    num_sequences: u32,
}

impl Default for ForestBuilder {
    fn default() -> Self {
        Self::new(true)
    }
}

impl ForestBuilder {
    /// `share_prefix = false` gives each answer its own copy of the prompt, for comparison.
    pub fn new(share_prefix: bool) -> Self {
        Self {
            share_prefix,
            tokens: Vec::new(),
            positions: Vec::new(),
            segments: Vec::new(),
            predictions: Vec::new(),
            num_sequences: 0,
        }
    }

    /// Adds a preference as two sequences.
    pub fn push_pair(&mut self, pair: &PairTokens) {
        let PairTokens { chosen, rejected, .. } = *pair;
        let [prompt, other] = pair.prompts();
        let [first, second] = [self.num_sequences, self.num_sequences + 1];
        self.num_sequences += 2;
        if !self.share_prefix || prompt.len() != other.len() {
            for (sequence, prompt, answer) in [(first, prompt, chosen), (second, other, rejected)] {
                let root = self.segment(None, prompt, answer);
                self.predict_answer(root, prompt.len(), answer, 0, sequence);
            }
            return;
        }
        let common = pair.shared() - prompt.len();
        let root = self.segment(None, prompt, &chosen[..common]);
        // The rows of the root predict the common part of both answers, and its last row what comes after in each.
        let answers = [(first, chosen), (second, rejected)];
        for t in 0..common + 1 {
            let Some(hidden_row) =
                root.and_then(|r| row_before(&self.segments[r as usize], prompt.len() + t))
            else {
                continue;
            };
            for (sequence, answer) in answers {
                if let Some(&target) = answer.get(t) {
                    self.predictions.push(Prediction { hidden_row, target, sequence });
                }
            }
        }
        for (sequence, answer) in answers {
            let rest = &answer[common..];
            let child = self.segment(root, rest, &[]);
            self.predict_answer(child, 0, rest, 1, sequence);
        }
    }

    /// Adds a prompt with answers, each a sequence: the prompt is a segment, and each answer one, which share nothing more. That is how
    /// a generator computes them, so that log-probabilities are the same bits.
    pub fn push_answers(&mut self, prompt: &[u32], answers: &[&[u32]]) {
        let sequences = self.num_sequences..;
        self.num_sequences += answers.len() as u32;
        if !self.share_prefix {
            for (answer, sequence) in answers.iter().zip(sequences) {
                let root = self.segment(None, prompt, answer);
                self.predict_answer(root, prompt.len(), answer, 0, sequence);
            }
            return;
        }
        let root = self.segment(None, prompt, &[]);
        if let Some(hidden_row) = root.and_then(|r| row_before(&self.segments[r as usize], prompt.len())) {
            let firsts =
                answers.iter().zip(sequences.clone()).filter_map(|(answer, s)| Some((*answer.first()?, s)));
            self.predictions.extend(firsts.map(|(target, sequence)| Prediction {
                hidden_row,
                target,
                sequence,
            }));
        }
        for (answer, sequence) in answers.iter().zip(sequences) {
            let child = self.segment(root, answer, &[]);
            self.predict_answer(child, 0, answer, 1, sequence);
        }
    }

    /// Adds a prompt with answers, each a sequence with one prediction: of its last token that is not `pad`, as `transformers`
    /// finds the end of a text (the first token, if all are). The predictions are for a score head; their target is not looked at.
    pub fn push_ends(&mut self, prompt: &[u32], answers: &[&[u32]], pad: Option<u32>) {
        let common = match answers {
            [first, rest @ ..] if self.share_prefix => {
                let shared = |other: &&[u32]| first.iter().zip(*other).take_while(|(a, b)| a == b).count();
                rest.iter().map(shared).min().unwrap_or(first.len())
            }
            _ => 0,
        };
        let root = match answers {
            [first, ..] if self.share_prefix => self.segment(None, prompt, &first[..common]),
            _ => None,
        };
        let start = self.predictions.len();
        for answer in answers {
            let end = if self.share_prefix {
                self.segment(root, &answer[common..], &[]).or(root)
            } else {
                self.segment(None, prompt, answer)
            };
            let hidden_row = end.map(|segment| self.end_before(segment, pad));
            let sequence = self.num_sequences;
            self.num_sequences += 1;
            self.predictions.extend(hidden_row.map(|hidden_row| Prediction {
                hidden_row,
                target: 0,
                sequence,
            }));
        }
        // An answer that others begin with ends before they do.
        self.predictions[start..].sort_by_key(|prediction| prediction.hidden_row);
    }

    /// The row of the last token that is not `pad` of what ends with a segment.
    fn end_before(&self, segment: u32, pad: Option<u32>) -> u32 {
        let (mut first, mut next) = (0, Some(segment));
        while let Some(Segment { range, parent, .. }) = next.map(|index| &self.segments[index as usize]) {
            let tokens = &self.tokens[range.start as usize..range.end as usize];
            if let Some(place) = tokens.iter().rposition(|&token| Some(token) != pad) {
                return range.start + place as u32;
            }
            (first, next) = (range.start, *parent);
        }
        first
    }

    /// Adds a supervised row as one sequence.
    ///
    /// # Panics
    /// If the marks are not as many as the tokens.
    pub fn push_scored(&mut self, row: &ScoredTokens) {
        assert_eq!(row.tokens.len(), row.scored.len(), "one mark per token");
        let start = self.tokens.len() as u32;
        self.segment(None, row.tokens, &[]);
        let sequence = self.num_sequences;
        self.num_sequences += 1;
        let scored = row.tokens.iter().zip(row.scored).zip(0u32..).skip(1);
        self.predictions.extend(
            scored.filter(|((_, scored), _)| **scored != 0).map(|((&target, _), t)| Prediction {
                hidden_row: start + t - 1,
                target,
                sequence,
            }),
        );
    }

    /// Number of tokens so far.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Number of sequences so far.
    pub fn num_sequences(&self) -> usize {
        self.num_sequences as usize
    }

    /// Takes the forest; the builder is empty afterwards.
    ///
    /// # Errors
    /// If there is no token in it, or more than 2³² of them.
    pub fn finish(&mut self) -> Result<Forest, DataError> {
        let mut forest = Forest::default();
        self.finish_into(&mut forest)?;
        Ok(forest)
    }

    /// The same into a forest that is no longer needed: its memory becomes the builder's, so that nothing is allocated
    /// once both have grown to the largest batch.
    ///
    /// # Errors
    /// As [`ForestBuilder::finish`].
    pub fn finish_into(&mut self, forest: &mut Forest) -> Result<(), DataError> {
        if self.tokens.is_empty() || u32::try_from(self.tokens.len()).is_err() {
            return Err(DataError::Option(format!(
                "a batch of {} tokens; it needs at least one and fewer than 2^32",
                self.tokens.len()
            )));
        }
        std::mem::swap(&mut forest.tokens, &mut self.tokens);
        std::mem::swap(&mut forest.positions, &mut self.positions);
        std::mem::swap(&mut forest.segments, &mut self.segments);
        std::mem::swap(&mut forest.predictions, &mut self.predictions);
        forest.num_sequences = self.num_sequences;
        self.clear();
        Ok(())
    }

    /// Forgets what was pushed and keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.segments.clear();
        self.predictions.clear();
        self.num_sequences = 0;
    }

    /// Appends a segment of two pieces of text; nothing where both are empty, and then the parent stands for it.
    fn segment(&mut self, parent: Option<u32>, head: &[u32], tail: &[u32]) -> Option<u32> {
        let length = (head.len() + tail.len()) as u32;
        if length == 0 {
            return None;
        }
        let start = self.tokens.len() as u32;
        let first_position = parent.map_or(0, |p| {
            let parent = &self.segments[p as usize];
            parent.first_position + parent.range.end - parent.range.start
        });
        self.tokens.extend_from_slice(head);
        self.tokens.extend_from_slice(tail);
        self.positions.extend(first_position..first_position + length);
        self.segments.push(Segment { range: start..start + length, parent, first_position });
        Some(self.segments.len() as u32 - 1)
    }

    /// Predictions of `answer[skip..]`, which begins at token `at` of the segment, each by the row before it.
    fn predict_answer(
        &mut self,
        segment: Option<u32>,
        at: usize,
        answer: &[u32],
        skip: usize,
        sequence: u32,
    ) {
        let Some(segment) = segment.map(|s| self.segments[s as usize].clone()) else { return };
        let rows = (skip..answer.len()).filter_map(|t| Some((row_before(&segment, at + t)?, answer[t])));
        self.predictions.extend(rows.map(|(hidden_row, target)| Prediction { hidden_row, target, sequence }));
    }
}

/// The row that predicts token `t` of a segment, if it is inside.
fn row_before(segment: &Segment, t: usize) -> Option<u32> {
    (t > 0).then(|| segment.range.start + t as u32 - 1)
}
