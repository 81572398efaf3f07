//! Prompts to answers: each rank answers its share of the prompts, and all learn all answers.
//!
//! Sampling depends on the run's seed, step, row and completion index, never on the rank or on
//! other completions in the batch.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use tandem_comm::{Phase, ProcessGroup, Progress, Reduction};
use tandem_data::text_stream::TextStream;
use tandem_kernels::Backend;
use tandem_model::decode::{Finish, Flow, Lockstep, OnToken, SingleRank, Sources};
use tandem_model::{
    Generator, GeneratorOptions, LayerExecutor, ModelError, Request, Result as ModelResult, Sampling,
};

use super::answers::Answer;
use super::keepalive::KeepAlive;
use super::sources::ReferenceOnly;
use crate::Result;
use crate::config::{Algorithm, Config, MicroBatchSize, OnlineConfig};
use crate::draw::draw;
use crate::inputs::RunInputs;
use crate::metrics::Split;
use crate::parallel::DeviceMesh;

/// A prompt to answer, and the 0-based step that the answers are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GenerationRequest {
    /// The step.
    pub step: u64,
    /// The data set's row.
    pub row: u32,
}

/// Prompts to answer.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Split of the rows.
    pub split: Split,
    /// Answers to each prompt.
    pub num_answers: usize,
    /// The prompts, in order.
    pub requests: Vec<GenerationRequest>,
}

/// How answers are generated.
#[derive(Clone, Debug)]
pub struct Generation {
    pub(super) options: OnlineConfig,
    pub(super) seed: u64,
    /// Most tokens of a conversation with an environment, the prompt included.
    pub(super) max_length: usize,
    /// Whether held-out prompts are answered too.
    evaluates: bool,
    /// Generation limits of a rank.
    within: GeneratorOptions,
}

impl Generation {
    /// Limits from the config, for prompts of at most `longest` tokens divided among `num_ranks`.
    ///
    /// # Panics
    /// The config is not of an online run.
    pub fn from_config(config: &Config, longest: usize, num_ranks: usize) -> Self {
        let options = config.online.clone().expect("an online run");
        let prompts = (config.train.batch_size as u64).saturating_mul(options.steps_per_round) as usize;
        let answers = prompts.div_ceil(num_ranks).max(1) * options.num_answers;
        let max_batch = options.max_batch.min(answers);
        // One more prompt: the last completions of one and the first of the next often overlap.
        let prompts_under_way = max_batch.div_ceil(at_once(&options)) + 1;
        let mut cache_tokens = max_batch * options.max_new_tokens + prompts_under_way * longest;
        let (max_length, mut longest) = (config.data.max_length, longest);
        if options.environment.is_some() {
            // Later turns of conversations have a prompt each, up to the whole length.
            cache_tokens = cache_tokens.max(max_batch * max_length);
            longest = max_length;
        }
        // A prompt is read in one pass, as it trains.
        let prefill_tokens = match config.train.micro_batch {
            MicroBatchSize::Tokens(tokens) => tokens.max(longest),
            MicroBatchSize::Rows(rows) => rows * longest,
        };
        let within = GeneratorOptions {
            max_batch,
            cache_tokens,
            prefill_tokens,
            log_probs: true,
            planned_prefill: Some(prefill_tokens.min(max_batch * longest)),
        };
        Self { options, seed: config.seed, max_length, evaluates: !config.data.eval.is_empty(), within }
    }

    /// Generates completions of prompts. Every rank of `mesh` computes its share and gets all;
    /// `None` if any rank was stopped.
    pub fn answer(
        &self,
        on: &GenerationContext<'_>,
        sources: &mut dyn Sources,
        together: Option<&mut LockstepGroup>,
        mesh: &mut DeviceMesh,
        stop: &AtomicBool,
        asked: &Asked,
    ) -> Result<Option<Vec<Vec<Answer>>>> {
        let data = mesh.data();
        let Asked { split, num_answers, ref requests } = *asked;
        let mine = &requests[share_of(requests.len(), data.rank(), data.size())];
        let (world, executor) = mesh.world_in_walk(on.executor);
        let on = GenerationContext { executor, ..*on };
        let mut company = KeepAlive::new(world, stop);
        let mut groups = vec![Vec::with_capacity(num_answers); mine.len()];
        let mut ranks = Ranks { together, company: &mut company, steps: 0 };
        for author in self.authors().take(if split == Split::Train { usize::MAX } else { 1 }) {
            let count = if split == Split::Train { at_once(&self.options) } else { num_answers };
            let asked = AuthorRequests { split, num_answers: count, requests: mine };
            let answers = self.ask(author, &on, sources, &mut ranks, asked)?;
            answers.into_iter().for_each(|(place, answer)| groups[place].push(answer));
        }
        if !company.end()? {
            return Ok(None);
        }
        exchange(groups, requests.len(), num_answers, mesh.data()).map(Some)
    }

