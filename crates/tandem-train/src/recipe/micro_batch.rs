//! The part of a batch that is computed at once.

use tandem_data::forest::{ForestBuilder, RowCounts};
use tandem_data::order::cut;
use tandem_data::token_cache::TokenCache;
use tandem_kernels::Forest;

use super::{Recipe, ScoredPrompt};
use crate::Result;
use crate::config::MicroBatchSize;
use crate::objective::{BatchTotals, PolicyAnswer};

/// Source of a batch's rows.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// Rows of a data set.
    Cached(&'a TokenCache),
    /// Prompts with answers that were generated for this batch.
    Ranked(&'a [ScoredPrompt]),
}

impl<'a> From<&'a TokenCache> for Rows<'a> {
    fn from(cache: &'a TokenCache) -> Self {
        Self::Cached(cache)
    }
}

/// Rows of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct BatchPart<'a> {
    /// The rows, in order.
    pub rows: &'a [u32],
    /// The batch's row before the first of them; its last row, where they are its first.
    pub before: u32,
}

impl<'a> From<&'a [u32]> for BatchPart<'a> {
    /// Takes the rows of a whole batch.
    fn from(rows: &'a [u32]) -> Self {
        Self::new(rows, 0..rows.len())
    }
}

impl<'a> BatchPart<'a> {
    /// Takes a range of a batch's rows.
    pub fn new(batch: &'a [u32], range: std::ops::Range<usize>) -> Self {
        let before = if range.start == 0 { batch.len() } else { range.start };
        let before = before.checked_sub(1).map_or(0, |index| batch[index]);
        Self { rows: &batch[range], before }
    }

    /// Iterates over each row after the row before it.
    fn with_before(self) -> impl Iterator<Item = [u32; 2]> + 'a {
        std::iter::once(self.before).chain(self.rows.iter().copied()).zip(self.rows).map(|(b, &row)| [b, row])
    }
}

/// What rows add to a forest, beside their tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowLayout {
    /// Compute a common prefix once.
    pub share_prefix: bool,
    /// Token that the ends of a reward model's texts stand before.
    pub pad: Option<u32>,
    /// Longest text in tokens.
    pub max_length: usize,
    /// DPO only: score prompts, which then belong to the likelihood of the chosen completions.
    pub scores_prompts: bool,
    /// KTO only: score the completion of the row before with each prompt.
    pub has_mismatched: bool,
}

/// A part of a batch, as a forest.
#[derive(Clone, Debug, Default)]
pub struct MicroBatch {
    /// Rows, in order; a pair owns two sequences, an SFT row one.
    pub rows: Vec<u32>,
    /// Their tokens.
    pub forest: Forest,
    /// Token after the last one of each row.
    pub row_ends: Vec<u32>,
    /// Number of each row in the data set; of generated completions their prompt's.
    pub sources: Vec<u32>,
    /// The sequences of each pair: chosen, rejected. None but where answers are compared with a
    /// reference.
    pub pairs: Vec<[u32; 2]>,
    /// The sequences that are answers of the reference itself, for XPO.
    pub explored: Vec<u32>,
    /// Nash-MD only: preference of each sequence over its opponent, minus one half.
    pub advantages: Vec<f64>,
    /// Policy gradients only: each sequence as an answer.
    pub answers: Vec<PolicyAnswer>,
    /// Policy gradients only: log-probabilities of each answer's tokens when it was sampled; empty where a plan
    /// assumes the answers.
    pub sampled: Vec<Vec<f32>>,
    /// Policy gradients only: the same by the server that sampled them, where they are corrected for it.
    pub served: Vec<Vec<f32>>,
    /// Scored tokens per sequence.
    pub scored_tokens: Vec<u32>,
    /// Tokens of each answer, those that an environment wrote left out; but for DPO the scored tokens.
    pub answer_tokens: Vec<u32>,
    /// The sequences of the pairs' prompts that belong to the likelihood of the chosen answers, one a
    /// pair. None but where `data.loss_on` is `"all"`.
    pub prompts: Vec<u32>,
    /// LD-DPO only: weight of each prediction in its sequence's log-probability.
    pub token_weights: Vec<f32>,
    /// Pairs of the whole batch before this part's.
    pub first_pair: usize,
    /// KTO only: whether the completion of each pair's first sequence is desirable.
    pub labels: Vec<bool>,
    /// Reward models only: required reward margin per pair.
    pub margins: Vec<f32>,
    /// Tokens as a padding trainer counts them, without its padding: every answer with its own copy
    /// of the prompt.
    pub sequence_tokens: u64,
}

