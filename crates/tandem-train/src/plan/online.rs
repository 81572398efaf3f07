//! Largest batches of an online run: its prompts are known, its completions bounded.

use std::ops::Range;

use tandem_data::forest::RowCounts;
use tandem_data::order;
use tandem_data::record::RowKind;
use tandem_data::token_cache::TokenCache;
use tandem_kernels::ops::MANY_TREES;
use tandem_model::BatchCapacity;

use super::survey::{BatchStatistics, PassShape, evaluation_shape};
use crate::Result;
use crate::config::{Algorithm, Config, MicroBatchSize, OnlineConfig, Order};
use crate::inputs::RunInputs;
use crate::recipe::{self, Author, MicroBatch, MicroBatcher, Rows, SampledAnswer, ScoredPrompt};

/// Surveys an online run: its largest micro-batches, and the work of its steps if every completion has the greatest
/// length.
pub(super) fn survey(config: &Config, prepared: &RunInputs) -> Result<BatchStatistics> {
    let rows = LargestRows::new(config, &prepared.train);
    let mut batcher = prepared.batcher(config);
    let train = rows.pass_shape(&mut batcher)?;
    let mut batches = prepared.batches(config);
    let divided = |batcher: &MicroBatcher, of_step: &[u32]| {
        batcher.divide(of_step.iter().map(|&row| rows.fill(row as usize)).collect())
    };
    let measured = match config.data.order {
        Order::Shuffled | Order::Sequential => batches.steps_per_epoch().min(super::survey::LOOK_AHEAD),
    };
    let (mut steps, mut sequence_tokens, mut num_rows) = (Vec::new(), 0, 0);
    for step in 0..measured {
        let of_step = batches.rows(step);
        let ranked = divided(&batcher, of_step);
        let counts = ranked.iter().map(|row| row.counts(rows.share_prefix).sequence_tokens);
        sequence_tokens += counts.sum::<u64>();
        num_rows += of_step.len();
        steps.push(rows.cuts(&ranked).into_iter().map(|cut| rows.tokens(&ranked[cut])).collect());
    }
    let first = divided(&batcher, batches.rows(0));
    let typical = build(&mut batcher, &first[rows.cuts(&first)[0].clone()])?;
    let per_step = |count: f64| count / measured as f64;
    let none = PassShape { room: BatchCapacity::default(), largest: Vec::new() };
    let evaluation = match prepared.eval.as_ref().filter(|_| !config.method.generates()) {
        Some(eval) => evaluation_shape(&mut batcher, eval)?,
        None => none.clone(),
    };
    Ok(BatchStatistics {
        train,
        evaluation,
        reference: none,
        typical,
        steps,
        single_micro_batches: rows.fit_one_micro_batch(),
        measured: measured as usize,
        sequence_tokens: per_step(sequence_tokens as f64),
        rows: per_step(num_rows as f64),
    })
}

/// Rows of an online run, each as large as it may become.
struct LargestRows<'a> {
    config: &'a Config,
    online: &'a OnlineConfig,
    cache: &'a TokenCache,
    share_prefix: bool,
    /// Rows of a step.
    in_step: usize,
    /// The rows, the largest first.
    by_size: Vec<usize>,
    /// The largest of a step; repeated if there are fewer than it needs.
    longest: Vec<ScoredPrompt>,
}

impl<'a> LargestRows<'a> {
    fn new(config: &'a Config, cache: &'a TokenCache) -> Self {
        let online = config.online.as_ref().expect("an online run");
        let in_step = config.train.batch_size + online.replay_per_step;
        let share_prefix = config.data.share_prefix;
        let (by_size, longest) = (Vec::new(), Vec::new());
        let mut rows = Self { config, online, cache, share_prefix, in_step, by_size, longest };
        let mut by_size: Vec<usize> = (0..cache.num_rows()).collect();
        by_size.sort_by_cached_key(|&row| std::cmp::Reverse(rows.size(row).counts(share_prefix).tokens));
        rows.longest = by_size.iter().cycle().take(in_step).map(|&row| rows.fill(row)).collect();
        rows.by_size = by_size;
        rows
    }