    /// Continues conversations by a turn of the policy, of which every rank computes its share and gets
    /// all; `None` if any rank was stopped.
    pub(super) fn next_turns(
        &self,
        on: &GenerationContext<'_>,
        sources: &mut dyn Sources,
        together: Option<&mut LockstepGroup>,
        mesh: &mut DeviceMesh,
        stop: &AtomicBool,
        turns: &[TurnRequest<'_>],
    ) -> Result<Option<Vec<Answer>>> {
        let data = mesh.data();
        let mine = &turns[share_of(turns.len(), data.rank(), data.size())];
        let (world, executor) = mesh.world_in_walk(on.executor);
        let on = GenerationContext { executor, ..*on };
        let mut company = KeepAlive::new(world, stop);
        let mut ranks = Ranks { together, company: &mut company, steps: 0 };
        let request = |turn: &TurnRequest<'_>| {
            let first = self.request(CompletionModel::Policy, Split::Train, &turn.of, &on);
            let prompt = [&first.prompt[..], turn.tokens].concat();
            Request {
                num_answers: 1,
                max_new_tokens: first.max_new_tokens.min(self.max_length - prompt.len()),
                sampling: Sampling {
                    seed: draw(&[self.seed, turn.of.step, turn.answer as u64, turn.turn as u64]),
                    ..first.sampling
                },
                prompt,
                ..first
            }
        };
        let requests = mine.iter().map(request).collect();
        let answers = self.sample(CompletionModel::Policy, &on, sources, &mut ranks, requests, 1)?;
        if !company.end()? {
            return Ok(None);
        }
        let own = answers.into_iter().map(|(_, answer)| vec![answer]).collect();
        Ok(Some(exchange(own, turns.len(), 1, mesh.data())?.concat()))
    }

    /// Completion models, in order.
    fn authors(&self) -> impl Iterator<Item = CompletionModel> {
        let second = match self.options.algorithm {
            Algorithm::Dpo | Algorithm::Grpo(_) | Algorithm::Distill(_) => None,
            Algorithm::Xpo { .. } => Some(CompletionModel::Reference),
            Algorithm::NashMd { mixture } => Some(CompletionModel::Mixture(mixture as f32)),
        };
        std::iter::once(CompletionModel::Policy).chain(second)
    }

    /// One author's answers, and the places of their prompts.
    fn ask(
        &self,
        author: CompletionModel,
        on: &GenerationContext<'_>,
        sources: &mut dyn Sources,
        meet: &mut dyn Lockstep,
        asked: AuthorRequests<'_>,
    ) -> Result<Vec<(usize, Answer)>> {
        let num_answers = asked.num_answers;
        let requests: Vec<Request> = asked
            .requests
            .iter()
            .map(|request| Request { num_answers, ..self.request(author, asked.split, request, on) })
            .collect();
        self.sample(author, on, sources, meet, requests, num_answers)
    }

    /// Answers to requests of `num_answers` each, and the places of the requests.
    fn sample(
        &self,
        author: CompletionModel,
        on: &GenerationContext<'_>,
        sources: &mut dyn Sources,
        meet: &mut dyn Lockstep,
        requests: Vec<Request>,
        num_answers: usize,
    ) -> Result<Vec<(usize, Answer)>> {
        let mut watches: Vec<_> = (0..requests.len() * num_answers).map(|_| None).collect();
        let mut failure = None;
        let answers = author.generate(on.executor, &self.within, sources, meet, requests, &mut |new| {
            on.progress.begin_phase(Phase::Generate);
            if self.options.stop.is_empty() {
                return Flow::Continue;
            }
            let watch = watches[new.request * num_answers + new.answer]
                .get_or_insert_with(|| TextStream::new(&on.inputs.tokenizer, &self.options.stop));
            if let Err(error) = watch.push(new.token) {
                failure = Some(error);
            }
            if watch.is_ended() || failure.is_some() { Flow::End } else { Flow::Continue }
        })?;
        if let Some(error) = failure {
            return Err(error.into());
        }
        let answer = |answer: tandem_model::decode::Answer| {
            let log_prob = answer.log_probs.iter().map(|&log_prob| f64::from(log_prob)).sum();
            let is_ended = answer.finish == Finish::Stop;
            let log_probs =
                if self.options.algorithm.grpo().is_some() { answer.log_probs } else { Vec::new() };
            let tokens = answer.tokens;
            (answer.request, Answer { tokens, is_ended, log_prob, log_probs, ..Answer::default() })
        };
        Ok(answers.into_iter().map(answer).collect())
    }