/// One rank's micro-batches of a batch, and totals of the whole batch.
#[derive(Clone, Debug)]
pub struct RankBatch {
    /// The batch's rows.
    pub rows: Vec<u32>,
    /// Row ranges of all micro-batches.
    pub cuts: Vec<std::ops::Range<usize>>,
    /// Counts over the whole batch.
    pub totals: BatchTotals,
    /// Pairs of each micro-batch; for policy gradients answers.
    pub pairs: Vec<usize>,
    /// Tokens of each micro-batch that [`BatchTotals::chosen_tokens`] counts.
    pub counted_tokens: Vec<usize>,
    /// Tokens of the whole batch, as in [`MicroBatch::sequence_tokens`].
    pub sequence_tokens: u64,
    /// The micro-batches that this rank computes, by their place among all, in the order in which
    /// it does.
    pub own_micro_batches: Vec<usize>,
    /// How many the rank that has most of them computes.
    pub rounds: usize,
}

impl MicroBatch {
    /// Number of an answer's first tokens that are not predicted: a text that begins with the answer has nothing
    /// to predict the first one from.
    pub(crate) fn num_unpredicted(&self, sequence: usize) -> usize {
        (self.answer_tokens[sequence] - self.scored_tokens[sequence]) as usize
    }

    /// Gives the weight `alpha` to tokens of a pair's completion beyond the length of the other
    /// (arXiv 2409.06411), and 1 to the others.
    fn weight_tokens(&mut self, alpha: f32) {
        let mut shared = vec![u32::MAX; self.scored_tokens.len()];
        for pair in self.pairs.iter().map(|pair| pair.map(|sequence| sequence as usize)) {
            let shorter = pair.map(|sequence| self.scored_tokens[sequence]).into_iter().min();
            pair.into_iter().for_each(|sequence| shared[sequence] = shorter.unwrap_or_default());
        }
        let mut seen = vec![0; self.scored_tokens.len()];
        self.token_weights.clear();
        self.token_weights.extend(self.forest.predictions.iter().map(|prediction| {
            let sequence = prediction.sequence as usize;
            seen[sequence] += 1;
            if seen[sequence] <= shared[sequence] { 1.0 } else { alpha }
        }));
    }
}

impl RankBatch {
    /// Creates a batch of `count` equal micro-batches.
    pub fn uniform(batch: &MicroBatch, count: usize) -> Self {
        let chosen: u64 = batch.scored_tokens.iter().map(|&n| u64::from(n)).sum();
        let (rows, times) = (batch.rows.len(), count as u64);
        Self {
            rows: batch.rows.repeat(count),
            cuts: (0..count).map(|index| index * rows..(index + 1) * rows).collect(),
            totals: BatchTotals { pairs: times * rows as u64, chosen_tokens: times * chosen },
            pairs: vec![batch.pairs.len(); count],
            counted_tokens: vec![chosen as usize; count],
            sequence_tokens: times * batch.sequence_tokens,
            own_micro_batches: (0..count).collect(),
            rounds: count,
        }
    }

    /// Pairs of the micro-batches before one.
    pub fn pairs_before(&self, index: usize) -> usize {
        self.pairs[..index].iter().sum()
    }

    /// A micro-batch's part of the batch.
    pub fn part(&self, index: usize) -> BatchPart<'_> {
        BatchPart::new(&self.rows, self.cuts[index].clone())
    }

    /// The rows of a micro-batch.
    pub fn rows_of(&self, index: usize) -> &[u32] {
        &self.rows[self.cuts[index].clone()]
    }
}

