//! The part of a batch that is computed at once.

use tandem_data::forest::ForestBuilder;
use tandem_data::order::{self, cut};
use tandem_data::token_cache::TokenCache;
use tandem_kernels::Forest;

use crate::Result;
use crate::config::{Method, MicroBatch as Size};

/// A part of a batch, as a forest.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// Dataset rows, in order; a pair owns two sequences, an SFT row one.
    pub rows: Vec<u32>,
    /// Their tokens.
    pub forest: Forest,
    /// Scored tokens per sequence.
    pub scored_tokens: Vec<u32>,
    /// Tokens of each answer; for SFT the scored tokens.
    pub answer_tokens: Vec<u32>,
    /// Tokens as a padding trainer counts them, without its padding: every answer with its own copy of the prompt.
    pub sequence_tokens: u64,
}

/// Cuts rows into micro-batches. A function of rows and config alone: ranks and threads never enter.
pub struct MicroBatcher {
    method: Method,
    size: Size,
    share_prefix: bool,
    builder: ForestBuilder,
}

impl MicroBatcher {
    /// For rows of the given kind.
    pub fn new(method: Method, size: Size, share_prefix: bool) -> Self {
        Self { method, size, share_prefix, builder: ForestBuilder::new(share_prefix) }
    }

    /// The micro-batches of a batch, as ranges of its rows.
    pub fn cut(&self, cache: &TokenCache, rows: &[u32]) -> Vec<std::ops::Range<usize>> {
        let lengths: Vec<usize> =
            rows.iter().map(|&row| cache.num_tokens(row as usize, self.share_prefix)).collect();
        let budget = match self.size {
            Size::Tokens(tokens) => order::MicroBatch::Tokens(tokens),
            Size::Rows(rows) => order::MicroBatch::Rows(rows),
        };
        cut(&lengths, budget)
    }

    /// Builds the forest of some rows.
    ///
    /// # Errors
    /// If a row cannot form a forest: the cache is not what it was checked to be.
    pub fn build(&mut self, cache: &TokenCache, rows: &[u32]) -> Result<MicroBatch> {
        let (mut sequence_tokens, mut answer_tokens) = (0, Vec::new());
        for &row in rows {
            match self.method {
                Method::Sft => {
                    let scored = cache.scored(row as usize);
                    sequence_tokens += scored.tokens.len() as u64;
                    self.builder.push_scored(&scored);
                }
                Method::Dpo => {
                    let pair = cache.pair(row as usize);
                    sequence_tokens += pair.lengths().iter().sum::<usize>() as u64;
                    answer_tokens.extend([pair.chosen.len(), pair.rejected.len()].map(|n| n as u32));
                    self.builder.push_pair(&pair);
                }
            }
        }
        let forest = self.builder.finish()?;
        let mut scored_tokens = vec![0; forest.num_sequences as usize];
        for prediction in &forest.predictions {
            scored_tokens[prediction.sequence as usize] += 1;
        }
        if self.method == Method::Sft {
            answer_tokens.clone_from(&scored_tokens);
        }
        Ok(MicroBatch { rows: rows.to_vec(), forest, scored_tokens, answer_tokens, sequence_tokens })
    }

    /// Cuts a batch and builds every forest.
    ///
    /// # Errors
    /// As [`MicroBatcher::build`].
    pub fn batch(&mut self, cache: &TokenCache, rows: &[u32]) -> Result<Vec<MicroBatch>> {
        self.cut(cache, rows).into_iter().map(|range| self.build(cache, &rows[range])).collect()
    }
}
