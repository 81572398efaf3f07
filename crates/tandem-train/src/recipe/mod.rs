//! Recipes: supervised fine-tuning, DPO, reward models, distillation and Online DPO.
//!
//! A recipe says which rows it reads, how a row joins a micro-batch's forest, what is minimised and
//! what is reported. The step (`crate::step`) has one order of passes for all of them. A new
//! recipe is a file here and a line in [`for_method`].

mod distill;
mod dpo;
mod grpo;
mod log_probs;
mod micro_batch;
mod online;
mod reward;
mod sft;
mod unpaired;

use std::path::Path;

use tandem_data::forest::{ForestBuilder, PairTokens, RowCounts, ScoredTokens, UnpairedTokens};
use tandem_data::token_cache::TokenCache;
use tandem_data::tokenizer::Tokenizer;
use tandem_kernels::ops::{HeadScores, RowDivergence};
use tandem_model::{ModelFolder, Result as ModelResult};

use crate::Result;
use crate::config::{Config, Method};
use crate::metrics::{MetricSums, Sides};
use crate::objective::{Loss, ObjectiveConfig, WholeBatch};

pub(crate) use distill::open_teacher;
pub(crate) use grpo::counted_entropies;
pub(crate) use log_probs::SequenceLogProbs;
pub(crate) use micro_batch::deal;
pub use micro_batch::{BatchPart, MicroBatch, MicroBatcher, RankBatch, RowLayout, Rows};
pub use online::{Author, SampledAnswer, ScoredPrompt};

/// A kind of training.
pub trait Recipe: Send + Sync {
    /// Reads a row of its data sets.
    fn row<'a>(&self, cache: &'a TokenCache, row: usize) -> DatasetRow<'a>;

    /// Opens the folder of a policy, or of a model like it, with the head that trains.
    fn open_folder(&self, _config: &Config, path: &Path) -> ModelResult<ModelFolder> {
        ModelFolder::open(path)
    }

    /// Completes the policy's folder by what its tokenizer says.
    fn with_tokenizer(&self, folder: ModelFolder, _tokenizer: &Tokenizer) -> ModelFolder {
        folder
    }

    /// Refuses training rows that lack what the config asks of them.
    fn check_rows(&self, _config: &Config, _rows: &TokenCache) -> Result<()> {
        Ok(())
    }

    /// Says why a config without `data.eval` cannot be evaluated.
    fn no_held_out_rows(&self) -> &'static str {
        "there is nothing to evaluate on: set data.eval to a file of held-out rows"
    }

    /// Returns whether what a row adds to a forest depends on the row before it in the batch.
    fn mixes_rows(&self) -> bool {
        false
    }

    /// Counts what the second of two rows adds to a forest; the first is the batch's row before it.
    fn counts(&self, cache: &TokenCache, rows: [usize; 2], layout: &RowLayout) -> RowCounts {
        cache.counts(rows[1], layout.share_prefix)
    }

    /// Adds the second of two rows to a forest, and its labels to the micro-batch; the first is the
    /// batch's row before it.
    fn add_row(
        &self,
        cache: &TokenCache,
        rows: [usize; 2],
        layout: &RowLayout,
        forest: &mut ForestBuilder,
        micro: &mut MicroBatch,
    );

    /// Computes the loss of a micro-batch into `out`, and returns the weight of the whole batch
    /// that it is divided by.
    fn loss(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, out: &mut Loss) -> u64;

    /// Adds the metrics of a micro-batch.
    fn add_metrics(&self, batch: &ScoredBatch<'_>, terms: &LossTerms<'_>, sums: &mut MetricSums);

    /// Returns whether its rows are pairs of responses.
    fn has_pairs(&self) -> bool {
        true
    }

    /// The most responses to a prompt that go through the model.
    fn num_responses(&self, _config: &Config) -> usize {
        2
    }

    /// Adds a row that a plan assumes where there is no data.
    fn add_assumed(&self, row: &AssumedRow, forest: &mut ForestBuilder);

    /// Adds the labels of `num_rows` assumed rows, with `num_sequences` sequences, to a
    /// micro-batch.
    fn label_assumed(&self, config: &Config, num_rows: usize, num_sequences: usize, micro: &mut MicroBatch);
}

