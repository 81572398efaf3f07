//! Packing of rows into a [`Forest`]: no padding, and a common prefix is computed once.
//!
//! A pair's root segment is the longest common prefix of prompt+chosen and prompt+rejected. It may
//! reach into the responses; its predictions then appear once per sequence. Each non-empty
//! remainder is a child segment. Sequences that truncation cut at different places share nothing
//! and form two trees.

use tandem_kernels::{Forest, Prediction, Segment};

use crate::error::DataError;
pub use crate::rows::tokens::{PairTokens, RowCounts, ScoredTokens, UnpairedTokens};

/// Builder of a forest. Pair `i` becomes the sequences `2i` (chosen) and `2i + 1` (rejected), a
/// scored row one sequence. Predictions are sorted. A response token is scored unless it is the
/// first of its sequence, which nothing predicts.
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
    lengths: Vec<u32>,
    segments: Vec<Segment>,
    predictions: Vec<Prediction>,
    num_sequences: u32,
    /// Scored prompts, whose sequences follow all others.
    num_prompts: u32,
}

impl Default for ForestBuilder {
    fn default() -> Self {
        Self::new(true)
    }
}

impl ForestBuilder {
    /// Creates an empty builder; `share_prefix = false` gives each response its own copy of the
    /// prompt.
    pub fn new(share_prefix: bool) -> Self {
        Self {
            share_prefix,
            tokens: Vec::new(),
            positions: Vec::new(),
            lengths: Vec::new(),
            segments: Vec::new(),
            predictions: Vec::new(),
            num_sequences: 0,
            num_prompts: 0,
        }
    }