/// Cuts rows into micro-batches. A function of rows and config alone: ranks and threads never
/// enter.
pub struct MicroBatcher {
    recipe: &'static dyn Recipe,
    size: MicroBatchSize,
    layout: RowLayout,
    in_rounds: bool,
    max_new_tokens: usize,
    ld_alpha: Option<f64>,
    builder: ForestBuilder,
}

impl MicroBatcher {
    /// Creates the batcher of a recipe. `in_rounds` is for ranks that meet in the walk, so that
    /// each has to wait for the others in every micro-batch.
    pub fn new(
        recipe: &'static dyn Recipe,
        size: MicroBatchSize,
        layout: RowLayout,
        in_rounds: bool,
    ) -> Self {
        let builder = ForestBuilder::new(layout.share_prefix);
        Self { recipe, size, layout, in_rounds, max_new_tokens: 0, ld_alpha: None, builder }
    }

    /// Sets the limit under which the responses of [`Rows::Ranked`] are generated.
    #[must_use]
    pub fn with_max_new_tokens(self, max_new_tokens: usize) -> Self {
        Self { max_new_tokens, ..self }
    }

    /// Sets LD-DPO's weight of the tokens of a completion beyond the length of the other.
    #[must_use]
    pub fn with_ld_alpha(self, ld_alpha: Option<f64>) -> Self {
        Self { ld_alpha, ..self }
    }

    /// Divides prompts whose answers exceed a micro-batch among several, each with a copy of the prompt. Where answers
    /// are in pairs a prompt stays whole.
    pub fn divide(&self, prompts: Vec<ScoredPrompt>) -> Vec<ScoredPrompt> {
        let MicroBatchSize::Tokens(most) = self.size else { return prompts };
        let share_prefix = self.layout.share_prefix;
        let mut divided = Vec::with_capacity(prompts.len());
        // Tokens of the last micro-batch, as it will be cut.
        let mut used = 0;
        for mut prompt in prompts {
            let mut tokens = prompt.counts(share_prefix).tokens;
            while tokens > most && prompt.is_divisible() {
                let count = match prompt.answers_within(most.saturating_sub(used), share_prefix) {
                    0 => prompt.answers_within(most, share_prefix).max(1),
                    beside_others => beside_others,
                };
                let first = prompt.split_first(count);
                used = fill(used, first.counts(share_prefix).tokens, most);
                divided.push(first);
                tokens = prompt.counts(share_prefix).tokens;
            }
            used = fill(used, tokens, most);
            divided.push(prompt);
        }
        divided
    }