    /// Dry run of generation: allocates for the largest number of completions in progress and the
    /// longest prompts.
    pub fn dry_run(
        &self,
        executor: &LayerExecutor<'_>,
        sources: &mut dyn Sources,
        longest: usize,
    ) -> Result<()> {
        self.dry_run_of(executor, sources, longest, at_once(&self.options))?;
        if self.evaluates {
            // With few answers each, more prompts are under way: long ones, and as many as are read at once.
            let (prompts, answers) = (self.within.max_batch, self.options.eval_answers);
            let each = self.within.prefill_tokens / prompts.div_ceil(answers);
            self.dry_run_of(executor, sources, longest, answers)?;
            self.dry_run_of(executor, sources, each.clamp(1, longest), answers)?;
        }
        if self.options.environment.is_some() {
            // In later turns each conversation is a request of its own: as many as can be under way at the
            // same time, and the longest prompts, which leave room for one token.
            self.dry_run_of(executor, sources, self.max_length - self.options.max_new_tokens, 1)?;
            self.dry_run_of(executor, sources, self.max_length - 1, 1)?;
        }
        Ok(())
    }

    fn dry_run_of(
        &self,
        executor: &LayerExecutor<'_>,
        sources: &mut dyn Sources,
        longest: usize,
        num_answers: usize,
    ) -> Result<()> {
        let GeneratorOptions { max_batch, prefill_tokens, .. } = self.within;
        let prompts = max_batch.div_ceil(num_answers);
        let mut lengths = vec![longest; prompts];
        let at_once = (prefill_tokens / longest).max(1);
        if at_once < prompts && prefill_tokens % longest > 0 && prefill_tokens > longest {
            // Largest prefill.
            lengths[at_once] = prefill_tokens % longest;
        }
        // Until all completions are in progress; on a GPU, operations take more memory for longer
        // texts.
        let until_all = prompts.div_ceil(at_once) + 2;
        let tokens = match executor.device.backend() {
            Backend::Cpu => until_all.min(self.options.max_new_tokens),
            Backend::Cuda => self.options.max_new_tokens,
        };
        let request = |(number, &length): (usize, &usize)| Request {
            prompt: vec![0; length],
            number: number as u64,
            num_answers: num_answers.min(max_batch - number * num_answers),
            sampling: Sampling::GREEDY,
            max_new_tokens: tokens,
            stop: Vec::new(),
        };
        let requests: Vec<Request> = lengths.iter().enumerate().map(request).collect();
        for author in self.authors() {
            let requests = requests.clone();
            let on_token = &mut |_| Flow::Continue;
            author.generate(*executor, &self.within, sources, &mut SingleRank, requests, on_token)?;
        }
        Ok(())
    }

    fn request(
        &self,
        author: CompletionModel,
        split: Split,
        asked: &GenerationRequest,
        on: &GenerationContext<'_>,
    ) -> Request {
        let OnlineConfig { algorithm, temperature, top_k, top_p, min_p, repetition_penalty, .. } =
            self.options;
        Request {
            prompt: on
                .inputs
                .tokens(split)
                .expect("its rows are asked for")
                .prompt_tokens(asked.row as usize)
                .to_vec(),
            number: u64::from(asked.row),
            num_answers: at_once(&self.options),
            sampling: Sampling {
                repetition_penalty: repetition_penalty as f32,
                temperature: match algorithm {
                    // The policy of policy gradients is the model at its temperature.
                    Algorithm::Grpo(_) => 1.0,
                    // So is the student, which may sample at another.
                    Algorithm::Distill(distill) => (temperature / distill.temperature) as f32,
                    _ => temperature as f32,
                },
                top_k,
                top_p: top_p as f32,
                min_p: min_p as f32,
                seed: draw(&[self.seed, asked.step, u64::from(author != CompletionModel::Policy)]),
            },
            max_new_tokens: self.options.max_new_tokens,
            stop: on.inputs.tokenizer.eos_ids().to_vec(),
        }
    }
}