    /// Returns the tokens of the longest answer to a prompt: a conversation with an environment fills what its prompt
    /// leaves.
    fn longest_answer(&self, prompt: usize) -> usize {
        match self.online.environment {
            Some(_) => self.config.data.max_length.saturating_sub(prompt),
            None => self.online.max_new_tokens,
        }
    }

    /// Returns whether a step may train on completions of the data set, as a distillation does.
    fn mixes_given(&self) -> bool {
        self.cache.kind() == RowKind::Supervised
    }

    /// Returns the counts of the given completion of a row; zeros where there is none.
    fn given(&self, row: usize) -> RowCounts {
        if self.mixes_given() { self.cache.scored(row).counts() } else { RowCounts::default() }
    }

    fn size(&self, row: usize) -> RowSize {
        let prompt = self.cache.prompt_tokens(row).len();
        let answers = recipe::for_method(self.config.method).num_responses(self.config);
        let own = RowSize { prompt, answers, tokens: self.longest_answer(prompt) };
        if self.mixes_given() { own.or_larger(self.given(row), self.share_prefix) } else { own }
    }

    fn fill(&self, row: usize) -> ScoredPrompt {
        self.size(row).fill(self.online.algorithm)
    }

    fn tokens(&self, rows: &[ScoredPrompt]) -> usize {
        rows.iter().map(|row| row.counts(self.share_prefix).tokens).sum()
    }

    fn cuts(&self, rows: &[ScoredPrompt]) -> Vec<Range<usize>> {
        let lengths: Vec<usize> = rows.iter().map(|row| row.counts(self.share_prefix).tokens).collect();
        order::cut(&lengths, self.config.train.micro_batch.into())
    }

    /// Returns whether no step has more than one micro-batch.
    fn fit_one_micro_batch(&self) -> bool {
        // A batch of smaller rows may have one that is divided.
        let may_divide = self.longest[0].is_divisible() || self.mixes_given();
        let exceeds = matches!(self.config.train.micro_batch, MicroBatchSize::Tokens(limit) if self.tokens(&self.longest) > limit);
        self.cuts(&self.longest).len() <= 1 && !(may_divide && exceeds)
    }

    /// Returns the tokens of the largest micro-batch.
    fn most_tokens(&self) -> usize {
        // What nothing divides: an answer with its prompt, a given completion, answers in pairs.
        let undivided = |row: usize| {
            let prompt = self.cache.prompt_tokens(row).len();
            self.given(row).tokens.max(prompt + self.longest_answer(prompt))
        };
        let whole = match self.longest[0].is_divisible() {
            true => (0..self.cache.num_rows()).map(undivided).fold(0, usize::max),
            false => self.tokens(&self.longest[..1]),
        };
        match self.config.train.micro_batch {
            MicroBatchSize::Tokens(most) => self.tokens(&self.longest).min(most).max(whole),
            MicroBatchSize::Rows(rows) => self.tokens(&self.longest[..rows.min(self.in_step)]),
        }
    }