    /// The micro-batches of a batch, as ranges of its rows.
    pub fn cut<'a>(&self, of: impl Into<Rows<'a>>, rows: &[u32]) -> Vec<std::ops::Range<usize>> {
        let lengths: Vec<usize> = self.counts(of, rows.into()).iter().map(|counts| counts.tokens).collect();
        cut(&lengths, self.size.into())
    }

    /// Counts what each row adds to a forest.
    pub fn counts<'a>(&self, of: impl Into<Rows<'a>>, part: BatchPart<'_>) -> Vec<RowCounts> {
        let of = of.into();
        let of_row = |rows: [u32; 2]| match of {
            Rows::Cached(cache) => self.recipe.counts(cache, rows.map(|row| row as usize), &self.layout),
            Rows::Ranked(ranked) => ranked[rows[1] as usize].counts(self.layout.share_prefix),
        };
        part.with_before().map(of_row).collect()
    }

    /// Returns whether what a row adds depends on the row before it in the batch.
    pub fn mixes_rows(&self) -> bool {
        self.recipe.mixes_rows() && self.layout.has_mismatched
    }

    /// Builds the forest of some rows.
    ///
    /// # Errors
    /// A row cannot form a forest: the cache is not the verified one.
    pub fn build<'a, 'b>(
        &mut self,
        of: impl Into<Rows<'a>>,
        part: impl Into<BatchPart<'b>>,
    ) -> Result<MicroBatch> {
        let part = part.into();
        let rows = part.rows;
        let mut micro = MicroBatch { rows: rows.to_vec(), ..MicroBatch::default() };
        match of.into() {
            Rows::Cached(cache) => part.with_before().for_each(|rows| {
                let rows = rows.map(|row| row as usize);
                micro.sequence_tokens += self.recipe.row(cache, rows[1]).num_sequence_tokens() as u64;
                self.recipe.add_row(cache, rows, &self.layout, &mut self.builder, &mut micro);
                micro.row_ends.push(self.builder.num_tokens() as u32);
                micro.sources.push(rows[1] as u32);
            }),
            Rows::Ranked(ranked) => {
                let (share_prefix, limit) = (self.layout.share_prefix, self.max_new_tokens);
                let add = |&row: &u32| {
                    let prompt = &ranked[row as usize];
                    prompt.add_to(share_prefix, limit, &mut self.builder, &mut micro);
                    micro.row_ends.push(self.builder.num_tokens() as u32);
                    micro.sources.push(prompt.row);
                };
                rows.iter().for_each(add);
            }
        }
        micro.forest = self.builder.finish()?;
        if self.layout.scores_prompts {
            let (first, count) = (2 * micro.pairs.len() as u32, micro.pairs.len() as u32);
            micro.prompts = (first..first + count).collect();
        }
        micro.scored_tokens = vec![0; micro.forest.num_sequences as usize];
        for prediction in &micro.forest.predictions {
            micro.scored_tokens[prediction.sequence as usize] += 1;
        }
        if micro.answer_tokens.is_empty() {
            micro.answer_tokens.clone_from(&micro.scored_tokens);
        }
        if let Some(alpha) = self.ld_alpha {
            micro.weight_tokens(alpha as f32);
        }
        Ok(micro)
    }

    /// Assigns micro-batches to rank `rank` of `num_ranks`. The cut does not depend on the number
    /// of ranks.
    pub fn share<'a>(
        &self,
        of: impl Into<Rows<'a>>,
        rows: &[u32],
        rank: usize,
        num_ranks: usize,
    ) -> RankBatch {
        let of = of.into();
        let lengths: Vec<usize> = self.counts(of, rows.into()).iter().map(|counts| counts.tokens).collect();
        let cuts = cut(&lengths, self.size.into());
        let (mut totals, mut sequence_tokens) = (BatchTotals::default(), 0);
        let (mut pairs, mut counted_tokens, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        for cut in &cuts {
            let (own, own_tokens) = self.count(of, &rows[cut.clone()]);
            totals.pairs += own.pairs;
            totals.chosen_tokens += own.chosen_tokens;
            sequence_tokens += own_tokens;
            pairs.push(own.pairs as usize);
            counted_tokens.push(own.chosen_tokens as usize);
            tokens.push(lengths[cut.clone()].iter().sum::<usize>());
        }
        let mut dealt = deal(&tokens, num_ranks, self.in_rounds);
        let rounds = dealt.iter().map(Vec::len).max().unwrap_or(0);
        let own_micro_batches = std::mem::take(&mut dealt[rank]);
        let rows = rows.to_vec();
        RankBatch { rows, cuts, totals, pairs, counted_tokens, sequence_tokens, own_micro_batches, rounds }
    }

    /// Counts over rows, without building their forests.
    fn count(&self, of: Rows<'_>, rows: &[u32]) -> (BatchTotals, u64) {
        let (mut totals, mut sequence_tokens) = (BatchTotals::default(), 0);
        for &row in rows {
            let (pairs, chosen, tokens) = match of {
                Rows::Ranked(ranked) => {
                    let ranked = &ranked[row as usize];
                    let sequence_tokens = ranked.counts(self.layout.share_prefix).sequence_tokens as usize;
                    (ranked.weight(), ranked.num_counted_tokens(), sequence_tokens)
                }
                Rows::Cached(cache) => {
                    let row = self.recipe.row(cache, row as usize);
                    let prompt = if self.layout.scores_prompts { row.num_scored_of_prompt() } else { 0 };
                    (1, prompt + row.num_chosen_tokens(), row.num_sequence_tokens())
                }
            };
            totals.pairs += pairs as u64;
            totals.chosen_tokens += chosen as u64;
            sequence_tokens += tokens as u64;
        }
        (totals, sequence_tokens)
    }
}