/// A conversation that the policy continues.
#[derive(Clone, Copy, Debug)]
pub(super) struct TurnRequest<'a> {
    /// Its prompt, and the step that it is for.
    pub of: GenerationRequest,
    /// Its number among the answers to the prompt.
    pub answer: usize,
    /// Turns of the policy so far.
    pub turn: usize,
    /// Tokens after the prompt.
    pub tokens: &'a [u32],
}

/// Prompts that one author answers.
#[derive(Clone, Copy)]
struct AuthorRequests<'a> {
    split: Split,
    num_answers: usize,
    requests: &'a [GenerationRequest],
}

/// Answers to a prompt that one author gives.
fn at_once(options: &OnlineConfig) -> usize {
    if options.algorithm.asks_reference() { 1 } else { options.num_answers }
}

/// Model that generates.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CompletionModel {
    Policy,
    Reference,
    /// Both, with this part of the reference.
    Mixture(f32),
}

impl CompletionModel {
    fn generate(
        self,
        executor: LayerExecutor<'_>,
        within: &GeneratorOptions,
        sources: &mut dyn Sources,
        meet: &mut dyn Lockstep,
        requests: Vec<Request>,
        on_token: OnToken,
    ) -> Result<Vec<tandem_model::decode::Answer>> {
        let mut generator = match self {
            Self::Policy | Self::Reference => Generator::over(executor, within.clone())?,
            Self::Mixture(part) => Generator::mixed(executor, executor, part, within.clone())?,
        };
        let answers = match self {
            Self::Reference => {
                generator.generate_with(&mut ReferenceOnly(&mut *sources), meet, requests, on_token)
            }
            Self::Policy | Self::Mixture(_) => generator.generate_with(sources, meet, requests, on_token),
        }?;
        sources.policy().release_all();
        if let Some(reference) = sources.reference() {
            reference.release_all();
        }
        Ok(answers)
    }
}

/// Device and type of generation.
pub struct GenerationContext<'a> {
    /// Executor; tensor-parallel operations are the mesh's.
    pub executor: LayerExecutor<'a>,
    /// Prompts, and end-of-sequence and stop conditions.
    pub inputs: &'a RunInputs,
    /// Progress report.
    pub progress: &'a Progress,
}

/// Steps of generation after which ranks hear of each other.
const STEPS: usize = 64;

/// Ranks that generate in lockstep, seen from one of them.
struct Ranks<'r, 'c> {
    together: Option<&'r mut LockstepGroup>,
    company: &'r mut KeepAlive<'c>,
    steps: usize,
}

impl Lockstep for Ranks<'_, '_> {
    fn any(&mut self, mine: bool) -> ModelResult<bool> {
        self.together.as_mut().map_or(Ok(mine), |together| together.any(mine))
    }

    fn any_rank_active(&mut self) -> ModelResult<bool> {
        self.steps += 1;
        if !self.company.is_alone() && !self.steps.is_multiple_of(STEPS) {
            return Ok(true);
        }
        self.company.heartbeat().map_err(|error| ModelError::Store(Box::new(error)))
    }
}

/// Ranks that hold a model's weights in parts and walk together.
pub struct LockstepGroup(pub ProcessGroup);

impl LockstepGroup {
    /// Creates it for a shard group if its ranks need lockstep. Collective over `shard`.
    pub fn from_config(config: &Config, shard: &mut ProcessGroup) -> Result<Option<Self>> {
        let meets = config.compute.sharded().meets_in_walk();
        Ok(meets.then(|| shard.split(0)).transpose()?.map(Self))
    }
}

impl LockstepGroup {
    /// Returns whether any rank has work.
    fn any(&mut self, mine: bool) -> ModelResult<bool> {
        let mut votes = [u8::from(mine)];
        let voted = self.0.all_reduce(&mut votes, Reduction::Max);
        voted.map_err(|error| ModelError::Store(Box::new(error)))?;
        Ok(votes != [0])
    }
}

/// Prompt range of a rank: contiguous and even.
fn share_of(num_prompts: usize, rank: usize, num_ranks: usize) -> Range<usize> {
    let begin = |rank: usize| num_prompts * rank / num_ranks;
    begin(rank)..begin(rank + 1)
}

/// Gathers all ranks' completions in prompt order ([`share_of`]).
fn exchange(
    own: Vec<Vec<Answer>>,
    num_prompts: usize,
    num_answers: usize,
    group: &mut ProcessGroup,
) -> Result<Vec<Vec<Answer>>> {
    let num_ranks = group.size();
    let counts: Vec<usize> =
        (0..num_ranks).map(|rank| share_of(num_prompts, rank, num_ranks).len() * num_answers).collect();
    gather(own, &counts, num_answers, group)
}

