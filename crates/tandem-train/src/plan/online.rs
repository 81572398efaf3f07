//! Largest batches of an online run: its prompts are known, its completions bounded.

use tandem_data::forest::RowCounts;
use tandem_data::order;
use tandem_data::record::RowKind;
use tandem_kernels::ops::MANY_TREES;
use tandem_model::BatchCapacity;

use super::survey::{BatchStatistics, PassShape, evaluation_shape};
use crate::Result;
use crate::config::{Algorithm, Config, MicroBatchSize, Order};
use crate::inputs::RunInputs;
use crate::recipe::{self, Author, MicroBatch, MicroBatcher, Rows, SampledAnswer, ScoredPrompt};

/// Upper bounds of a micro-batch, whatever is generated: the longest prompts with the largest
/// number of paired completions of the greatest length. Bounds are built with as few trees as
/// possible, and with more.
pub(super) fn survey(config: &Config, prepared: &RunInputs) -> Result<BatchStatistics> {
    let online = config.online.as_ref().expect("an online run");
    let cache = &prepared.train;
    let answers = recipe::for_method(config.method).num_responses(config);
    // A conversation with an environment fills what its prompt leaves.
    let longest_answer = |prompt: usize| match online.environment {
        Some(_) => config.data.max_length.saturating_sub(prompt),
        None => online.max_new_tokens,
    };
    let share_prefix = config.data.share_prefix;
    let size_of = |row: usize| {
        let prompt = cache.prompt_tokens(row).len();
        let own = RowSize { prompt, answers, tokens: longest_answer(prompt) };
        match cache.kind() {
            // A distillation may train on the given completion instead.
            RowKind::Supervised => own.or_larger(cache.scored(row).counts(), share_prefix),
            _ => own,
        }
    };
    let largest_of = |row: usize| size_of(row).fill(online.algorithm);
    let mut by_size: Vec<usize> = (0..cache.num_rows()).collect();
    by_size.sort_by_cached_key(|&row| std::cmp::Reverse(size_of(row).counts(share_prefix).tokens));
    let in_step = config.train.batch_size + online.replay_per_step;
    // The longest prompts, repeated if there are fewer than a step needs.
    let longest: Vec<ScoredPrompt> =
        by_size.iter().cycle().take(in_step).map(|&row| largest_of(row)).collect();
    let tokens =
        |rows: &[ScoredPrompt]| rows.iter().map(|row| row.counts(share_prefix).tokens).sum::<usize>();
    // A distillation may train on completions of the data set, which nothing divides.
    let given_counts = |row: usize| match cache.kind() {
        RowKind::Supervised => cache.scored(row).counts(),
        _ => RowCounts::default(),
    };
    let undivided = |row: usize| {
        let prompt = cache.prompt_tokens(row).len();
        given_counts(row).tokens.max(prompt + longest_answer(prompt))
    };
    let whole = match longest[0].is_divisible() {
        true => (0..cache.num_rows()).map(undivided).fold(0, usize::max),
        false => tokens(&longest[..1]),
    };
    let most = match config.train.micro_batch {
        MicroBatchSize::Tokens(most) => tokens(&longest).min(most).max(whole),
        MicroBatchSize::Rows(rows) => tokens(&longest[..rows.min(in_step)]),
    };
    let mut batcher = prepared.batcher(config);
    let mut largest = Vec::new();
    for trees in (1..=in_step.min(MANY_TREES)).rev() {
        if let MicroBatchSize::Rows(rows) = config.train.micro_batch
            && trees > rows
        {
            continue;
        }
        let rows = if trees == MANY_TREES { &longest[..] } else { &longest[..trees] };
        largest.push(build(&mut batcher, &cut_to(rows, most, share_prefix))?);
    }
    let shortest: Vec<ScoredPrompt> =
        by_size.iter().rev().take(in_step).map(|&row| largest_of(row)).collect();
    largest.push(build(&mut batcher, &cut_to(&shortest, most, share_prefix))?);
    for rows in [&longest, &shortest] {
        if rows[0].is_divisible() && tokens(&rows[..1]) > most {
            largest.push(build(&mut batcher, &[with_fewer_answers(&rows[0], most, share_prefix)])?);
        }
    }
    let mixes_given = cache.kind() == RowKind::Supervised;
    if mixes_given {
        // Of all tokens of a given completion but the prompt's each may be scored.
        let unscored = |row: &usize| given_counts(*row).tokens - given_counts(*row).scored_rows;
        let mut rows: Vec<usize> = (0..cache.num_rows()).collect();
        rows.sort_by_cached_key(unscored);
        let given = rows.iter().take(in_step).map(|&row| ScoredPrompt::given(cache, row as u32));
        largest.push(build(&mut batcher, &cut_to(&given.collect::<Vec<_>>(), most, share_prefix))?);
    }
    let scored = largest.iter().map(|batch| batch.forest.scored_rows().0.len()).max().unwrap_or(0);
    // A part of a prompt's answers may be beside given completions.
    let scored = if mixes_given { scored.max(most - 1) } else { scored };
    let train = PassShape { room: BatchCapacity { tokens: most, scored }, largest };
    let mut batches = prepared.batches(config);
    let rows = |batcher: &MicroBatcher, rows: &[u32]| {
        batcher.divide(rows.iter().map(|&row| largest_of(row as usize)).collect())
    };
    let cuts = |rows: &[ScoredPrompt]| {
        let lengths: Vec<usize> = rows.iter().map(|row| row.counts(share_prefix).tokens).collect();
        order::cut(&lengths, config.train.micro_batch.into())
    };
    // A batch of smaller rows may have one that is divided.
    let may_divide = longest[0].is_divisible() || mixes_given;
    let exceeds =
        matches!(config.train.micro_batch, MicroBatchSize::Tokens(limit) if tokens(&longest) > limit);
    let single_micro_batches = cuts(&longest).len() <= 1 && !(may_divide && exceeds);
    // Time is estimated for completions of the greatest length.
    let measured = match config.data.order {
        Order::Shuffled | Order::Sequential => batches.steps_per_epoch().min(super::survey::LOOK_AHEAD),
    };
    let (mut steps, mut sequence_tokens, mut num_rows) = (Vec::new(), 0, 0);
    for step in 0..measured {
        let of_step = batches.rows(step);
        let ranked = rows(&batcher, of_step);
        sequence_tokens += ranked.iter().map(|row| row.counts(share_prefix).sequence_tokens).sum::<u64>();
        num_rows += of_step.len();
        steps.push(cuts(&ranked).into_iter().map(|cut| tokens(&ranked[cut])).collect());
    }
    let first = rows(&batcher, batches.rows(0));
    let typical = build(&mut batcher, &first[cuts(&first)[0].clone()])?;
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
        single_micro_batches,
        measured: measured as usize,
        sequence_tokens: per_step(sequence_tokens as f64),
        rows: per_step(num_rows as f64),
    })
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