/// Returns the recipe of a method.
pub fn for_method(method: Method) -> &'static dyn Recipe {
    match method {
        Method::Sft => &sft::Sft,
        Method::Dpo => &dpo::Dpo,
        Method::Reward => &reward::Reward,
        Method::Online | Method::Grpo => &online::Online,
        Method::Kto => &unpaired::Unpaired,
        Method::Distill => &distill::Distill,
    }
}

/// A tokenised row of a data set.
pub enum DatasetRow<'a> {
    /// One sequence and the tokens to learn.
    Scored(ScoredTokens<'a>),
    /// A prompt with a chosen and a rejected response.
    Pair(PairTokens<'a>),
    /// A completion with a label.
    Unpaired(UnpairedTokens<'a>),
    /// A prompt alone.
    Prompt(&'a [u32]),
}

impl DatasetRow<'_> {
    /// Tokens of the row's sequences, each response with its own copy of the prompt.
    pub fn num_sequence_tokens(&self) -> usize {
        match self {
            Self::Scored(row) => row.tokens.len(),
            Self::Pair(pair) => pair.lengths().iter().sum(),
            Self::Unpaired(row) => row.prompt.len() + row.completion.len(),
            Self::Prompt(tokens) => tokens.len(),
        }
    }

    /// Tokens of a pair's prompt that can be scored: all that chosen sees but the first.
    fn num_scored_of_prompt(&self) -> usize {
        match self {
            Self::Pair(pair) => pair.prompts()[0].len().saturating_sub(1),
            Self::Scored(_) | Self::Unpaired(_) | Self::Prompt(_) => 0,
        }
    }

    /// Tokens of the chosen response that are scored.
    fn num_chosen_tokens(&self) -> usize {
        match self {
            Self::Scored(row) => row.num_scored(),
            Self::Pair(pair) => pair.num_scored()[0],
            Self::Unpaired(row) => row.completion.len().saturating_sub(usize::from(row.prompt.is_empty())),
            Self::Prompt(_) => 0,
        }
    }
}

/// A micro-batch after its forward pass.
pub struct ScoredBatch<'a> {
    /// The micro-batch.
    pub micro: &'a MicroBatch,
    /// Log-probabilities (or rewards) of its sequences.
    pub(crate) log_probs: &'a SequenceLogProbs,
    /// The head's scores under the policy.
    pub scores: &'a HeadScores,
    /// The same under a reference that shares the policy's base, or under a teacher.
    pub reference_scores: &'a HeadScores,
    /// Divergences of the scored rows from a teacher; empty without one.
    pub divergences: &'a [RowDivergence],
}

impl ScoredBatch<'_> {
    /// Adds the metrics of single tokens.
    fn add_tokens(&self, sides: Sides, sums: &mut MetricSums) {
        let side = |sequence: u32| match sides {
            Sides::Single => 0,
            Sides::Pairs | Sides::Rewards | Sides::Unpaired => (sequence % 2) as usize,
        };
        self.add_tokens_of(&|sequence| Some(side(sequence)), sides, sums);
    }

    /// Adds the metrics of single tokens of the sequences that have a side.
    fn add_tokens_of(&self, side: &dyn Fn(u32) -> Option<usize>, sides: Sides, sums: &mut MetricSums) {
        let forest = &self.micro.forest;
        let (_, rows) = forest.scored_rows();
        sums.add_tokens(self.scores, &rows, &forest.predictions, side, sides);
    }
}

/// Inputs of a loss beside the batch's scores.
pub struct LossTerms<'a> {
    /// The whole batch.
    pub whole: &'a WholeBatch,
    /// The configured losses.
    pub objective: &'a ObjectiveConfig,
    /// Strength of the pull towards the reference.
    pub beta: f64,
}

/// A row that a plan assumes: a prompt, two responses of one length, and how many responses there
/// are.
pub struct AssumedRow {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// A response.
    pub chosen: Vec<u32>,
    /// Another response, whose tokens differ.
    pub rejected: Vec<u32>,
    /// Responses to the prompt.
    pub num_responses: usize,
}

/// Each sequence paired with the next one.
fn chain(num_sequences: usize) -> Vec<[u32; 2]> {
    (1..num_sequences as u32).map(|worse| [worse - 1, worse]).collect()
}