/// The first rank's answers, which `own` are there, to `num_prompts` prompts.
pub(crate) fn from_first(
    own: Vec<Vec<Answer>>,
    num_prompts: usize,
    num_answers: usize,
    group: &mut ProcessGroup,
) -> Result<Vec<Vec<Answer>>> {
    let mut counts = vec![0; group.size()];
    counts[0] = num_prompts * num_answers;
    gather(own, &counts, num_answers, group)
}

/// Gathers all ranks' completions; `counts` are per rank.
fn gather(
    own: Vec<Vec<Answer>>,
    counts: &[usize],
    num_answers: usize,
    group: &mut ProcessGroup,
) -> Result<Vec<Vec<Answer>>> {
    if group.size() == 1 {
        return Ok(own);
    }
    let flat = || own.iter().flatten();
    let end = |a: &Answer| {
        (a.tokens.len() as i64) << 2 | i64::from(a.log_probs.is_empty()) << 1 | i64::from(a.is_ended)
    };
    let ends: Vec<i64> = flat().map(end).collect();
    let ends = group.gather(&ends, counts)?;
    let log_probs = group.gather(&flat().map(|a| a.log_prob).collect::<Vec<_>>(), counts)?;
    let length = |end: &i64| (end >> 2) as usize;
    let bytes_of = |length: &dyn Fn(&i64) -> usize| -> Vec<usize> {
        let mut lengths = ends.iter().map(length);
        counts.iter().map(|&count| 4 * lengths.by_ref().take(count).sum::<usize>()).collect()
    };
    let bytes = bytes_of(&length);
    let tokens: Vec<u8> = flat().flat_map(|a| &a.tokens).flat_map(|token| token.to_le_bytes()).collect();
    let tokens = group.gather(&tokens, &bytes)?;
    let mut tokens = tokens.as_chunks::<4>().0.iter().map(|&token| u32::from_le_bytes(token));
    let num_log_probs = |end: &i64| if end & 2 == 0 { length(end) } else { 0 };
    let bytes = bytes_of(&num_log_probs);
    let own_bytes: Vec<u8> =
        flat().flat_map(|a| &a.log_probs).flat_map(|number| number.to_le_bytes()).collect();
    let by_token = group.gather(&own_bytes, &bytes)?;
    let mut by_token = by_token.as_chunks::<4>().0.iter().map(|&number| f32::from_le_bytes(number));
    let answers = ends.iter().zip(log_probs).map(|(end, log_prob)| Answer {
        tokens: tokens.by_ref().take(length(end)).collect(),
        log_probs: by_token.by_ref().take(num_log_probs(end)).collect(),
        is_ended: end & 1 == 1,
        log_prob,
        ..Answer::default()
    });
    let answers: Vec<Answer> = answers.collect();
    Ok(answers.chunks(num_answers).map(<[Answer]>::to_vec).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn answer(prompt: usize, number: usize) -> Answer {
        Answer {
            tokens: vec![(10 * prompt + number) as u32; (prompt + number) % 4],
            is_ended: (prompt + number).is_multiple_of(3),
            log_prob: -(prompt as f64) / 3.0 - number as f64,
            log_probs: (0..if prompt == 1 { 0 } else { (prompt + number) % 4 })
                .map(|i| -(i as f32) / 7.0)
                .collect(),
            ..Answer::default()
        }
    }

    #[test]
    fn answers_return_to_their_places() {
        for (num_prompts, num_ranks) in [(7, 3), (2, 4), (4, 1), (1, 2)] {
            let all: Vec<Vec<Answer>> = (0..num_prompts)
                .map(|prompt| (0..2).map(|number| answer(prompt, number)).collect())
                .collect();
            let rank = |mut group: ProcessGroup| {
                let own = all[share_of(num_prompts, group.rank(), num_ranks)].to_vec();
                let mine = if group.rank() == 0 { all.clone() } else { Vec::new() };
                assert_eq!(exchange(own, num_prompts, 2, &mut group).unwrap(), all);
                assert_eq!(from_first(mine, num_prompts, 2, &mut group).unwrap(), all);
            };
            std::thread::scope(|scope| {
                let groups = tandem_comm::threads::groups(num_ranks, Duration::from_secs(600));
                groups.into_iter().for_each(|group| drop(scope.spawn(|| rank(group))));
            });
        }
    }
}
