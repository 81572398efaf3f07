//! KTO and its family: completions that are desirable or not, each alone.
//!
//! A row is one completion. Where a loss estimates the divergence to the reference, the row's prompt also
//! gets the completion of the batch's row before it (of the last row, for the first): a mismatched
//! completion, whose log ratio the estimate is made of. It is the second sequence of the row's pair.

use tandem_data::forest::{ForestBuilder, PairTokens, RowCounts, UnpairedTokens};
use tandem_data::token_cache::TokenCache;

use super::dpo::pair_loss;
use super::{AssumedRow, DatasetRow, LossTerms, MicroBatch, Recipe, RowLayout, ScoredBatch};
use crate::config::Config;
use crate::metrics::MetricSums;
use crate::objective::Loss;

pub(super) struct Unpaired;

impl Recipe for Unpaired {
    fn row<'a>(&self, cache: &'a TokenCache, row: usize) -> DatasetRow<'a> {
        DatasetRow::Unpaired(cache.unpaired(row))
    }

    fn mixes_rows(&self) -> bool {
        true
    }

    fn counts(&self, cache: &TokenCache, [before, row]: [usize; 2], layout: &RowLayout) -> RowCounts {
        let own = cache.unpaired(row);
        let mismatched = layout.has_mismatched.then(|| mismatched(cache, before, &own, layout));
        let Some(mismatched) = mismatched else { return cache.counts(row, layout.share_prefix) };
        let pair = with_mismatched(&own, mismatched);
        let answers = [own.completion.len(), mismatched.len()];
        let counts = RowCounts::for_pair([own.prompt.len(); 2], answers, pair.shared(), layout.share_prefix);
        RowCounts { sequence_tokens: (own.prompt.len() + own.completion.len()) as u64, ..counts }
    }

    fn add_row(
        &self,
        cache: &TokenCache,
        [before, row]: [usize; 2],
        layout: &RowLayout,
        forest: &mut ForestBuilder,
        micro: &mut MicroBatch,
    ) {
        let own = cache.unpaired(row);
        let first = forest.num_sequences() as u32;
        micro.labels.push(own.label);
        micro.answer_tokens.push(own.completion.len() as u32);
        if layout.has_mismatched {
            let mismatched = mismatched(cache, before, &own, layout);
            micro.answer_tokens.push(mismatched.len() as u32);
            micro.pairs.push([first, first + 1]);
            forest.push_pair(&with_mismatched(&own, mismatched));
        } else {
            micro.pairs.push([first, first]);
            forest.push_answers(own.prompt, &[own.completion], 0);
        }
    }

    fn loss(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, out: &mut Loss) -> u64 {
        pair_loss(batch, terms, out)
    }

    fn add_metrics(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, sums: &mut MetricSums) {
        sums.add_unpaired(&batch.log_probs.pairs(), terms.whole, terms.objective, terms.beta);
        let mut sides = vec![None; batch.micro.forest.num_sequences as usize];
        for (pair, &label) in batch.micro.pairs.iter().zip(&batch.micro.labels) {
            sides[pair[0] as usize] = Some(usize::from(!label));
        }
        batch.add_tokens_of(&|sequence| sides[sequence as usize], crate::metrics::Sides::Unpaired, sums);
    }

    fn has_pairs(&self) -> bool {
        false
    }

    fn num_responses(&self, config: &Config) -> usize {
        if config.objective.needs_mismatched() { 2 } else { 1 }
    }

    fn add_assumed(&self, row: &AssumedRow, forest: &mut ForestBuilder) {
        let AssumedRow { prompt, chosen, rejected, num_responses } = row;
        match num_responses {
            1 => forest.push_answers(prompt, &[chosen], 0),
            _ => forest.push_pair(&PairTokens { prompt, unseen: [0, 0], chosen, rejected }),
        }
    }

    fn label_assumed(&self, config: &Config, num_rows: usize, _: usize, micro: &mut MicroBatch) {
        let each = self.num_responses(config) as u32;
        micro.pairs = (0..num_rows as u32).map(|row| [each * row, each * row + each - 1]).collect();
        micro.labels = vec![true; num_rows];
    }
}

/// The completion of the row before, cut where the text with this row's prompt becomes too long.
fn mismatched<'a>(
    cache: &'a TokenCache,
    before: usize,
    own: &UnpairedTokens<'_>,
    layout: &RowLayout,
) -> &'a [u32] {
    let completion = cache.unpaired(before).completion;
    &completion[..completion.len().min(layout.max_length.saturating_sub(own.prompt.len()))]
}

fn with_mismatched<'a>(own: &UnpairedTokens<'a>, mismatched: &'a [u32]) -> PairTokens<'a> {
    PairTokens { prompt: own.prompt, unseen: [0, 0], chosen: own.completion, rejected: mismatched }
}
