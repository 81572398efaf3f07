//! Distillation: next-token distributions of a teacher over given completions.

use tandem_data::forest::ForestBuilder;
use tandem_data::token_cache::TokenCache;
use tandem_model::{ModelFolder, Result as ModelResult};

use super::sft::Sft;
use super::{AssumedRow, DatasetRow, LossTerms, MicroBatch, Recipe, RowLayout, ScoredBatch};
use crate::config::Config;
use crate::metrics::{MetricSums, Sides};
use crate::objective::{DistillStats, Loss, distill_loss};

/// Rows and forests are those of supervised fine-tuning.
pub(super) struct Distill;

impl ScoredBatch<'_> {
    /// Index of each prediction among the scored rows.
    fn rows_of_predictions(&self) -> Vec<u32> {
        self.micro.forest.scored_rows().1
    }
}

impl Recipe for Distill {
    fn row<'a>(&self, cache: &'a TokenCache, row: usize) -> DatasetRow<'a> {
        Sft.row(cache, row)
    }

    /// Opens the policy at the temperature at which it is compared.
    fn open_folder(&self, config: &Config) -> ModelResult<ModelFolder> {
        at_temperature(config, ModelFolder::open(&config.model)?)
    }

    fn add_row(
        &self,
        cache: &TokenCache,
        rows: [usize; 2],
        layout: &RowLayout,
        forest: &mut ForestBuilder,
        micro: &mut MicroBatch,
    ) {
        Sft.add_row(cache, rows, layout, forest, micro);
    }

    fn loss(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, out: &mut Loss) -> u64 {
        let beta = terms.objective.distill.expect("a run with a [distill] table");
        let rows = batch.rows_of_predictions();
        let divergences = rows.iter().map(|&row| batch.divergences[row as usize].jsd(beta));
        distill_loss(divergences, batch.micro.scored_tokens.len(), out);
        terms.whole.totals.chosen_tokens
    }

    fn add_metrics(&self, batch: &ScoredBatch<'_>, _terms: &LossTerms<'_>, sums: &mut MetricSums) {
        batch.add_tokens(Sides::Single, sums);
        let mut stats = DistillStats::default();
        for row in batch.rows_of_predictions().into_iter().map(|row| row as usize) {
            stats.tokens += 1.0;
            stats.forward_kl += batch.divergences[row].forward_kl;
            stats.reverse_kl += batch.divergences[row].reverse_kl;
            stats.teacher_entropy += f64::from(batch.reference_scores.entropy[row]);
        }
        sums.add_distill(&stats);
    }

    fn has_pairs(&self) -> bool {
        false
    }

    fn num_responses(&self, config: &Config) -> usize {
        Sft.num_responses(config)
    }

    fn add_assumed(&self, row: &AssumedRow, forest: &mut ForestBuilder) {
        Sft.add_assumed(row, forest);
    }

    fn label_assumed(&self, _: &Config, _num_rows: usize, _num_sequences: usize, _: &mut MicroBatch) {}
}

/// Opens a teacher as the policy is opened.
pub(crate) fn open_teacher(config: &Config) -> ModelResult<ModelFolder> {
    at_temperature(config, ModelFolder::open(config.reference.model.as_ref().unwrap_or(&config.model))?)
}

fn at_temperature(config: &Config, folder: ModelFolder) -> ModelResult<ModelFolder> {
    folder.with_temperature(config.distill.map_or(1.0, |distill| distill.temperature as f32))
}
