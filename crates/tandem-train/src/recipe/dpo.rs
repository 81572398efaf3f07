//! Direct preference optimisation and its family of losses, on pairs of a data set.

use tandem_data::forest::{ForestBuilder, PairTokens, RowCounts};
use tandem_data::token_cache::TokenCache;

use super::{AssumedRow, DatasetRow, LossTerms, MicroBatch, Recipe, RowLayout, ScoredBatch, chain};
use crate::config::Config;
use crate::metrics::{MetricSums, Sides};
use crate::objective::{Loss, add_exploration, preference_loss};

pub(super) struct Dpo;

impl Recipe for Dpo {
    fn row<'a>(&self, cache: &'a TokenCache, row: usize) -> DatasetRow<'a> {
        DatasetRow::Pair(cache.pair(row))
    }

    fn add_row(
        &self,
        cache: &TokenCache,
        [_, row]: [usize; 2],
        layout: &RowLayout,
        forest: &mut ForestBuilder,
        micro: &mut MicroBatch,
    ) {
        let pair = cache.pair(row);
        let first = forest.num_sequences() as u32;
        micro.pairs.push([first, first + 1]);
        micro.answer_tokens.extend([pair.chosen.len(), pair.rejected.len()].map(|n| n as u32));
        if layout.scores_prompts {
            forest.push_pair_and_prompt(&pair);
        } else {
            forest.push_pair(&pair);
        }
    }

    fn counts(&self, cache: &TokenCache, [_, row]: [usize; 2], layout: &RowLayout) -> RowCounts {
        let counts = cache.counts(row, layout.share_prefix);
        let of_prompt = if layout.scores_prompts { self.row(cache, row).num_scored_of_prompt() } else { 0 };
        RowCounts { scored_rows: counts.scored_rows + of_prompt, ..counts }
    }

    fn loss(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, out: &mut Loss) -> u64 {
        pair_loss(batch, terms, out)
    }

    fn add_metrics(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, sums: &mut MetricSums) {
        sums.add_pairs(&batch.log_probs.pairs(), terms.objective, terms.beta);
        // Scored prompts have no side.
        let answers = 2 * batch.micro.pairs.len() as u32;
        let side = |sequence| (sequence < answers).then_some((sequence % 2) as usize);
        batch.add_tokens_of(&side, Sides::Pairs, sums);
    }

    fn add_assumed(&self, row: &AssumedRow, forest: &mut ForestBuilder) {
        let AssumedRow { prompt, chosen, rejected, .. } = row;
        forest.push_pair(&PairTokens { prompt, unseen: [0, 0], chosen, rejected });
    }

    fn label_assumed(&self, _: &Config, _num_rows: usize, num_sequences: usize, micro: &mut MicroBatch) {
        micro.pairs = chain(num_sequences);
    }
}

/// Computes the configured losses of pairs, and XPO's term where the reference responded; returns
/// the batch's pairs.
pub(super) fn pair_loss(batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, out: &mut Loss) -> u64 {
    let LossTerms { whole, objective, beta } = *terms;
    let ScoredBatch { micro, log_probs, .. } = batch;
    preference_loss(&log_probs.pairs(), whole, objective, beta, out);
    out.spread(&micro.pairs, &micro.prompts, micro.forest.num_sequences as usize);
    add_exploration(&log_probs.policy, &micro.explored, objective.exploration, out);
    whole.totals.pairs
}
