//! Inputs of one forward pass: new prompts, or the last token of every running completion.

use std::ops::Range;

use tandem_kernels::ops::Visible;
use tandem_kernels::{Forest, Segment};

use crate::Result;

pub(super) struct Prompts {
    /// One segment per prompt.
    pub(super) forest: Forest,
    /// First cache row of each prompt.
    pub(super) rows: Vec<u32>,
    /// Row of each prompt's last token.
    pub(super) last: Vec<u32>,
}

impl Prompts {
    /// Packs prompts, each with its first cache row.
    pub(super) fn new<'r>(prompts: impl Iterator<Item = (&'r [u32], u32)>) -> Result<Self> {
        let (mut tokens, mut segments) = (Vec::new(), Vec::new());
        let (mut rows, mut last) = (Vec::new(), Vec::new());
        for (prompt, row) in prompts {
            let start = tokens.len() as u32;
            tokens.extend_from_slice(prompt);
            let end = tokens.len() as u32;
            segments.push(Segment { range: start..end, parent: None, first_position: 0 });
            rows.push(row);
            last.push(end - 1);
        }
        Ok(Self { forest: Forest::new(tokens, segments, Vec::new(), 0)?, rows, last })
    }
}

/// The last token of every running completion.
pub(super) struct NextTokens {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    /// Cache row of each token.
    pub(super) rows: Vec<u32>,
    /// Cache rows that each token attends to: its prompt, and its completion up to itself.
    pub(super) visible: Visible,
}

impl NextTokens {
    /// Makes an empty batch.
    pub(super) fn new() -> Self {
        let visible = Visible { offsets: vec![0], ranges: Vec::new() };
        Self { tokens: Vec::new(), positions: Vec::new(), rows: Vec::new(), visible }
    }

    /// Adds the last token of a completion; `prompt` and `text` are its cache rows.
    pub(super) fn push(&mut self, token: u32, prompt: &Range<u32>, text: Range<u32>) {
        self.tokens.push(token);
        self.positions.push((prompt.len() + text.len()) as u32 - 1);
        self.rows.push(text.end - 1);
        self.visible.ranges.extend([prompt.clone(), text]);
        self.visible.offsets.push(self.visible.ranges.len() as u32);
    }
}
