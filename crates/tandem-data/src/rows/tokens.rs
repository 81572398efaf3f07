//! Borrowed token ids of a row, and the sizes that it adds to a forest.

use std::iter::Sum;

/// A preference pair after truncation: TRL's `prompt_ids`, `chosen_ids` and `rejected_ids`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairTokens<'a> {
    /// The prompt's ids.
    pub prompt: &'a [u32],
    /// Number of leading prompt tokens that truncation removed for chosen and for rejected.
    pub unseen: [usize; 2],
    /// The chosen response's ids.
    pub chosen: &'a [u32],
    /// The rejected response's ids.
    pub rejected: &'a [u32],
}

impl PairTokens<'_> {
    /// Returns the part of the prompt that each response sees: chosen, rejected.
    pub fn prompts(&self) -> [&[u32]; 2] {
        self.unseen.map(|unseen| &self.prompt[unseen..])
    }

    /// Returns the number of leading tokens that the sequences share.
    pub fn shared(&self) -> usize {
        let [first, second] = self.prompts().map(<[u32]>::len);
        if first != second {
            return 0;
        }
        first + self.chosen.iter().zip(self.rejected).take_while(|(a, b)| a == b).count()
    }

    /// Returns the lengths of both sequences, the visible prompt included.
    pub fn lengths(&self) -> [usize; 2] {
        let [first, second] = self.prompts().map(<[u32]>::len);
        [first + self.chosen.len(), second + self.rejected.len()]
    }

    /// Returns the number of scored tokens of each response: all but a sequence's first token.
    pub fn num_scored(&self) -> [usize; 2] {
        let [first, second] = self.prompts().map(<[u32]>::is_empty);
        let scored = |answer: &[u32], alone: bool| answer.len().saturating_sub(usize::from(alone));
        [scored(self.chosen, first), scored(self.rejected, second)]
    }

    /// Returns the number of tokens in a forest, with the common prefix counted once or twice.
    pub fn num_tokens(&self, share_prefix: bool) -> usize {
        let both = self.lengths().iter().sum::<usize>();
        if share_prefix { both - self.shared() } else { both }
    }
}

/// A completion with a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnpairedTokens<'a> {
    /// The prompt's ids.
    pub prompt: &'a [u32],
    /// The completion's ids.
    pub completion: &'a [u32],
    /// Whether the completion is desirable.
    pub label: bool,
}

/// A supervised row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoredTokens<'a> {
    /// The ids.
    pub tokens: &'a [u32],
    /// 1 where the token is in the loss, else 0; as long as `tokens`.
    pub scored: &'a [u8],
}

impl ScoredTokens<'_> {
    /// Returns the number of scored tokens: the marked ones without the sequence's first token.
    pub fn num_scored(&self) -> usize {
        self.scored.iter().skip(1).filter(|&&scored| scored != 0).count()
    }

    /// Returns what the row adds to a forest.
    pub fn counts(&self) -> RowCounts {
        let (tokens, scored_rows) = (self.tokens.len(), self.num_scored());
        RowCounts { tokens, scored_rows, trees: usize::from(tokens > 0), sequence_tokens: tokens as u64 }
    }
}

/// Sizes that one row or several rows add to a forest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowCounts {
    /// Tokens.
    pub tokens: usize,
    /// Rows that the head scores.
    pub scored_rows: usize,
    /// Trees.
    pub trees: usize,
    /// Tokens with the prompt counted once per response.
    pub sequence_tokens: u64,
}

impl RowCounts {
    /// Counts a pair by lengths alone: the visible prompts, the responses, and
    /// [`PairTokens::shared`].
    pub fn for_pair(prompts: [usize; 2], answers: [usize; 2], shared: usize, share_prefix: bool) -> Self {
        let lengths = [prompts[0] + answers[0], prompts[1] + answers[1]];
        let both = lengths[0] + lengths[1];
        let counts =
            |tokens, scored_rows, trees| Self { tokens, scored_rows, trees, sequence_tokens: both as u64 };
        let present = |n: usize| usize::from(n > 0);
        if !share_prefix || prompts[0] != prompts[1] {
            // Nothing predicts the first token of a sequence.
            let scored = |i: usize| answers[i] - present(answers[i]).min(1 - present(prompts[i]));
            return counts(both, scored(0) + scored(1), present(lengths[0]) + present(lengths[1]));
        }
        let common = shared - prompts[0];
        let rests = answers.map(|answer| answer - common);
        let in_rests = rests.map(|rest| rest.saturating_sub(1));
        // The root's last row predicts the next token of either response, or of both.
        let of_root = (common + present(rests[0] + rests[1])).saturating_sub(1 - present(prompts[0]));
        let of_root = if shared > 0 { of_root } else { 0 };
        let trees = if shared > 0 { 1 } else { present(rests[0]) + present(rests[1]) };
        counts(both - shared, of_root + in_rests[0] + in_rests[1], trees)
    }
}

impl RowCounts {
    /// Counts a prompt and non-empty responses by lengths alone
    /// ([`ForestBuilder::push_answers`](crate::batch::forest::ForestBuilder::push_answers)).
    /// All tokens of the responses count as scored.
    pub fn for_answers(prompt: usize, answers: &[usize], share_prefix: bool) -> Self {
        let sum: usize = answers.iter().sum();
        let sequence_tokens = (answers.len() * prompt + sum) as u64;
        if !share_prefix {
            return Self {
                tokens: sequence_tokens as usize,
                scored_rows: sum,
                trees: answers.len(),
                sequence_tokens,
            };
        }
        let scored_rows = sum - answers.len() + usize::from(!answers.is_empty());
        Self { tokens: prompt + sum, scored_rows, trees: 1, sequence_tokens }
    }
}

impl Sum for RowCounts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |a, b| Self {
            tokens: a.tokens + b.tokens,
            scored_rows: a.scored_rows + b.scored_rows,
            trees: a.trees + b.trees,
            sequence_tokens: a.sequence_tokens + b.sequence_tokens,
        })
    }
}