    /// Upper bounds of a micro-batch, whatever is generated: the longest prompts with the largest number of completions
    /// of the greatest length. They are built with as few trees as possible, and with more.
    fn pass_shape(&self, batcher: &mut MicroBatcher) -> Result<PassShape> {
        let Self { cache, share_prefix, in_step, longest, .. } = self;
        let (share_prefix, most) = (*share_prefix, self.most_tokens());
        let mut largest = Vec::new();
        for trees in (1..=(*in_step).min(MANY_TREES)).rev() {
            if let MicroBatchSize::Rows(rows) = self.config.train.micro_batch
                && trees > rows
            {
                continue;
            }
            let rows = if trees == MANY_TREES { &longest[..] } else { &longest[..trees] };
            largest.push(build(batcher, &cut_to(rows, most, share_prefix))?);
        }
        let shortest: Vec<ScoredPrompt> =
            self.by_size.iter().rev().take(*in_step).map(|&row| self.fill(row)).collect();
        largest.push(build(batcher, &cut_to(&shortest, most, share_prefix))?);
        for rows in [longest, &shortest] {
            if rows[0].is_divisible() && self.tokens(&rows[..1]) > most {
                largest.push(build(batcher, &[with_fewer_answers(&rows[0], most, share_prefix)])?);
            }
        }
        if self.mixes_given() {
            // Of all tokens of a given completion but the prompt's each may be scored.
            let unscored = |row: &usize| self.given(*row).tokens - self.given(*row).scored_rows;
            let mut rows: Vec<usize> = (0..cache.num_rows()).collect();
            rows.sort_by_cached_key(unscored);
            let given = rows.iter().take(*in_step).map(|&row| ScoredPrompt::given(cache, row as u32));
            largest.push(build(batcher, &cut_to(&given.collect::<Vec<_>>(), most, share_prefix))?);
        }
        let scored = largest.iter().map(|batch| batch.forest.scored_rows().0.len()).max().unwrap_or(0);
        // A part of a prompt's answers may be beside given completions.
        let scored = if self.mixes_given() { scored.max(most - 1) } else { scored };
        Ok(PassShape { room: BatchCapacity { tokens: most, scored }, largest })
    }
}

/// Tokens of a prompt, number of answers to it, and tokens of each.
#[derive(Clone, Copy)]
struct RowSize {
    prompt: usize,
    answers: usize,
    tokens: usize,
}

impl RowSize {
    fn counts(self, share_prefix: bool) -> RowCounts {
        RowCounts::for_answers(self.prompt, &vec![self.tokens; self.answers], share_prefix)
    }

    /// Returns a size with as many tokens, and as many scored ones, as this and a given completion have at most. No
    /// sequence is longer than the longer of both.
    fn or_larger(self, given: RowCounts, share_prefix: bool) -> Self {
        let own = self.counts(share_prefix);
        if given.tokens <= own.tokens && given.scored_rows <= own.scored_rows {
            return self;
        }
        if given.tokens > own.tokens {
            let scored = own.scored_rows.max(given.scored_rows);
            return Self { prompt: given.tokens - scored, answers: 1, tokens: scored };
        }
        // Answers grow at the prompt's cost until enough of them is scored.
        let copies = if share_prefix { 1 } else { self.answers };
        let with_answers_of = |tokens: usize| {
            let prompt = own.tokens.saturating_sub(self.answers * tokens).div_ceil(copies).max(1);
            Self { prompt, tokens, ..self }
        };
        let mut grown = with_answers_of((self.tokens + 1).max(given.scored_rows.div_ceil(self.answers)));
        while grown.counts(share_prefix).scored_rows < given.scored_rows {
            grown = with_answers_of(grown.tokens + 1);
        }
        grown
    }

    /// Makes a prompt with answers of the same length, all in one chain of pairs.
    fn fill(self, algorithm: Algorithm) -> ScoredPrompt {
        let Self { prompt, answers, tokens } = self;
        let is_nash = matches!(algorithm, Algorithm::NashMd { .. });
        let policy = if algorithm.grpo().is_some() { answers } else { 0 };
        let pairs = if algorithm.divides_prompts() { 0 } else { answers as u32 };
        ScoredPrompt {
            policy: vec![SampledAnswer { sampled: vec![0.0; tokens], ..SampledAnswer::default() }; policy],
            row: 0,
            prompt: vec![0; prompt],
            answers: vec![vec![0; tokens]; answers],
            turns: Vec::new(),
            pairs: (1..pairs).map(|worse| [worse - 1, worse]).collect(),
            author: algorithm.distill().map(|_| Author::Policy),
            explored: Vec::new(),
            advantages: vec![0.0; if is_nash { answers } else { 0 }],
        }
    }
}

