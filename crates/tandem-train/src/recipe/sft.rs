//! Supervised fine-tuning: the likelihood of responses.

use tandem_data::forest::{ForestBuilder, ScoredTokens};
use tandem_data::token_cache::TokenCache;

use super::{AssumedRow, DatasetRow, LossTerms, MicroBatch, Recipe, RowLayout, ScoredBatch};
use crate::config::Config;
use crate::metrics::{MetricSums, Sides};
use crate::objective::{Loss, likelihood_loss};

pub(super) struct Sft;

impl Recipe for Sft {
    fn row<'a>(&self, cache: &'a TokenCache, row: usize) -> DatasetRow<'a> {
        DatasetRow::Scored(cache.scored(row))
    }

    fn add_row(
        &self,
        cache: &TokenCache,
        [_, row]: [usize; 2],
        _layout: &RowLayout,
        forest: &mut ForestBuilder,
        _micro: &mut MicroBatch,
    ) {
        forest.push_scored(&cache.scored(row));
    }

    fn loss(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, out: &mut Loss) -> u64 {
        likelihood_loss(&batch.log_probs.policy, &batch.micro.scored_tokens, out);
        terms.whole.totals.chosen_tokens
    }

    fn add_metrics(&self, batch: &ScoredBatch<'_>, _terms: &LossTerms<'_>, sums: &mut MetricSums) {
        batch.add_tokens(Sides::Single, sums);
    }

    fn has_pairs(&self) -> bool {
        false
    }

    fn num_responses(&self, _config: &Config) -> usize {
        1
    }

    fn add_assumed(&self, row: &AssumedRow, forest: &mut ForestBuilder) {
        let tokens = [&row.prompt[..], &row.chosen].concat();
        let scored: Vec<u8> = (0..tokens.len()).map(|t| u8::from(t >= row.prompt.len())).collect();
        forest.push_scored(&ScoredTokens { tokens: &tokens, scored: &scored });
    }

    fn label_assumed(&self, _: &Config, _num_rows: usize, _num_sequences: usize, _: &mut MicroBatch) {}
}
