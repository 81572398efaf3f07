//! Answers of the policy to the prompts of a few rows, while it trains.
//!
//! An answer takes the most likely tokens, so that it changes with the weights alone. No number of the
//! training depends on it.

use tandem_comm::Phase;
use tandem_data::token_cache::TokenCache;
use tandem_kernels::Backend;
use tandem_model::decode::{Answer, Finish, Flow};
use tandem_model::{Generator, GeneratorOptions, LayerExecutor, Request, Sampling, WeightSource};

use crate::Result;
use crate::config::Config;
use crate::inputs::RunInputs;
use crate::metrics::{Sample, Split};
use crate::parallel::DeviceMesh;
use crate::recipe::{self, DatasetRow};
use crate::step::TrainStep;

/// Prompts that the policy answers again and again.
#[derive(Clone, Debug)]
pub(crate) struct Sampler {
    split: Split,
    rows: Vec<u32>,
    prompts: Vec<Vec<u32>>,
    /// Tokens that end an answer.
    ends: Vec<u32>,
    max_new_tokens: usize,
}

impl Sampler {
    /// Takes the first held-out rows, else the first training rows, whose prompts leave room for an
    /// answer; `None` if the config asks for none or no row has one.
    pub(crate) fn new(config: &Config, prepared: &RunInputs) -> Option<Self> {
        let (split, cache) = match &prepared.eval {
            Some(cache) => (Split::Eval, cache),
            None => (Split::Train, &prepared.train),
        };
        let prompt = |row| (row as u32, prompt(config, cache, row));
        let fits = |(_, prompt): &(u32, &[u32])| !prompt.is_empty() && prompt.len() < config.data.max_length;
        let chosen = (0..cache.num_rows()).map(prompt).filter(fits).take(config.num_samples());
        let (rows, prompts): (Vec<_>, Vec<_>) = chosen.map(|(row, prompt)| (row, prompt.to_vec())).unzip();
        (!rows.is_empty()).then(|| Self {
            split,
            rows,
            prompts,
            ends: prepared.tokenizer.eos_ids().to_vec(),
            max_new_tokens: config.train.evaluation.sample_tokens,
        })
    }

    /// Takes prompts of this many tokens, for a plan without data.
    pub(crate) fn assumed(config: &Config, tokens: usize) -> Option<Self> {
        let count = config.num_samples();
        let tokens = tokens.clamp(1, config.data.max_length.saturating_sub(1).max(1));
        (count > 0).then(|| Self {
            split: Split::Train,
            rows: (0..count as u32).collect(),
            prompts: vec![vec![0; tokens]; count],
            ends: Vec::new(),
            max_new_tokens: config.train.evaluation.sample_tokens,
        })
    }

    /// Returns whether a rank computes: the first one, and all where one needs the others' part of the weights.
    pub(crate) fn takes_part(config: &Config, rank: usize) -> bool {
        rank == 0
            || config.compute.tensor > 1
            || config.compute.pipeline > 1
            || config.compute.sharded().meets_in_walk()
    }

    /// Generates the answers. Ranks that hold parts of the weights compute the same.
    ///
    /// # Errors
    /// A pass fails, or another rank.
    pub(crate) fn answer(&self, scorer: &mut TrainStep, mesh: &mut DeviceMesh) -> Result<Vec<Answer>> {
        self.generate(scorer, mesh, self.max_new_tokens, &self.ends)
    }

    /// Allocates what [`Sampler::answer`] does, on a device that computes nothing.
    pub(crate) fn dry_run(&self, scorer: &mut TrainStep, mesh: &mut DeviceMesh) -> Result<()> {
        // On a CPU a token needs as much memory as the one before it.
        let tokens = match scorer.placement.device.backend() {
            Backend::Cpu => self.max_new_tokens.min(self.prompts.len() + 2),
            Backend::Cuda => self.max_new_tokens,
        };
        self.generate(scorer, mesh, tokens, &[]).map(drop)
    }

