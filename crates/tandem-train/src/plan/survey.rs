//! Batch statistics of a run: worst-case micro-batches, a typical one, and counts.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use tandem_data::forest::{ForestBuilder, RowCounts};
use tandem_data::token_cache::TokenCache;
use tandem_kernels::Format;
use tandem_model::{BatchCapacity, Decoder, PipelineStage};

use super::largest::Largest;
use crate::config::{Config, MicroBatchSize, Order, ReferenceKind};
use crate::inputs::{RunInputs, with_samples};
use crate::placement::PassCapacities;
use crate::recipe::{self, AssumedRow, BatchPart, MicroBatch, MicroBatcher, deal};
use crate::samples::Sampler;
use crate::{Result, TrainError};

/// Inputs of a plan about model and data.
pub struct PlanInputs<'a> {
    /// The model, whole, without any adapter.
    pub decoder: Decoder,
    /// The format that its files are quantised in already, if they are.
    pub quantised: Option<Format>,
    /// Training rows.
    pub train_rows: usize,
    /// Held-out rows; `None` if there are none.
    pub eval_rows: Option<usize>,
    rows: Rows<'a>,
    /// Cached statistics by the keys that decide the cut.
    surveys: Mutex<HashMap<String, Arc<BatchStatistics>>>,
}

enum Rows<'a> {
    Known(&'a RunInputs),
    Assumed(SyntheticBatch),
}

/// Micro-batches that are all alike, where there is no data yet. A row has the longest sequences
/// that `data.max_length` allows or, if that is less, all of the micro-batch: a pair is a prompt
/// and two answers of the same length, its prompt computed once; a row of SFT a prompt and an
/// answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyntheticBatch {
    /// Tokens of a micro-batch; fewer if `train.micro_batch_tokens` or `micro_batch_size` says so.
    pub tokens: usize,
    /// How many of them the answers have; by default two thirds of a pair, half of another row.
    pub scored: Option<usize>,
}

/// Micro-batches of one pass over rows.
#[derive(Clone, Debug)]
pub struct PassShape {
    /// The most tokens, and the most scored rows, of any of them.
    pub room: BatchCapacity,
    /// Worst-case micro-batches: most tokens; most tokens with few trees, for each small number of
    /// trees; most scored rows; the largest without scored rows.
    pub largest: Vec<MicroBatch>,
}

/// Statistics.
#[derive(Debug)]
pub struct BatchStatistics {
    /// Training steps.
    pub train: PassShape,
    /// Evaluation; empty without held-out rows.
    pub evaluation: PassShape,
    /// Reference pass; empty without it.
    pub reference: PassShape,
    /// One of the steps' as most tokens are in.
    pub typical: MicroBatch,
    /// Tokens of each micro-batch of every step; of an epoch, if all are alike.
    pub(super) steps: Vec<Vec<usize>>,
    /// Whether no step has more than one micro-batch.
    pub single_micro_batches: bool,
    /// Steps used for the time estimate.
    pub(super) measured: usize,
    /// Tokens of a step, each answer with its own copy of the prompt: the mean.
    pub sequence_tokens: f64,
    /// Rows of a step: the mean.
    pub rows: f64,
}

/// Work of a data rank per step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankLoad {
    /// Micro-batches of the rank that has most of them, in the step where that is most.
    pub most_rounds: usize,
    /// Mean over steps.
    pub rounds: f64,
    /// Tokens of the rank that has most of them, the mean over steps.
    pub tokens: f64,
    /// Micro-batches of all ranks, in the step that has most.
    pub most_micro_batches: usize,
    /// Ranks of a data group: those that divide micro-batches.
    pub data_ranks: usize,
}

impl RankLoad {
    /// Ranks of a data group that have no micro-batch in any step.
    pub fn idle_ranks(&self) -> usize {
        self.data_ranks.saturating_sub(self.most_micro_batches)
    }
}

/// Micro-batches that a rank computes in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MicroBatchCounts {
    /// Own micro-batches.
    pub own: usize,
    /// Including passes without own work (lockstep).
    pub all: usize,
}

/// Steps by which a step's work is measured, at least.
pub(super) const LOOK_AHEAD: u64 = 1000;

impl<'a> PlanInputs<'a> {
    /// Creates inputs from opened files.
    pub fn new(prepared: &'a RunInputs) -> Self {
        Self {
            decoder: prepared.decoder.without_adapter(),
            quantised: prepared.folder.quantised(),
            train_rows: prepared.train.num_rows(),
            eval_rows: prepared.eval.as_ref().map(TokenCache::num_rows),
            rows: Rows::Known(prepared),
            surveys: Mutex::default(),
        }
    }

