//! Inputs of one forward pass: new prompts, or the last token of every running completion.

use std::ops::Range;

use tandem_kernels::ops::Visible;
use tandem_kernels::{After, Forest, Run, Runs, Segment};

use crate::Result;

/// Prompt that is new to the cache.
pub(super) struct NewPrompt<'r> {
    pub(super) prompt: &'r [u32],
    /// Tokens that prompt and completion may have.
    pub(super) length: u32,
    /// First cache row.
    pub(super) row: u32,
    /// Slot of the state after it, if texts have slots.
    pub(super) keep: Option<u32>,
}

/// Prompts of a prefill, or a part of one.
pub(super) struct Prompts {
    /// One segment per prompt, of texts as long as the requests allow.
    pub(super) forest: Forest,
    /// Tokens before this part, which are in the cache; 0 but for a part.
    pub(super) first: usize,
    /// Cache row of each token from there on.
    pub(super) rows: Vec<u32>,
    /// The prompts, each kept in a slot.
    pub(super) runs: Runs,
    /// Row of each prompt's last token, of the part's last one.
    pub(super) last: Vec<u32>,
}

impl Prompts {
    /// Packs prompts.
    pub(super) fn new<'r>(prompts: impl Iterator<Item = NewPrompt<'r>>) -> Result<Self> {
        let (mut tokens, mut segments, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rows, mut last, mut runs) = (Vec::new(), Vec::new(), Vec::new());
        for NewPrompt { prompt, length, row, keep } in prompts {
            let start = tokens.len() as u32;
            tokens.extend_from_slice(prompt);
            lengths.resize(tokens.len(), length);
            let end = tokens.len() as u32;
            segments.push(Segment { range: start..end, parent: None, first_position: 0 });
            runs.push(Run { rows: start..end, after: After::Nothing, keep });
            rows.extend(row..row + prompt.len() as u32);
            last.push(end - 1);
        }
        let forest = Forest::new(tokens, segments, Vec::new(), 0)?.with_lengths(lengths)?;
        let runs = Runs::new(runs)?;
        Ok(Self { forest, first: 0, rows, runs, last })
    }

    /// Takes a range of a prompt whose tokens before it are in the cache.
    pub(super) fn part(prompt: NewPrompt<'_>, range: Range<usize>) -> Result<Self> {
        let NewPrompt { prompt, length, row, keep } = prompt;
        let (first, end, count) = (range.start, range.end as u32, range.len() as u32);
        let segment = Segment { range: 0..end, parent: None, first_position: 0 };
        let forest = Forest::new(prompt[..range.end].to_vec(), vec![segment], Vec::new(), 0)?;
        let before = keep.filter(|_| first > 0);
        let run = Run { rows: 0..count, after: before.map_or(After::Nothing, After::Slot), keep };
        Ok(Self {
            forest: forest.with_lengths(vec![length; range.end])?,
            first,
            rows: (row + first as u32..row + end).collect(),
            runs: Runs::new(vec![run])?,
            last: vec![count - 1],
        })
    }

    /// Returns the tokens that are new to the cache.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.forest.tokens[self.first..]
    }
}

/// The last token of every running completion.
pub(super) struct NextTokens {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    /// Tokens that each token's prompt and completion may have.
    pub(super) lengths: Vec<u32>,
    /// Cache row of each token.
    pub(super) rows: Vec<u32>,
    /// Cache rows that each token attends to: its prompt, and its completion up to itself.
    pub(super) visible: Visible,
    /// Slots that each token continues, and in which it is kept, if texts have slots.
    slots: Vec<(u32, u32)>,
}

impl NextTokens {
    /// Makes an empty batch.
    pub(super) fn new() -> Self {
        let visible = Visible { offsets: vec![0], ranges: Vec::new() };
        Self {
            tokens: Vec::new(),
            positions: Vec::new(),
            lengths: Vec::new(),
            rows: Vec::new(),
            visible,
            slots: Vec::new(),
        }
    }

    /// Adds the last token of a completion; `prompt` and `text` are its cache rows, `limit` the most tokens
    /// of the completion, `slots` those that it continues and is kept in.
    pub(super) fn push(
        &mut self,
        token: u32,
        prompt: &Range<u32>,
        text: Range<u32>,
        limit: usize,
        slots: Option<(u32, u32)>,
    ) {
        self.slots.extend(slots);
        self.tokens.push(token);
        self.positions.push((prompt.len() + text.len()) as u32 - 1);
        self.lengths.push((prompt.len() + limit) as u32);
        self.rows.push(text.end - 1);
        self.visible.ranges.extend([prompt.clone(), text]);
        self.visible.offsets.push(self.visible.ranges.len() as u32);
    }

    /// Returns each token as a run of its own.
    pub(super) fn runs(&self) -> Result<Runs> {
        let run = |(row, &(from, to)): (usize, &(u32, u32))| Run {
            rows: row as u32..row as u32 + 1,
            after: After::Slot(from),
            keep: Some(to),
        };
        Ok(Runs::new(self.slots.iter().enumerate().map(run).collect())?)
    }
}