/// Adds tokens to a micro-batch, or to a new one where they do not fit.
fn fill(used: usize, tokens: usize, most: usize) -> usize {
    if used + tokens <= most { used + tokens } else { tokens }
}

/// Assigns micro-batches: the largest first, each to the rank with the least work. In rounds, ranks
/// get equal counts, so that micro-batches computed at the same time are of similar size.
pub(crate) fn deal(tokens: &[usize], num_ranks: usize, in_rounds: bool) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(tokens[index]));
    // Of ranks that are equally busy the first is taken, so the others have nothing.
    let busiest = num_ranks.min(tokens.len());
    let (mut load, mut dealt) = (vec![0; busiest], vec![Vec::new(); num_ranks]);
    for index in order {
        let busy = |rank: &usize| (if in_rounds { dealt[*rank].len() } else { 0 }, load[*rank]);
        let rank = (0..busiest).min_by_key(busy).unwrap_or(0);
        load[rank] += tokens[index];
        dealt[rank].push(index);
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::{MicroBatcher, RowLayout, Rows, deal};
    use crate::config::{Method, MicroBatchSize};
    use crate::recipe::{SampledAnswer, ScoredPrompt, for_method};

    /// Rotary embeddings by length then rotate as in generation.
    #[test]
    fn generated_responses_have_the_length_that_generation_allowed() {
        for share_prefix in [true, false] {
            let size = MicroBatchSize::Rows(4);
            let layout = RowLayout { share_prefix, ..RowLayout::default() };
            let mut batcher =
                MicroBatcher::new(for_method(Method::Online), size, layout, false).with_max_new_tokens(9);
            let ranked = |prompt: &[u32]| ScoredPrompt {
                prompt: prompt.to_vec(),
                answers: vec![vec![4, 5], vec![6]],
                pairs: vec![[0, 1]],
                ..ScoredPrompt::default()
            };
            let rows = [ranked(&[1, 2, 3]), ranked(&[1])];
            let forest = batcher.build(Rows::Ranked(&rows), &[0, 1][..]).unwrap().forest;
            let [first, second] = if share_prefix { [6, 4] } else { [9, 5] };
            assert_eq!(forest.lengths, [vec![12; first], vec![10; second]].concat());
        }
    }

    /// What an environment wrote is read and not predicted, and counts nowhere as an answer's tokens.
    #[test]
    fn only_sampled_tokens_of_a_conversation_count() {
        for share_prefix in [true, false] {
            let layout = RowLayout { share_prefix, ..RowLayout::default() };
            let mut batcher =
                MicroBatcher::new(for_method(Method::Grpo), MicroBatchSize::Rows(4), layout, false);
            let rows = [ScoredPrompt {
                prompt: vec![1, 2],
                answers: vec![vec![3, 4, 50, 51, 5], vec![6, 7]],
                turns: vec![vec![[0, 2], [4, 5]], Vec::new()],
                policy: vec![SampledAnswer::default(); 2],
                ..ScoredPrompt::default()
            }];
            let micro = batcher.build(Rows::Ranked(&rows), &[0][..]).unwrap();
            assert_eq!((&micro.answer_tokens[..], &micro.scored_tokens[..]), (&[3, 2][..], &[3, 2][..]));
            let targets = |sequence: u32| -> Vec<u32> {
                let own = micro.forest.predictions.iter().filter(|p| p.sequence == sequence);
                own.map(|prediction| prediction.target).collect()
            };
            assert_eq!([targets(0), targets(1)], [vec![3, 4, 5], vec![6, 7]]);
            assert!(micro.forest.tokens.contains(&50), "it is read");
            let share = batcher.share(Rows::Ranked(&rows), &[0], 0, 1);
            assert_eq!((share.totals.pairs, share.totals.chosen_tokens), (2, 5));
        }
    }

    /// Every answer is in one micro-batch with its numbers and a prompt, and no micro-batch with more than one answer
    /// is too large.
    #[test]
    fn groups_larger_than_a_micro_batch_are_divided() {
        let prompt = |row: u32, prompt: usize, lengths: &[usize]| {
            let policy = |answer: usize| SampledAnswer {
                sampled: vec![answer as f32; lengths[answer]],
                ..SampledAnswer::default()
            };
            ScoredPrompt {
                row,
                prompt: vec![1; prompt],
                answers: (0..lengths.len()).map(|answer| vec![answer as u32; lengths[answer]]).collect(),
                turns: lengths.iter().map(|&length| vec![[0, length as u32]]).collect(),
                policy: (0..lengths.len()).map(policy).collect(),
                ..ScoredPrompt::default()
            }
        };
        let whole = [
            prompt(0, 5, &[3, 4]),
            prompt(1, 4, &[9, 2, 30, 7, 7, 1, 8, 8, 8]),
            prompt(2, 2, &[1, 1, 1]),
            prompt(3, 18, &[2, 2, 2, 2]),
        ];
        for (share_prefix, most) in
            [true, false].into_iter().flat_map(|share| (1..120).map(move |n| (share, n)))
        {
            let layout = RowLayout { share_prefix, ..RowLayout::default() };
            let size = MicroBatchSize::Tokens(most);
            let batcher = MicroBatcher::new(for_method(Method::Grpo), size, layout, false);
            let divided = batcher.divide(whole.to_vec());
            let what = format!("{most} tokens, shared {share_prefix}");
            for expected in &whole {
                let parts: Vec<_> = divided.iter().filter(|part| part.row == expected.row).collect();
                assert!(parts.iter().all(|part| part.prompt == expected.prompt), "{what}");
                let (mut answers, mut turns, mut policy) = (Vec::new(), Vec::new(), Vec::new());
                for part in &parts {
                    answers.extend(part.answers.clone());
                    turns.extend(part.turns.clone());
                    policy.extend(part.policy.clone());
                }
                assert_eq!((&answers, &turns), (&expected.answers, &expected.turns), "{what}");
                assert!(policy == expected.policy, "{what}");
                let fits = expected.counts(share_prefix).tokens <= most;
                assert!(!fits || parts.len() == 1, "{what}: {} parts of {}", parts.len(), expected.row);
            }
            let rows: Vec<u32> = (0..divided.len() as u32).collect();
            for cut in batcher.cut(Rows::Ranked(&divided), &rows) {
                let tokens =
                    divided[cut.clone()].iter().map(|part| part.counts(share_prefix).tokens).sum::<usize>();
                let answers = divided[cut].iter().map(|part| part.answers.len()).sum::<usize>();
                assert!(tokens <= most || answers == 1, "{what}: {tokens} tokens of {answers} answers");
            }
        }
        let layout = RowLayout { share_prefix: true, ..RowLayout::default() };
        let batcher = MicroBatcher::new(for_method(Method::Grpo), MicroBatchSize::Tokens(20), layout, false);
        let parts = |rows: Vec<ScoredPrompt>| -> Vec<usize> {
            batcher.divide(rows).iter().map(|part| part.answers.len()).collect()
        };
        // What is left beside another prompt is filled.
        assert_eq!(parts(vec![prompt(0, 5, &[3, 4]), prompt(1, 2, &[5; 4])]), [2, 1, 3]);
        let paired = ScoredPrompt { pairs: vec![[0, 3]], policy: Vec::new(), ..prompt(0, 4, &[9; 4]) };
        assert_eq!(parts(vec![paired]), [4], "a pair stays together");
    }

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
        // 9 with 5, then 4 with 2; the rank with the smaller one gets the larger one.
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