    /// Creates inputs without data, tokenizer or weights; reads only `config.json`.
    pub fn assume(config: &Config, assumed: SyntheticBatch) -> Result<Self> {
        let refused = |reason: String| Err(TrainError::Mismatch { reason });
        if assumed.tokens < 4 {
            return refused(format!(
                "a micro-batch of {} tokens cannot hold a row: assume at least 4",
                assumed.tokens
            ));
        }
        if let Some(scored) = assumed.scored.filter(|&scored| scored < 2 || scored > assumed.tokens) {
            let tokens = assumed.tokens;
            return refused(format!(
                "a micro-batch of {tokens} tokens cannot have {scored} scored tokens: assume 2 to {tokens}"
            ));
        }
        let folder = recipe::for_method(config.method).open_folder(config, &config.model)?;
        let spec = folder.spec().clone();
        let rows = config.train.batch_size;
        let positions = with_samples(config, &spec, config.data.max_length);
        Ok(Self {
            decoder: Decoder::new(spec, positions)?,
            quantised: folder.quantised(),
            train_rows: rows,
            eval_rows: (!config.data.eval.is_empty()).then_some(rows),
            rows: Rows::Assumed(assumed),
            surveys: Mutex::default(),
        })
    }

    /// The assumption, if there is no data.
    pub fn assumed(&self) -> Option<SyntheticBatch> {
        match self.rows {
            Rows::Known(_) => None,
            Rows::Assumed(assumed) => Some(assumed),
        }
    }

    /// Tokens of the longest prompt of an online run.
    pub fn longest_prompt(&self, config: &Config) -> usize {
        match self.rows {
            Rows::Known(prepared) => prepared.longest_prompt,
            Rows::Assumed(assumed) => assumed.shape(config).prompt.max(1),
        }
    }

    /// The prompts that a run samples answers to.
    pub(crate) fn sampler(&self, config: &Config) -> Option<Sampler> {
        match self.rows {
            Rows::Known(prepared) => Sampler::new(config, prepared),
            Rows::Assumed(assumed) => Sampler::assumed(config, assumed.shape(config).prompt),
        }
    }

    /// The batches of a run. The same cut is looked at once.
    pub fn survey(&self, config: &Config) -> Result<Arc<BatchStatistics>> {
        let precomputes = config.reference.kind == ReferenceKind::Precompute;
        let key = format!("{:?} {} {precomputes}", config.train.micro_batch, config.data.share_prefix);
        let mut surveys = self.surveys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(survey) = surveys.get(&key) {
            return Ok(survey.clone());
        }
        let survey = Arc::new(match &self.rows {
            Rows::Known(prepared) if config.online.is_some() => super::online::survey(config, prepared)?,
            Rows::Known(prepared) => look(config, prepared)?,
            Rows::Assumed(assumed) => assumed.survey(config)?,
        });
        surveys.insert(key, survey.clone());
        Ok(survey)
    }
}

/// Counts the micro-batches of a run step by step, and builds some.
fn look(config: &Config, prepared: &RunInputs) -> Result<BatchStatistics> {
    let mut batcher = prepared.batcher(config);
    let [mut of_train, mut of_evaluation, mut of_reference] = [(); 3].map(|()| Largest::default());
    let mut batches = prepared.batches(config);
    let total = config.train.length.total_steps(prepared.train.num_rows(), config.train.batch_size);
    let per_epoch = batches.steps_per_epoch();
    let of_rows = |cache: &TokenCache| -> Vec<RowCounts> {
        batcher.counts(cache, BatchPart::from(&(0..cache.num_rows() as u32).collect::<Vec<_>>()[..]))
    };
    let (counts, of_eval) = (of_rows(&prepared.train), prepared.eval.as_ref().map(of_rows));
    let (mut steps, mut sequence_tokens, mut num_rows) = (Vec::new(), 0, 0);
    let measured = total.min(per_epoch.max(LOOK_AHEAD));
    // Shuffled epochs are cut differently.
    let looked_at = match config.data.order {
        Order::Shuffled => total,
        Order::Sequential => measured,
    };
    for step in 0..looked_at {
        let rows = batches.rows(step);
        let cuts = of_train.consider_rows(&batcher, &prepared.train, rows, &counts);
        if step < measured {
            sequence_tokens += cuts.iter().map(|cut| cut.sequence_tokens).sum::<u64>();
            num_rows += rows.len();
        }
        steps.push(cuts.into_iter().map(|cut| cut.tokens).collect());
    }
    // These passes read the rows in order.
    let with_eval = prepared.eval.as_ref().zip(of_eval.as_deref());
    with_eval.into_iter().for_each(|(eval, counts)| of_evaluation.consider_all(&batcher, eval, counts));
    if config.reference.kind == ReferenceKind::Precompute {
        of_reference.consider_rows(&batcher, &prepared.train, &prepared.training_rows(config), &counts);
        with_eval.into_iter().for_each(|(eval, counts)| of_reference.consider_all(&batcher, eval, counts));
    }
    let typical = {
        let (step, cut) = typical(&steps[..measured as usize]);
        let rows = batches.rows(step as u64);
        let cut = batcher.cut(&prepared.train, rows)[cut].clone();
        batcher.build(&prepared.train, BatchPart::new(rows, cut))?
    };
    let per_step = |count: f64| count / measured as f64;
    Ok(BatchStatistics {
        train: of_train.build(&mut batcher)?,
        evaluation: of_evaluation.build(&mut batcher)?,
        reference: of_reference.build(&mut batcher)?,
        typical,
        single_micro_batches: steps.iter().all(|cuts| cuts.len() <= 1),
        steps,
        measured: measured as usize,
        sequence_tokens: per_step(sequence_tokens as f64),
        rows: per_step(num_rows as f64),
    })
}

