//! Which micro-batches of a pass take most memory: found from counts of their rows, without
//! building them.

use tandem_data::forest::RowCounts;
use tandem_data::token_cache::TokenCache;
use tandem_kernels::ops::MANY_TREES;
use tandem_model::BatchCapacity;

use super::survey::PassShape;
use crate::Result;
use crate::recipe::{BatchPart, MicroBatcher};

/// A micro-batch: counts, data set, and the row before its rows with them.
type Found<'a> = Option<(RowCounts, &'a TokenCache, (u32, Vec<u32>))>;

/// The largest micro-batches so far.
#[derive(Default)]
pub(super) struct Largest<'a> {
    room: BatchCapacity,
    /// By number of trees, up to [`MANY_TREES`]: with fewer trees attention's backward splits each
    /// and allocates per part.
    of_trees: [Found<'a>; MANY_TREES + 1],
    scored: Found<'a>,
    unscored: Found<'a>,
}

impl<'a> Largest<'a> {
    pub(super) fn consider(&mut self, counts: RowCounts, cache: &'a TokenCache, part: BatchPart<'_>) {
        let BatchCapacity { tokens, scored } = self.room;
        self.room =
            BatchCapacity { tokens: tokens.max(counts.tokens), scored: scored.max(counts.scored_rows) };
        let keep = |best: &mut Found<'a>, size: fn(&RowCounts) -> usize| {
            if best.as_ref().is_none_or(|(other, ..)| size(&counts) > size(other)) {
                *best = Some((counts, cache, (part.before, part.rows.to_vec())));
            }
        };
        keep(&mut self.of_trees[counts.trees.min(MANY_TREES)], |counts| counts.tokens);
        match counts.scored_rows {
            0 => keep(&mut self.unscored, |counts| counts.tokens),
            _ => keep(&mut self.scored, |counts| counts.scored_rows),
        }
    }

    /// Adds the micro-batches of all rows of a data set in order.
    pub(super) fn consider_all(
        &mut self,
        batcher: &MicroBatcher,
        cache: &'a TokenCache,
        counts: &[RowCounts],
    ) {
        let rows: Vec<u32> = (0..counts.len() as u32).collect();
        self.consider_rows(batcher, cache, &rows, counts);
    }

    /// Adds the micro-batches of some rows of a data set, and returns their counts; `counts` are those of each row
    /// alone.
    pub(super) fn consider_rows(
        &mut self,
        batcher: &MicroBatcher,
        cache: &'a TokenCache,
        rows: &[u32],
        counts: &[RowCounts],
    ) -> Vec<RowCounts> {
        let mixed = batcher.mixes_rows().then(|| batcher.counts(cache, rows.into()));
        let cuts = batcher.cut(cache, rows).into_iter().map(|cut| {
            let sum = match &mixed {
                Some(mixed) => mixed[cut.clone()].iter().copied().sum(),
                None => rows[cut.clone()].iter().map(|&row| counts[row as usize]).sum(),
            };
            self.consider(sum, cache, BatchPart::new(rows, cut));
            sum
        });
        cuts.collect()
    }

    pub(super) fn build(self, batcher: &mut MicroBatcher) -> Result<PassShape> {
        let Self { room, of_trees, scored, unscored } = self;
        let mut most = 0;
        // One with more tokens and fewer trees takes more than this.
        let front = of_trees.into_iter().flatten().filter(|(counts, ..)| {
            let is_larger = counts.tokens > most;
            most = most.max(counts.tokens);
            is_larger
        });
        let mut all: Vec<_> = front.collect();
        all.reverse();
        all.extend(scored.into_iter().chain(unscored));
        let build = |(_, cache, (before, rows)): (RowCounts, &'a TokenCache, (u32, Vec<u32>))| {
            batcher.build(cache, BatchPart { rows: &rows, before })
        };
        Ok(PassShape { room, largest: all.into_iter().map(build).collect::<Result<_>>()? })
    }
}
