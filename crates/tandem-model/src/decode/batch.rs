//! What goes through a model at once: new prompts, or the last token of every text under way.

use std::ops::Range;

use tandem_kernels::ops::Visible;
use tandem_kernels::{Forest, Segment};

use crate::Result;

/// Prompts that are new to the cache.
pub(super) struct Prompts {
    /// A segment for each.
    pub(super) forest: Forest,
    /// Each one's first row of the cache.
    pub(super) rows: Vec<u32>,
    /// The row of each one's last token.
    pub(super) last: Vec<u32>,
}

impl Prompts {
    /// Of tokens, and the first row that they have in the cache.
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

/// One token of every text, after which the next is to be drawn.
pub(super) struct NextTokens {
    pub(super) tokens: Vec<u32>,
    pub(super) positions: Vec<u32>,
    /// The row of the cache that each goes to.
    pub(super) rows: Vec<u32>,
    /// What each sees: its prompt, and its text up to itself.
    pub(super) visible: Visible,
}

impl NextTokens {
    /// None.
    pub(super) fn new() -> Self {
        let visible = Visible { offsets: vec![0], ranges: Vec::new() };
        Self { tokens: Vec::new(), positions: Vec::new(), rows: Vec::new(), visible }
    }

    /// Another: the last token of a text, whose prompt and other tokens have these rows.
    pub(super) fn push(&mut self, token: u32, prompt: &Range<u32>, text: Range<u32>) {
        self.tokens.push(token);
        self.positions.push((prompt.len() + text.len()) as u32 - 1);
        self.rows.push(text.end - 1);
        self.visible.ranges.extend([prompt.clone(), text]);
        self.visible.offsets.push(self.visible.ranges.len() as u32);
    }
}