/// The micro-batches of an evaluation that need most memory.
pub(super) fn evaluation_shape(batcher: &mut MicroBatcher, eval: &TokenCache) -> Result<PassShape> {
    let rows: Vec<u32> = (0..eval.num_rows() as u32).collect();
    let counts = batcher.counts(eval, BatchPart::from(&rows[..]));
    let mut largest = Largest::default();
    largest.consider_all(batcher, eval, &counts);
    largest.build(batcher)
}

/// Step and place of a micro-batch as most tokens are in: about as long as their mean token's.
fn typical(steps: &[Vec<usize>]) -> (usize, usize) {
    let all = || {
        steps.iter().enumerate().flat_map(|(s, cuts)| cuts.iter().enumerate().map(move |(c, &n)| (s, c, n)))
    };
    let (sum, squares) = all().fold((0, 0), |(sum, squares), (_, _, n)| (sum + n, squares + n * n));
    let mean = squares / sum.max(1);
    all().min_by_key(|(_, _, n)| n.abs_diff(mean)).map_or((0, 0), |(step, cut, _)| (step, cut))
}

/// Rows of an assumed micro-batch, all alike.
#[derive(Clone, Copy)]
struct AssumedShape {
    /// Tokens of the prompt.
    prompt: usize,
    /// Tokens of each answer.
    answer: usize,
    /// Answers to each prompt in the micro-batch.
    answers: usize,
    rows: usize,
}

impl SyntheticBatch {
    fn shape(self, config: &Config) -> AssumedShape {
        let answers = recipe::for_method(config.method).num_responses(config);
        let (tokens, most_rows) = match config.train.micro_batch {
            MicroBatchSize::Tokens(most) => (self.tokens.min(most), None),
            MicroBatchSize::Rows(most) => (self.tokens, Some(most)),
        };
        // A third of a pair, half of another row.
        let answer = |tokens: usize| match self.scored {
            Some(scored) => tokens * scored / self.tokens / answers,
            None => tokens / (answers + 1),
        };
        let sequence = |tokens: usize| tokens - (answers - 1) * answer(tokens);
        let rows =
            (1..=tokens / 4).find(|rows| sequence(tokens / rows) <= config.data.max_length).unwrap_or(1);
        let row = tokens / rows;
        let generated = config.online.as_ref().filter(|online| online.environment.is_none());
        if let Some(online) = generated.filter(|online| row < answers * online.max_new_tokens) {
            let longest = online.max_new_tokens;
            let room = config.data.max_length.saturating_sub(longest).max(1);
            if !online.algorithm.divides_prompts() || most_rows.is_some() {
                let prompt = (row / (answers + 1)).clamp(1, room);
                return AssumedShape { prompt, answer: longest, answers, rows: 1 };
            }
            let scored = (answer(tokens) * answers).max(tokens.saturating_sub(room)).min(tokens - 1);
            let fitting = (scored / longest).clamp(1, answers);
            let prompt = tokens.saturating_sub(fitting * longest).clamp(1, room);
            return AssumedShape { prompt, answer: longest, answers: fitting, rows: 1 };
        }
        let rows = most_rows.map_or(rows, |most| rows.min(most));
        let answer = answer(row).max(1);
        let prompt = row.saturating_sub(answers * answer);
        AssumedShape { prompt, answer, answers, rows: rows.min(config.train.batch_size) }
    }