/// Rows of at most this many tokens: the first whole, the last with shortened completions. A first one is shortened only
/// where it may be divided.
fn cut_to(rows: &[ScoredPrompt], most: usize, share_prefix: bool) -> Vec<ScoredPrompt> {
    let mut left = most;
    let mut kept: Vec<ScoredPrompt> = Vec::new();
    for row in rows {
        let tokens = row.counts(share_prefix).tokens;
        if tokens <= left || kept.is_empty() && !row.is_divisible() {
            left = left.saturating_sub(tokens);
            kept.push(row.clone());
            continue;
        }
        let mut row = row.clone();
        if kept.is_empty() {
            // As many answers as there may be.
            shorten(&mut row, |_| 1);
            let fitting = row.answers_within(left, share_prefix);
            row = rows[0].clone().split_first(fitting);
        }
        let copies = if share_prefix { 1 } else { row.answers.len() };
        let Some(for_answers) = left.checked_sub(copies * row.prompt.len()) else { break };
        let (length, longer) = (for_answers / row.answers.len(), for_answers % row.answers.len());
        if length > 0 {
            shorten(&mut row, |answer| length + usize::from(answer < longer));
            kept.push(row);
        }
        break;
    }
    kept
}

/// A part of a prompt's answers of at most this many tokens: as many whole ones as fit, and a shortened one.
fn with_fewer_answers(prompt: &ScoredPrompt, most: usize, share_prefix: bool) -> ScoredPrompt {
    let whole = prompt.answers_within(most, share_prefix);
    let mut part = prompt.clone().split_first((whole + 1).min(prompt.answers.len()));
    let excess = part.counts(share_prefix).tokens.saturating_sub(most);
    let last = part.answers.last().map_or(0, Vec::len);
    match last > excess {
        true => shorten(&mut part, |answer| if answer == whole { last - excess } else { usize::MAX }),
        false => part = part.split_first(whole),
    }
    part
}

/// Shortens answers to the lengths that `length` gives.
fn shorten(row: &mut ScoredPrompt, length: impl Fn(usize) -> usize) {
    row.answers.iter_mut().enumerate().for_each(|(answer, tokens)| tokens.truncate(length(answer)));
    row.policy.iter_mut().enumerate().for_each(|(answer, policy)| policy.sampled.truncate(length(answer)));
}

fn build(batcher: &mut MicroBatcher, rows: &[ScoredPrompt]) -> Result<MicroBatch> {
    let numbers: Vec<u32> = (0..rows.len() as u32).collect();
    batcher.build(Rows::Ranked(rows), &numbers[..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_for_both_bounds_both_and_has_no_longer_sequence() {
        for (prompt, answers, tokens) in
            [(1, 1, 1), (5, 1, 3), (30, 2, 4), (30, 8, 4), (3, 3, 40), (60, 64, 1)]
        {
            let own = RowSize { prompt, answers, tokens };
            for (of_given, share_prefix) in (2..300)
                .flat_map(|given| (1..given).map(move |scored| (given, scored)))
                .zip([true, false].iter().cycle())
            {
                let given = RowCounts { tokens: of_given.0, scored_rows: of_given.1, ..RowCounts::default() };
                let both = own.or_larger(given, *share_prefix);
                let (counts, before) = (both.counts(*share_prefix), own.counts(*share_prefix));
                let what = format!(
                    "{prompt} + {answers} x {tokens}, given {of_given:?}, shared {share_prefix}: {counts:?}"
                );
                assert!(counts.tokens >= given.tokens.max(before.tokens), "{what}");
                assert!(counts.scored_rows >= given.scored_rows.max(before.scored_rows), "{what}");
                assert!(both.prompt + both.tokens <= given.tokens.max(prompt + tokens), "{what}");
            }
        }
    }
}