    /// Adds a preference as two sequences. The longer one decides the length of both, as in a batch of
    /// `transformers` that is this pair.
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
            return self.end_texts(0);
        }
        let common = pair.shared() - prompt.len();
        let root = self.segment(None, prompt, &chosen[..common]);
        // The root's rows predict the common part of both responses; its last row also predicts the
        // next token of each.
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
        self.end_texts(0);
    }

    /// Adds a preference as [`ForestBuilder::push_pair`] does, and scores the tokens of the prompt that
    /// the chosen response sees. They are a sequence of their own: the prompts' sequences follow those of
    /// all responses.
    pub fn push_pair_and_prompt(&mut self, pair: &PairTokens) {
        let (row, at) = (self.tokens.len() as u32, self.predictions.len());
        self.push_pair(pair);
        // Numbered from the end until the number of the others is known.
        let sequence = u32::MAX - self.num_prompts;
        self.num_prompts += 1;
        let tokens = pair.prompts()[0].iter().skip(1).zip(row..);
        let prompt = tokens.map(|(&target, hidden_row)| Prediction { hidden_row, target, sequence });
        self.predictions.splice(at..at, prompt);
    }

    /// Adds a prompt and its responses, one sequence each. The prompt is one segment and each
    /// response another, as in generation, so log-probabilities have the same bits. `max_new_tokens` is
    /// the limit that the responses were generated under: as there, it decides the length of the texts.
    pub fn push_answers(&mut self, prompt: &[u32], answers: &[&[u32]], max_new_tokens: usize) {
        self.push_conversations(prompt, answers, &[], max_new_tokens);
    }

    /// Adds a prompt and its responses as [`ForestBuilder::push_answers`] does, where others wrote parts of
    /// the responses, which are not scored: `turns` are the ranges of each response that are. Without any,
    /// all of it is.
    pub fn push_conversations(
        &mut self,
        prompt: &[u32],
        answers: &[&[u32]],
        turns: &[&[[u32; 2]]],
        max_new_tokens: usize,
    ) {
        let first_prediction = self.predictions.len();
        self.push_whole(prompt, answers, max_new_tokens);
        if turns.iter().all(|turns| turns.is_empty()) {
            return;
        }
        // The predictions of a sequence come in the order of its tokens, the last token's last.
        let first = self.num_sequences - answers.len() as u32;
        let mut left: Vec<usize> = answers.iter().map(|answer| answer.len()).collect();
        let mut is_scored: Vec<bool> = self.predictions[first_prediction..]
            .iter()
            .rev()
            .map(|prediction| {
                let answer = (prediction.sequence - first) as usize;
                left[answer] -= 1;
                let (token, turns) = (left[answer] as u32, turns.get(answer).copied().unwrap_or_default());
                turns.is_empty() || turns.iter().any(|&[begin, end]| (begin..end).contains(&token))
            })
            .collect();
        let mut place = 0;
        self.predictions.retain(|_| {
            place += 1;
            place <= first_prediction || is_scored.pop().expect("one a prediction")
        });
    }

    fn push_whole(&mut self, prompt: &[u32], answers: &[&[u32]], max_new_tokens: usize) {
        let length = prompt.len() + max_new_tokens;
        let sequences = self.num_sequences..;
        self.num_sequences += answers.len() as u32;
        if !self.share_prefix {
            for (answer, sequence) in answers.iter().zip(sequences) {
                let root = self.segment(None, prompt, answer);
                self.predict_answer(root, prompt.len(), answer, 0, sequence);
            }
            return self.end_texts(length);
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
        self.end_texts(length);
    }

    /// Adds a prompt and its responses with one prediction each, for a score head. It is made at
    /// the last token that is not `pad`, as in `transformers`, or at the first token if all are.
    /// Targets are unused.
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
        // A response that is a prefix of others ends before them.
        self.predictions[start..].sort_by_key(|prediction| prediction.hidden_row);
        self.end_texts(0);
    }

    /// Returns the row of the last token that is not `pad` in the sequence that ends with a
    /// segment.
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
    /// If marks and tokens differ in number.
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
        self.end_texts(0);
    }

    /// Returns the number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of sequences.
    pub fn num_sequences(&self) -> usize {
        self.num_sequences as usize
    }

    /// Returns the forest and empties the builder.
    pub fn finish(&mut self) -> Result<Forest, DataError> {
        let mut forest = Forest::default();
        self.finish_into(&mut forest)?;
        Ok(forest)
    }

    /// Writes the forest into `forest`, whose old memory the builder takes over. Nothing is
    /// allocated once both have grown to the largest batch.
    pub fn finish_into(&mut self, forest: &mut Forest) -> Result<(), DataError> {
        if self.tokens.is_empty() || u32::try_from(self.tokens.len()).is_err() {
            return Err(DataError::Option(format!(
                "the batch has {} tokens; expected at least one and fewer than 2^32",
                self.tokens.len()
            )));
        }
        let (others, prompts) = (self.num_sequences, self.num_prompts);
        let of_prompts =
            self.predictions.iter_mut().filter(|p| prompts > 0 && p.sequence > u32::MAX - prompts);
        of_prompts.for_each(|prediction| prediction.sequence = others + (u32::MAX - prediction.sequence));
        self.num_sequences += prompts;
        std::mem::swap(&mut forest.tokens, &mut self.tokens);
        std::mem::swap(&mut forest.positions, &mut self.positions);
        std::mem::swap(&mut forest.lengths, &mut self.lengths);
        std::mem::swap(&mut forest.segments, &mut self.segments);
        std::mem::swap(&mut forest.predictions, &mut self.predictions);
        forest.num_sequences = self.num_sequences;
        self.clear();
        Ok(())
    }

    /// Empties the builder and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.lengths.clear();
        self.segments.clear();
        self.predictions.clear();
        self.num_sequences = 0;
        self.num_prompts = 0;
    }

    /// Appends the segment `head` + `tail`. Returns `None` if both are empty; the parent then
    /// replaces it.
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

    /// Gives the texts added last one length: that of the longest, and at least `least`.
    fn end_texts(&mut self, least: usize) {
        let added = &self.positions[self.lengths.len()..];
        let longest = added.iter().max().map_or(0, |last| last + 1).max(least as u32);
        self.lengths.resize(self.positions.len(), longest);
    }

    /// Adds predictions of `answer[skip..]`, which starts at token `at` of the segment, each by the
    /// row before it.
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

/// Returns the row that predicts token `t` of a segment, if the segment contains it.
fn row_before(segment: &Segment, t: usize) -> Option<u32> {
    (t > 0).then(|| segment.range.start + t as u32 - 1)
}