    fn generate(
        &self,
        scorer: &mut TrainStep,
        mesh: &mut DeviceMesh,
        max_new_tokens: usize,
        ends: &[u32],
    ) -> Result<Vec<Answer>> {
        scorer.placement.device.set_place(format_args!("samples"));
        let TrainStep { placement, decoder, dtype, checkpointing, policy, progress, .. } = scorer;
        let executor = LayerExecutor::new(decoder, &placement.device, *dtype, *checkpointing);
        let executor = mesh.join_generation(executor);
        let lengths = self.prompts.iter().map(Vec::len);
        let options = GeneratorOptions {
            max_batch: self.prompts.len(),
            // The limit, not this call's: a dry run must reserve the whole cache.
            cache_tokens: lengths.clone().map(|length| length + self.max_new_tokens).sum(),
            prefill_tokens: lengths.max().unwrap_or(1),
            log_probs: false,
            // A dry run has these very prompts.
            planned_prefill: None,
        };
        let request = |(prompt, row): (&Vec<u32>, &u32)| Request {
            prompt: prompt.clone(),
            number: u64::from(*row),
            num_answers: 1,
            sampling: Sampling::GREEDY,
            max_new_tokens,
            stop: ends.to_vec(),
        };
        let requests = self.prompts.iter().zip(&self.rows).map(request).collect();
        let answers = Generator::over(executor, options)?.generate(policy, requests, &mut |_| {
            progress.begin_phase(Phase::Generate);
            Flow::Continue
        })?;
        policy.release_all();
        Ok(answers)
    }

    /// The answers as text, beside those of their rows.
    ///
    /// # Errors
    /// A token cannot be decoded.
    pub(crate) fn samples(
        &self,
        config: &Config,
        prepared: &RunInputs,
        answers: &[Answer],
    ) -> Result<Vec<Sample>> {
        let cache = match self.split {
            Split::Eval => prepared.eval.as_ref().expect("the rows came from it"),
            Split::Train => &prepared.train,
        };
        let tokenizer = &prepared.tokenizer;
        let sample = |((&row, prompt), answer): ((&u32, &Vec<u32>), &Answer)| -> Result<Sample> {
            let tokens = tokenizer.without_end(&answer.tokens);
            let text = |tokens: &[u32]| tokenizer.decode(tokenizer.without_end(tokens), true);
            let (chosen, rejected) = own_answers(config, cache, row as usize);
            Ok(Sample {
                split: self.split,
                place: cache.origin(row as usize).to_string(),
                row,
                prompt: tokenizer.decode(prompt, false)?,
                answer: text(tokens)?,
                num_tokens: tokens.len(),
                is_ended: answer.finish == Finish::Stop,
                chosen: text(chosen)?,
                rejected: rejected.map(text).transpose()?,
            })
        };
        self.rows.iter().zip(&self.prompts).zip(answers).map(sample).collect()
    }
}

/// A row's tokens up to its answer.
fn prompt<'a>(config: &Config, cache: &'a TokenCache, row: usize) -> &'a [u32] {
    match recipe::for_method(config.method).row(cache, row) {
        DatasetRow::Scored(row) => &row.tokens[..first_scored(row.scored)],
        DatasetRow::Pair(pair) => &pair.prompt[pair.unseen[0]..],
        DatasetRow::Unpaired(row) => row.prompt,
        DatasetRow::Prompt(tokens) => tokens,
    }
}

/// A row's own answers: the one to learn, and the rejected one of a pair.
fn own_answers<'a>(config: &Config, cache: &'a TokenCache, row: usize) -> (&'a [u32], Option<&'a [u32]>) {
    match recipe::for_method(config.method).row(cache, row) {
        DatasetRow::Scored(row) => {
            let first = first_scored(row.scored);
            let length = row.scored[first..].iter().take_while(|&&scored| scored != 0).count();
            (&row.tokens[first..first + length], None)
        }
        DatasetRow::Pair(pair) => (pair.chosen, Some(pair.rejected)),
        DatasetRow::Unpaired(row) => (row.completion, None),
        DatasetRow::Prompt(_) => (&[], None),
    }
}

/// Index of the first token of the first answer; nothing predicts token 0.
fn first_scored(scored: &[u8]) -> usize {
    scored.iter().skip(1).position(|&scored| scored != 0).map_or(scored.len(), |place| place + 1)
}