    fn survey(self, config: &Config) -> Result<BatchStatistics> {
        let AssumedShape { prompt, answer, answers, rows } = self.shape(config);
        let (recipe, mut builder) =
            (recipe::for_method(config.method), ForestBuilder::new(config.data.share_prefix));
        let row = AssumedRow {
            prompt: vec![0; prompt],
            chosen: vec![0; answer],
            rejected: vec![1; answer],
            num_responses: answers,
        };
        (0..rows).for_each(|_| recipe.add_assumed(&row, &mut builder));
        let forest = builder.finish()?;
        let sequences = forest.num_sequences as usize;
        let sequence_tokens = (sequences * (prompt + answer)) as u64;
        let counts = vec![answer as u32; sequences];
        let num_tokens = forest.num_tokens();
        let mut batch = MicroBatch {
            rows: (0..rows as u32).collect(),
            forest,
            scored_tokens: counts.clone(),
            answer_tokens: counts,
            sequence_tokens,
            ..MicroBatch::default()
        };
        recipe.label_assumed(config, rows, sequences, &mut batch);
        // A step's rows, as many of them as this micro-batch has, where it may have a part of one.
        let in_step = config.train.batch_size * recipe.num_responses(config);
        let in_step = in_step as f64 / (rows * answers) as f64;
        let pass = PassShape {
            room: BatchCapacity { tokens: num_tokens, scored: batch.forest.scored_rows().0.len() },
            largest: vec![batch.clone()],
        };
        Ok(BatchStatistics {
            train: pass.clone(),
            evaluation: pass.clone(),
            reference: pass,
            typical: batch,
            steps: vec![vec![num_tokens; in_step.ceil() as usize]],
            single_micro_batches: in_step <= 1.0,
            measured: 1,
            sequence_tokens: sequence_tokens as f64 * in_step,
            rows: config.train.batch_size as f64,
        })
    }
}

impl BatchStatistics {
    /// Capacity that every micro-batch allocates.
    pub fn rooms(&self) -> PassCapacities {
        let Self { train, evaluation, reference, .. } = self;
        PassCapacities { train: train.room, evaluation: evaluation.room, reference: reference.room }
    }

    /// Distinct micro-batch counts of a stage, for each of `num_data` ranks of its data group: those
    /// that change memory offsets. `in_rounds` as in [`crate::recipe::MicroBatcher::new`].
    pub fn micro_batch_counts(
        &self,
        stage: PipelineStage,
        num_data: usize,
        in_rounds: bool,
    ) -> Vec<Vec<MicroBatchCounts>> {
        if stage.count == 1 {
            // A micro-batch leaves nothing behind.
            let idle = (in_rounds && num_data > 1).then_some(MicroBatchCounts { own: 0, all: 1 });
            let all = std::iter::once(MicroBatchCounts { own: 1, all: 1 }).chain(idle).collect();
            return vec![all; num_data];
        }
        let mut found = vec![BTreeSet::new(); num_data];
        for cuts in &self.steps {
            let dealt = deal(cuts, num_data, in_rounds);
            let most = dealt.iter().map(Vec::len).max().unwrap_or(0);
            for (found, own) in found.iter_mut().zip(dealt.iter().map(Vec::len)) {
                found.insert(MicroBatchCounts { own, all: if in_rounds { most } else { own } });
            }
        }
        found.into_iter().map(|counts| counts.into_iter().collect()).collect()
    }

    /// Work of one of `num_data` ranks; `in_rounds` as in
    /// [`crate::recipe::MicroBatcher::new`].
    pub fn load(&self, num_data: usize, in_rounds: bool) -> RankLoad {
        let most_micro_batches = self.steps.iter().map(Vec::len).max().unwrap_or(0);
        let mut load =
            RankLoad { most_rounds: 1, rounds: 0.0, tokens: 0.0, most_micro_batches, data_ranks: num_data };
        let steps = &self.steps[..self.measured];
        for cuts in steps {
            let dealt = deal(cuts, num_data, in_rounds);
            let rounds = dealt.iter().map(Vec::len).max().unwrap_or(0);
            let tokens = |mine: &Vec<usize>| mine.iter().map(|&index| cuts[index]).sum::<usize>();
            load.most_rounds = load.most_rounds.max(rounds);
            load.rounds += rounds as f64 / steps.len() as f64;
            load.tokens += dealt.iter().map(tokens).max().unwrap_or(0) as f64 / steps.len() as f64;
        }
        load
    }
}
