//! The part of a batch that is computed at once.

use tandem_data::forest::ForestBuilder;
use tandem_data::order::{self, cut};
use tandem_data::token_cache::TokenCache;
use tandem_kernels::Forest;

use crate::Result;
use crate::config::{Method, MicroBatch as Size};
use crate::objective::BatchTotals;

/// A part of a batch, as a forest.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// Dataset rows, in order; a pair owns two sequences, an SFT row one.
    pub rows: Vec<u32>,
    /// Their tokens.
    pub forest: Forest,
    /// Scored tokens per sequence.
    pub scored_tokens: Vec<u32>,
    /// Tokens of each answer; but for DPO the scored tokens.
    pub answer_tokens: Vec<u32>,
    /// By how much the reward of each pair's chosen answer is to lead; none but for reward models.
    pub margins: Vec<f32>,
    /// Tokens as a padding trainer counts them, without its padding: every answer with its own copy of the prompt.
    pub sequence_tokens: u64,
}

/// One rank's share of a batch, and what it needs to know of the rest.
#[derive(Clone, Debug)]
pub struct Share {
    /// The batch's rows.
    pub rows: Vec<u32>,
    /// All micro-batches, as ranges of the rows.
    pub cuts: Vec<std::ops::Range<usize>>,
    /// Counts over the whole batch.
    pub totals: BatchTotals,
    /// Tokens of the whole batch, as in [`MicroBatch::sequence_tokens`].
    pub sequence_tokens: u64,
    /// The micro-batches that this rank computes, by their place among all, in the order in which it does.
    pub mine: Vec<usize>,
    /// How many the rank that has most of them computes.
    pub rounds: usize,
}

impl Share {
    /// A batch of so many micro-batches that are all the same.
    pub fn of(batch: &MicroBatch, count: usize) -> Self {
        let chosen: u64 = batch.scored_tokens.iter().map(|&n| u64::from(n)).sum();
        let (rows, times) = (batch.rows.len(), count as u64);
        Self {
            rows: batch.rows.repeat(count),
            cuts: (0..count).map(|index| index * rows..(index + 1) * rows).collect(),
            totals: BatchTotals { pairs: times * rows as u64, chosen_tokens: times * chosen },
            sequence_tokens: times * batch.sequence_tokens,
            mine: (0..count).collect(),
            rounds: count,
        }
    }

    /// The rows of a micro-batch.
    pub fn rows_of(&self, index: usize) -> &[u32] {
        &self.rows[self.cuts[index].clone()]
    }
}

/// Cuts rows into micro-batches. A function of rows and config alone: ranks and threads never enter.
pub struct MicroBatcher {
    method: Method,
    size: Size,
    share_prefix: bool,
    in_rounds: bool,
    pad: Option<u32>,
    builder: ForestBuilder,
}

