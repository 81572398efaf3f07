//! Distillation: next-token distributions of a teacher over given completions, or over the policy's own.

use std::path::Path;

use tandem_data::forest::{ForestBuilder, ScoredTokens};
use tandem_data::record::RowKind;
use tandem_data::token_cache::TokenCache;
use tandem_model::{ModelFolder, Result as ModelResult};

use super::online::{Author, ScoredPrompt};
use super::sft::Sft;
use super::{AssumedRow, DatasetRow, LossTerms, MicroBatch, Recipe, RowLayout, ScoredBatch};
use crate::config::Config;
use crate::metrics::{MetricSums, Sides};
use crate::objective::{Average, DistillStats, Loss, distill_loss};
use crate::{Result, TrainError};

/// Rows and forests of given completions are those of supervised fine-tuning.
pub(super) struct Distill;

impl ScoredPrompt {
    /// A row of given completions among prompts that the policy answers.
    pub(crate) fn given(rows: &TokenCache, row: u32) -> Self {
        let ScoredTokens { tokens, scored } = rows.scored(row as usize);
        // The first token has nothing to be predicted from.
        let start = scored.iter().position(|&mark| mark != 0).unwrap_or(tokens.len()).max(1);
        let mut turns: Vec<[u32; 2]> = Vec::new();
        for token in (0..).zip(&scored[start..]).filter(|(_, mark)| **mark != 0).map(|(token, _)| token) {
            match turns.last_mut() {
                Some([_, end]) if *end == token => *end += 1,
                _ => turns.push([token, token + 1]),
            }
        }
        Self {
            row,
            prompt: tokens[..start].to_vec(),
            answers: vec![tokens[start..].to_vec()],
            turns: vec![turns],
            author: Some(Author::Data),
            ..Self::default()
        }
    }
}

impl ScoredBatch<'_> {
    /// Index of each prediction among the scored rows.
    fn rows_of_predictions(&self) -> Vec<u32> {
        self.micro.forest.scored_rows().1
    }
}

impl Recipe for Distill {
    fn row<'a>(&self, cache: &'a TokenCache, row: usize) -> DatasetRow<'a> {
        match cache.kind() {
            RowKind::Prompt => DatasetRow::Prompt(cache.prompt(row).0),
            _ => Sft.row(cache, row),
        }
    }

    /// Asks every row for a prompt that leaves room for an answer, where the policy may give one.
    fn check_rows(&self, config: &Config, rows: &TokenCache) -> Result<()> {
        let Some(online) = config.online.as_ref().filter(|_| rows.kind() != RowKind::Prompt) else {
            return Ok(());
        };
        let room = config.data.max_length - online.max_new_tokens;
        let length = |row: usize| rows.prompt_tokens(row).len();
        let Some(row) = (0..rows.num_rows()).find(|&row| !(1..=room).contains(&length(row))) else {
            return Ok(());
        };
        let (place, lmbda) = (rows.origin(row), config.distill.map_or(0.0, |distill| distill.lmbda));
        let found = match length(row) {
            0 => "no prompt: all of it is learned".to_owned(),
            length => format!(
                "a prompt of {length} tokens, which leaves no room for online.max_new_tokens = {} within \
                 data.max_length = {}",
                online.max_new_tokens, config.data.max_length
            ),
        };
        Err(TrainError::Mismatch {
            reason: format!(
                "{place}: with distill.lmbda = {lmbda} the policy may answer this row itself, and it has {found}; set \
                 distill.lmbda = 0, or leave such rows out (data.max_prompt_length)"
            ),
        })
    }

    /// Opens a model at the temperature at which policy and teacher are compared.
    fn open_folder(&self, config: &Config, path: &Path) -> ModelResult<ModelFolder> {
        let temperature = config.distill.map_or(1.0, |distill| distill.temperature as f32);
        ModelFolder::open(path)?.with_temperature(temperature)
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
        let options = terms.objective.distill.expect("a run with a [distill] table");
        let (rows, predictions) = (batch.rows_of_predictions(), &batch.micro.forest.predictions);
        let divergences = rows.iter().zip(predictions).map(|(&row, prediction)| {
            (prediction.sequence, batch.divergences[row as usize].jsd(options.beta))
        });
        distill_loss(divergences, &batch.micro.scored_tokens, options.average, out);
        match options.average {
            Average::Token => terms.whole.totals.chosen_tokens,
            Average::Sequence => terms.whole.totals.pairs,
        }
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
        config.online.as_ref().map_or(1, |online| online.num_answers)
    }

    fn add_assumed(&self, row: &AssumedRow, forest: &mut ForestBuilder) {
        match row.num_responses {
            1 => Sft.add_assumed(row, forest),
            responses => forest.push_answers(&row.prompt, &vec![&row.chosen[..]; responses], 0),
        }
    }

    fn label_assumed(&self, _: &Config, _num_rows: usize, _num_sequences: usize, _: &mut MicroBatch) {}
}

/// Opens a teacher as the policy is opened.
pub(crate) fn open_teacher(config: &Config) -> ModelResult<ModelFolder> {
    Distill.open_folder(config, config.reference.model.as_ref().unwrap_or(&config.model))
}
