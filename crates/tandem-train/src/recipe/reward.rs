//! Reward models, from preferences.

use std::path::Path;

use tandem_data::forest::ForestBuilder;
use tandem_data::token_cache::TokenCache;
use tandem_data::tokenizer::Tokenizer;
use tandem_model::{ModelFolder, Result as ModelResult};

use super::{AssumedRow, DatasetRow, LossTerms, MicroBatch, Recipe, RowLayout, ScoredBatch};
use crate::config::Config;
use crate::metrics::MetricSums;
use crate::objective::{Loss, reward_loss};

pub(super) struct Reward;

impl Recipe for Reward {
    fn row<'a>(&self, cache: &'a TokenCache, row: usize) -> DatasetRow<'a> {
        DatasetRow::Pair(cache.pair(row))
    }

    fn open_folder(&self, config: &Config, path: &Path) -> ModelResult<ModelFolder> {
        ModelFolder::open_reward(path, config.seed)
    }

    /// Sets the pad token as TRL does: the tokenizer's, else its end token. Nothing is padded here,
    /// but a text ends before such tokens, also for whoever reads the model later.
    fn with_tokenizer(&self, folder: ModelFolder, tokenizer: &Tokenizer) -> ModelFolder {
        match tokenizer.pad_or_eos_id() {
            Some(pad) => folder.with_pad(pad),
            None => folder,
        }
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
        micro.margins.push(cache.margin(row));
        forest.push_ends(pair.prompt, &[pair.chosen, pair.rejected], layout.pad);
    }

    fn loss(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, out: &mut Loss) -> u64 {
        let centring = terms.objective.center_rewards_coefficient;
        reward_loss(&batch.log_probs.policy, &batch.micro.margins, centring, out);
        terms.whole.totals.pairs
    }

    fn add_metrics(&self, batch: &ScoredBatch<'_>, _terms: &LossTerms<'_>, sums: &mut MetricSums) {
        sums.add_rewards(&batch.log_probs.policy);
    }

    fn add_assumed(&self, row: &AssumedRow, forest: &mut ForestBuilder) {
        forest.push_ends(&row.prompt, &[&row.chosen, &row.rejected], None);
    }

    fn label_assumed(&self, _: &Config, num_rows: usize, _num_sequences: usize, micro: &mut MicroBatch) {
        micro.margins = vec![0.0; num_rows];
    }
}