impl MicroBatcher {
    /// For rows of the given kind. `in_rounds` is for ranks that meet in the walk, so that each has to wait for the others in
    /// every micro-batch. `pad` is the token that the ends of a reward model's texts stand before.
    pub fn new(method: Method, size: Size, share_prefix: bool, in_rounds: bool, pad: Option<u32>) -> Self {
        Self { method, size, share_prefix, in_rounds, pad, builder: ForestBuilder::new(share_prefix) }
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
        let (mut sequence_tokens, mut answer_tokens, mut margins) = (0, Vec::new(), Vec::new());
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
                Method::Reward => {
                    let pair = cache.pair(row as usize);
                    sequence_tokens += pair.lengths().iter().sum::<usize>() as u64;
                    margins.push(cache.margin(row as usize));
                    self.builder.push_ends(pair.prompt, &[pair.chosen, pair.rejected], self.pad);
                }
            }
        }
        let forest = self.builder.finish()?;
        let mut scored_tokens = vec![0; forest.num_sequences as usize];
        for prediction in &forest.predictions {
            scored_tokens[prediction.sequence as usize] += 1;
        }
        if self.method != Method::Dpo {
            answer_tokens.clone_from(&scored_tokens);
        }
        Ok(MicroBatch { rows: rows.to_vec(), forest, scored_tokens, answer_tokens, margins, sequence_tokens })
    }

    /// What rank `rank` of `num_ranks` computes of a batch. The cut is that of one rank; only who computes what differs.
    pub fn share(&self, cache: &TokenCache, rows: &[u32], rank: usize, num_ranks: usize) -> Share {
        let cuts = self.cut(cache, rows);
        let (totals, sequence_tokens) = self.count(cache, rows);
        let tokens = |cut: &std::ops::Range<usize>| -> usize {
            rows[cut.clone()].iter().map(|&row| cache.num_tokens(row as usize, self.share_prefix)).sum()
        };
        let tokens: Vec<_> = cuts.iter().map(tokens).collect();
        let mut dealt = deal(&tokens, num_ranks, self.in_rounds);
        let rounds = dealt.iter().map(Vec::len).max().unwrap_or(0);
        let mine = std::mem::take(&mut dealt[rank]);
        Share { rows: rows.to_vec(), cuts, totals, sequence_tokens, mine, rounds }
    }

    /// Counts over rows, without building their forests.
    fn count(&self, cache: &TokenCache, rows: &[u32]) -> (BatchTotals, u64) {
        let (mut totals, mut sequence_tokens) = (BatchTotals::default(), 0);
        for &row in rows {
            let (chosen, tokens) = match self.method {
                Method::Sft => {
                    let row = cache.scored(row as usize);
                    (row.num_scored(), row.tokens.len())
                }
                Method::Dpo | Method::Reward => {
                    let pair = cache.pair(row as usize);
                    (pair.num_scored()[0], pair.lengths().iter().sum())
                }
            };
            totals.pairs += 1;
            totals.chosen_tokens += chosen as u64;
            sequence_tokens += tokens as u64;
        }
        (totals, sequence_tokens)
    }
}

/// Which micro-batches each rank computes: the largest first, each to the rank that has the least to do so far. In rounds, no
/// rank gets another before all have as many, so that the ones that ranks compute at the same time are of similar size.
pub(crate) fn deal(tokens: &[usize], num_ranks: usize, in_rounds: bool) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(tokens[index]));
    let (mut load, mut dealt) = (vec![0; num_ranks], vec![Vec::new(); num_ranks]);
    for index in order {
        let busy = |rank: &usize| (if in_rounds { dealt[*rank].len() } else { 0 }, load[*rank]);
        let rank = (0..num_ranks).min_by_key(busy).unwrap_or(0);
        load[rank] += tokens[index];
        dealt[rank].push(index);
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::deal;

    #[test]
    fn micro_batches_are_dealt_so_that_ranks_have_about_as_much_to_do() {
        assert_eq!(deal(&[5, 9, 4, 2], 2, false), [[1, 3], [0, 2]]);
        assert_eq!(deal(&[9, 2, 3, 3], 2, false), [vec![0], vec![2, 3, 1]]);
        for in_rounds in [false, true] {
            assert_eq!(deal(&[7, 7, 7], 1, in_rounds), [[0, 1, 2]]);
            assert_eq!(deal(&[7], 3, in_rounds), [vec![0], vec![], vec![]], "the others have nothing to do");
            assert_eq!(deal(&[], 2, in_rounds), [vec![], vec![]] as [Vec<usize>; 2]);
        }
    }

    #[test]
    fn in_rounds_ranks_compute_similar_ones_at_the_same_time() {
        // 9 beside 5, then 4 beside 2, the larger one on the rank that had the smaller one.
        assert_eq!(deal(&[5, 9, 4, 2], 2, true), [[1, 3], [0, 2]]);
        assert_eq!(deal(&[9, 2, 3, 3], 2, true), [[0, 1], [2, 3]]);
        let sizes: Vec<usize> = (0..23).map(|i| i * i % 31).collect();
        for num_ranks in 1..9 {
            let dealt = deal(&sizes, num_ranks, true);
            let rounds = sizes.len().div_ceil(num_ranks);
            assert!(dealt.iter().all(|mine| mine.len() == rounds || mine.len() + 1 == rounds), "{dealt:?}");
            let of_round = |round: usize| -> Vec<usize> {
                dealt.iter().filter_map(|mine| mine.get(round)).map(|&index| sizes[index]).collect()
            };
            for round in 1..rounds {
                let (now, before) = (of_round(round), of_round(round - 1));
                assert!(now.iter().max() <= before.iter().min(), "{num_ranks} ranks: {dealt:?}");
            }
        }
    }
}
