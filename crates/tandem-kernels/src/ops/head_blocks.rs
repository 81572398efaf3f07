//! Blocks of the head's vocabulary: a part of the statistics for each, and the tree in which they add
//! up the gradient of the hidden rows.
//!
//! Every block is a head of its own over some rows of the weights, so its strips do not depend on the
//! blocks that a rank holds.

use std::borrow::Cow;
use std::ops::Range;

use crate::ops::{ELSEWHERE, Head, HeadGradients, HeadParts, HeadWeights, LogitMemory, LowRank, Targets};
use crate::{KernelError, Result, View, ViewMut};

/// Blocks of a head: token ranges that follow one another.
pub(super) struct Blocks<'a>(Cow<'a, [Range<usize>]>);

/// Memory for the partial sums of [`Blocks::backward`], one above another: a chunk's rows for each level
/// of the tree.
pub(super) struct PartialSums<'a> {
    /// Partial sums of the gradient of the hidden rows.
    pub hidden: ViewMut<'a>,
    /// Partial sums of the gradient of [`LowRank::h`].
    pub h: ViewMut<'a>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(head: &Head<'a>) -> Self {
        Self::from_ranges(head.blocks, head.weights.weight.rows())
    }

    /// Makes these blocks, or one if there are none.
    pub(super) fn from_ranges(blocks: &'a [Range<usize>], vocabulary: usize) -> Self {
        if blocks.is_empty() {
            let all = 0..vocabulary;
            return Self(Cow::Owned(vec![all]));
        }
        Self(Cow::Borrowed(blocks))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn longest(&self) -> usize {
        self.0.iter().map(Range::len).max().unwrap_or(0)
    }

    /// Returns the most partial sums beside the result that exist at a time.
    pub(super) fn levels(&self) -> usize {
        self.0.len().ilog2() as usize
    }

    /// Rejects blocks that do not divide the vocabulary.
    pub(super) fn check(&self, op: &'static str, vocabulary: usize) -> Result<()> {
        let are_adjacent = self.0.windows(2).all(|pair| pair[0].end == pair[1].start);
        let (first, last) = (self.0[0].start, self.0[self.0.len() - 1].end);
        if self.len().is_power_of_two() && are_adjacent && (first, last) == (0, vocabulary) {
            return Ok(());
        }
        let blocks = &self.0;
        Err(KernelError::invalid(op, format!("blocks {blocks:?} of a vocabulary of {vocabulary}")))
    }

    /// Calls `score` for the head of each block, in chunks of so many rows.
    pub(super) fn forward(
        &self,
        call: Head,
        chunk: usize,
        parts: &mut HeadParts,
        (kept, spare): (&mut ViewMut, &mut ViewMut),
        mut score: impl FnMut(Head, &mut HeadParts, LogitMemory) -> Result<()>,
    ) -> Result<()> {
        for (block, tokens) in self.0.iter().enumerate() {
            parts.work_on(block);
            let targets = own_targets(call.targets.targets, tokens);
            let kept = kept.reborrow().col_range(tokens.clone());
            let memory = LogitMemory { chunk, kept, spare: spare.reborrow() };
            score(of_block(&call, tokens, Targets { targets: &targets, ..call.targets }), parts, memory)?;
        }
        Ok(())
    }

    /// Calls `score` for the logits of each block.
    pub(super) fn score(
        &self,
        mut logits: ViewMut,
        targets: Targets,
        parts: &mut HeadParts,
        mut score: impl FnMut(ViewMut, Targets, &mut HeadParts) -> Result<()>,
    ) -> Result<()> {
        for (block, tokens) in self.0.iter().enumerate() {
            parts.work_on(block);
            let own = own_targets(targets.targets, tokens);
            let logits = logits.reborrow().col_range(tokens.clone());
            score(logits, Targets { targets: &own, ..targets }, parts)?;
        }
        Ok(())
    }

    /// Calls `differentiate` for each chunk of rows and block with the derivatives of its predictions,
    /// and `add` to add the first partial sum to the second.
    pub(super) fn backward(
        &self,
        call: Head,
        chunk: usize,
        (log_sum_exp, d_log_prob): (&[f32], &[f32]),
        mut gradients: HeadGradients,
        (mut kept, mut spare): (ViewMut, ViewMut),
        mut sums: PartialSums,
        mut differentiate: impl FnMut(Head, &[f32], &[f32], HeadGradients, LogitMemory) -> Result<()>,
        mut add: impl FnMut(View, ViewMut) -> Result<()>,
    ) -> Result<()> {
        let num_rows = call.hidden.rows();
        let height = chunk.min(num_rows);
        for start in (0..num_rows).step_by(chunk) {
            let rows = start..num_rows.min(start + chunk);
            let predictions = call.targets.of_rows(rows.clone());
            let own_rows: Vec<u32> =
                call.targets.rows[predictions.clone()].iter().map(|row| row - start as u32).collect();
            let is_kept = rows.end <= kept.rows();
            let kept_rows = if is_kept { rows.clone() } else { 0..0 };
            for (block, tokens) in self.0.iter().enumerate() {
                let targets = own_targets(&call.targets.targets[predictions.clone()], tokens);
                let targets = Targets { rows: &own_rows, targets: &targets };
                let of_rows = rows_of_chunk(&of_block(&call, tokens, targets), &rows);
                let position = block.count_ones() as usize;
                let of_chunk = HeadGradients {
                    hidden: at(position, &mut gradients.hidden, &mut sums.hidden, height, &rows),
                    weight: gradients.weight.as_mut().map(|dw| dw.reborrow().row_range(tokens.clone())),
                    adds_to_weight: gradients.adds_to_weight || start > 0,
                    bias: gradients.bias.as_mut().map(|db| db.reborrow().col_range(tokens.clone())),
                    h: gradients.h.as_mut().map(|dh| at(position, dh, &mut sums.h, height, &rows)),
                    b: gradients.b.as_mut().map(|db| db.reborrow().row_range(tokens.clone())),
                };
                let kept = kept.reborrow().row_range(kept_rows.clone()).col_range(tokens.clone());
                let memory = LogitMemory { chunk, kept, spare: spare.reborrow() };
                let d = &d_log_prob[predictions.clone()];
                differentiate(of_rows, &log_sum_exp[rows.clone()], d, of_chunk, memory)?;
                for below in (position - block.trailing_ones() as usize..position).rev() {
                    merge(below, &mut gradients.hidden, &mut sums.hidden, height, &rows, &mut add)?;
                    if let Some(dh) = &mut gradients.h {
                        merge(below, dh, &mut sums.h, height, &rows, &mut add)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Returns targets as rows of a block.
fn own_targets(targets: &[u32], tokens: &Range<usize>) -> Vec<u32> {
    let own = |&target: &u32| {
        if tokens.contains(&(target as usize)) { target - tokens.start as u32 } else { ELSEWHERE }
    };
    targets.iter().map(own).collect()
}

/// Returns the head of a block.
fn of_block<'a>(call: &Head<'a>, tokens: &Range<usize>, targets: Targets<'a>) -> Head<'a> {
    let HeadWeights { weight, bias, low_rank } = call.weights;
    let weights = HeadWeights {
        weight: weight.row_range(tokens.clone()),
        bias: bias.map(|bias| bias.col_range(tokens.clone())),
        low_rank: low_rank.map(|LowRank { h, b }| LowRank { h, b: b.row_range(tokens.clone()) }),
    };
    Head { weights, targets, blocks: &[], ..*call }
}

/// Returns the head over some rows; its targets count from the first of them.
fn rows_of_chunk<'a>(call: &Head<'a>, rows: &Range<usize>) -> Head<'a> {
    let low_rank = call.weights.low_rank.map(|LowRank { h, b }| LowRank { h: h.row_range(rows.clone()), b });
    let weights = HeadWeights { low_rank, ..call.weights };
    Head { hidden: call.hidden.row_range(rows.clone()), weights, ..*call }
}

/// Returns the sums of a chunk's rows at a position: the lowest is the result.
fn at<'m>(
    position: usize,
    result: &'m mut ViewMut,
    sums: &'m mut ViewMut,
    height: usize,
    rows: &Range<usize>,
) -> ViewMut<'m> {
    match position {
        0 => result.reborrow().row_range(rows.clone()),
        _ => sums.reborrow().row_range((position - 1) * height..(position - 1) * height + rows.len()),
    }
}

/// Adds the sums above position `below` to those there.
fn merge(
    below: usize,
    result: &mut ViewMut,
    sums: &mut ViewMut,
    height: usize,
    rows: &Range<usize>,
    add: &mut impl FnMut(View, ViewMut) -> Result<()>,
) -> Result<()> {
    let [mut lower, upper] = sums.reborrow().split_rows(below * height);
    let upper = upper.row_range(0..rows.len());
    add(upper.view(), at(below, result, &mut lower, height, rows))
}
