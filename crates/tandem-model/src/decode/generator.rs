//! The generator: requests in, one step of the batch, completions out.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use tandem_kernels::ops::{HeadScores, Targets};
use tandem_kernels::{Backend, DType, Device, Extent, MemoryKind, Tensor, ops};

use super::batch::{NewPrompt, NextTokens, Prompts};
use super::cache::CacheSize;
use super::model::PassRoom;
use super::models::Models;
use super::rows::Rows;
use super::text::{CachedPrompt, LongPrompt, Open, Text};
use super::waiting::Waiting;
use super::{Answer, Finish, Flow, Lockstep, NewToken, Request, SingleRank, Sources};
use crate::decoder::Decoder;
use crate::layers::{BatchCapacity, Checkpointing, LayerExecutor, PolicyAndReferenceScores};
use crate::weights::WeightSource;
use crate::{ModelError, Result};

/// Memory and outputs of a generator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratorOptions {
    /// Largest number of running completions.
    pub max_batch: usize,
    /// Cache rows: tokens of prompts and running completions.
    pub cache_tokens: usize,
    /// Largest number of prompt tokens in one prefill. A longer prompt is prefilled in parts of about so many, in turns
    /// with other prompts, and with a step of the running completions after each.
    pub prefill_tokens: usize,
    /// True to report log-probabilities.
    pub log_probs: bool,
    /// Most prompt tokens of a prefill, if each pass is to take the memory of the largest, as a plan does that has
    /// seen one. `None`: each takes what it needs.
    pub planned_prefill: Option<usize>,
}

/// Generator of text. The cache is allocated once; requests may be submitted at any time.
pub struct Generator<'a> {
    pub(super) models: Models<'a>,
    pub(super) options: GeneratorOptions,
    /// Free cache rows.
    pub(super) rows: Rows,
    /// Free slots, if texts have slots.
    pub(super) slots: Option<Rows>,
    /// Requests by number.
    pub(super) requests: BTreeMap<usize, Open>,
    next_request: usize,
    /// Completions not yet begun.
    pub(super) waiting: Waiting,
    pub(super) texts: Vec<Text>,
    /// Prompts on their way into the cache, the first one next.
    pub(super) long: VecDeque<LongPrompt>,
    /// Whether the next prefill is a part of a long prompt, if there is one.
    long_is_next: bool,
    scores: HeadScores,
    /// Logits of the last sampling; the memory is reused.
    logits: Vec<f32>,
}

/// Callback for every token.
pub type OnToken<'a> = &'a mut dyn FnMut(NewToken) -> Flow;

impl<'a> Generator<'a> {
    /// Allocates the cache on the device, in the compute type.
    ///
    /// # Errors
    /// If an option is out of range, `decoder` is a pipeline stage or a reward model, or memory
    /// does not suffice.
    pub fn new(
        decoder: &'a Decoder,
        device: &'a Device,
        dtype: DType,
        options: GeneratorOptions,
    ) -> Result<Self> {
        Self::over(LayerExecutor::new(decoder, device, dtype, Checkpointing::None), options)
    }

    /// Generates with the decoder, device, compute type, tensor-parallel group and pipeline of this
    /// [`LayerExecutor`]. All ranks of a model submit the same requests in the same order, and get the same
    /// tokens.
    ///
    /// # Errors
    /// As [`Generator::new`]; if a shard has no tensor-parallel group, or a stage no pipeline.
    pub fn over(walk: LayerExecutor<'a>, options: GeneratorOptions) -> Result<Self> {
        Self::build(walk, None, options)
    }

    /// Samples from the geometric mixture of two models that share a tokenizer: the softmax of `(1
    /// − part) · policy logits + part · reference logits` (Nash-MD,
    /// <https://arxiv.org/abs/2312.00886>), to which [`Sampling`](super::Sampling) is then applied.
    /// Each model has a cache of its own. Reported log-probabilities are the policy's. Steps need
    /// [`Sources`] of both models.
    ///
    /// # Errors
    /// As [`Generator::new`]; if `part` is not within 0 to 1, or the vocabularies differ.
    pub fn mixed(
        policy: LayerExecutor<'a>,
        reference: LayerExecutor<'a>,
        part: f32,
        options: GeneratorOptions,
    ) -> Result<Self> {
        Self::build(policy, Some((reference, part)), options)
    }

    fn build(
        policy: LayerExecutor<'a>,
        reference: Option<(LayerExecutor<'a>, f32)>,
        options: GeneratorOptions,
    ) -> Result<Self> {
        let GeneratorOptions { max_batch, cache_tokens, prefill_tokens, .. } = options;
        if [max_batch, cache_tokens, prefill_tokens].contains(&0) {
            return Err(ModelError::Invalid(format!(
                "batch ({max_batch}), cache ({cache_tokens}) and prompt tokens at once ({prefill_tokens}) must all be at \
                 least 1"
            )));
        }
        // Of each running completion, of its prompt, and of a prompt whose completions wait.
        let slots = 2 * max_batch + 1;
        let room = options.planned_prefill.map_or_else(PassRoom::default, |tokens| {
            let of = |tokens: usize| BatchCapacity { tokens: tokens.max(max_batch), scored: max_batch };
            PassRoom { prefill: of(tokens), step: of(0) }
        });
        let models = Models::new(policy, reference, CacheSize { rows: cache_tokens, slots }, room)?;
        Ok(Self {
            slots: models.has_slots().then(|| Rows::new(slots)),
            models,
            options,
            rows: Rows::new(cache_tokens),
            requests: BTreeMap::new(),
            next_request: 0,
            waiting: Waiting::default(),
            texts: Vec::new(),
            long: VecDeque::new(),
            long_is_next: false,
            scores: HeadScores::default(),
            logits: Vec::new(),
        })
    }

    /// Queues a request, and returns its number.
    ///
    /// # Errors
    /// If an option is out of range, or the prompt is empty, has a token outside the vocabulary,
    /// fills the decoder's positions, or does not fit the cache with one completion.
    pub fn submit(&mut self, request: Request) -> Result<usize> {
        self.submit_for(0, request)
    }

    /// Queues a request of a client, and returns its number. Completions of several clients begin in
    /// turns: a client with many does not hold up the others.
    ///
    /// # Errors
    /// As [`Generator::submit`].
    pub fn submit_for(&mut self, client: u64, request: Request) -> Result<usize> {
        self.check(&request)?;
        let number = self.next_request;
        self.next_request += 1;
        self.waiting.push(client, number, request.num_answers);
        self.requests.insert(number, Open { remaining: request.num_answers, cached: None, request });
        Ok(number)
    }

    /// Returns whether no request is queued or running.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Cancels a request, and returns its completions that had begun and not ended.
    pub fn cancel(&mut self, request: usize) -> Vec<Answer> {
        self.waiting.remove(request);
        let (mut ended, under_way): (Vec<_>, _) =
            std::mem::take(&mut self.texts).into_iter().partition(|text: &Text| text.request == request);
        self.texts = under_way;
        if let Some(index) = self.long.iter().position(|long| long.request == request) {
            ended.push(self.long.remove(index).expect("it is there").text);
        }
        if let Some(Open { cached: Some(prompt), .. }) = self.requests.remove(&request) {
            self.forget(prompt);
        }
        let end = |text: Text| {
            self.give(text.rows.clone(), text.slot);
            text.end(Finish::Interrupted)
        };
        ended.into_iter().map(end).collect()
    }

    /// Completes every request; returns completions in the order of requests, numbered by their
    /// index.
    ///
    /// # Errors
    /// As [`Generator::submit`], before anything is computed, and [`Generator::step`].
    ///
    /// # Panics
    /// If other requests are running.
    pub fn generate(
        &mut self,
        mut weights: &mut dyn WeightSource,
        requests: Vec<Request>,
        on_token: OnToken,
    ) -> Result<Vec<Answer>> {
        self.generate_with(&mut weights, &mut SingleRank, requests, on_token)
    }

    /// Completes requests in lockstep with other ranks, as [`Generator::generate`]. Each rank has
    /// requests of its own, or none. Returns when the requests of all ranks are complete, or when
    /// `meet` stops: then with the completions that had ended.
    ///
    /// # Errors
    /// As [`Generator::generate`], and if a rank is lost. Other ranks wait for a rank that fails
    /// until `meet`, or their weights, fail.
    ///
    /// # Panics
    /// If other requests are running.
    pub fn generate_with(
        &mut self,
        sources: &mut dyn Sources,
        meet: &mut dyn Lockstep,
        requests: Vec<Request>,
        on_token: OnToken,
    ) -> Result<Vec<Answer>> {
        assert!(self.is_idle(), "other requests are under way");
        let first = self.next_request;
        for (index, request) in requests.into_iter().enumerate() {
            if let Err(error) = self.submit(request) {
                self.cancel_all();
                return Err(match error {
                    ModelError::Invalid(problem) => ModelError::Invalid(format!("prompt {index}: {problem}")),
                    other => other,
                });
            }
        }
        let mut answers = Vec::new();
        while meet.any(!self.is_idle()).inspect_err(|_| self.cancel_all())? {
            answers.extend(self.step_with(sources, meet, &mut |mut token| {
                token.request -= first;
                on_token(token)
            })?);
            if !meet.any_rank_active().inspect_err(|_| self.cancel_all())? {
                self.cancel_all();
                break;
            }
        }
        answers.iter_mut().for_each(|answer| answer.request -= first);
        answers.sort_by_key(|answer| (answer.request, answer.answer));
        Ok(answers)
    }

    /// Begins completions that there is room for, and extends every running one by a token; returns
    /// those that end. `on_token` sees each token as it is sampled.
    pub fn step(&mut self, mut weights: &mut dyn WeightSource, on_token: OnToken) -> Result<Vec<Answer>> {
        self.step_with(&mut weights, &mut SingleRank, on_token)
    }

    /// Runs a [`Generator::step`] in lockstep with other ranks, which call it at the same time:
    /// each layer is fetched by all of them, or by none.
    pub fn step_with(
        &mut self,
        sources: &mut dyn Sources,
        meet: &mut dyn Lockstep,
        on_token: OnToken,
    ) -> Result<Vec<Answer>> {
        let mut ended = Vec::new();
        let result = self.advance(sources, meet, on_token, &mut ended);
        if result.is_err() {
            self.cancel_all();
        }
        result.map(|()| ended)
    }

    fn cancel_all(&mut self) {
        while let Some((&request, _)) = self.requests.first_key_value() {
            self.cancel(request);
        }
    }

    fn advance(
        &mut self,
        sources: &mut dyn Sources,
        meet: &mut dyn Lockstep,
        on_token: OnToken,
        ended: &mut Vec<Answer>,
    ) -> Result<()> {
        let under_way = self.texts.len();
        if meet.any(under_way > 0)? {
            if under_way > 0 {
                let next = self.next_tokens();
                let logits = self.models.each(sources, |model, weights| model.step(weights, &next))?;
                self.draw(logits, 0, on_token, ended)?;
            } else {
                self.idle(sources)?;
            }
        }
        let first = self.texts.len();
        let new_prompts = if self.long_is_next { Vec::new() } else { self.admit() };
        let is_part = new_prompts.is_empty() && !self.long.is_empty();
        self.long_is_next = !is_part && !self.long.is_empty();
        if meet.any(is_part || !new_prompts.is_empty())? {
            match &new_prompts[..] {
                _ if is_part => self.prefill_part(sources)?,
                [] => self.idle(sources)?,
                new_prompts => self.prefill(sources, new_prompts)?,
            }
        }
        if first < self.texts.len() {
            let logits = self.first_logits(first)?;
            self.draw(logits, first, on_token, ended)?;
        } else if under_way == 0 && self.long.is_empty() && !self.is_idle() {
            // Prompts cached for later completions leave no room for these. Alone, each request
            // fits.
            let cached: Vec<_> = self.requests.values_mut().filter_map(|open| open.cached.take()).collect();
            cached.into_iter().for_each(|prompt| self.forget(prompt));
        }
        Ok(())
    }

    /// Takes part in the other ranks' forward pass without tokens of its own.
    fn idle(&mut self, sources: &mut dyn Sources) -> Result<()> {
        self.models.each(sources, |model, weights| model.walk.idle_forward(weights).map(Some)).map(drop)
    }

    /// Prefills new prompts, and stores the logits after each.
    fn prefill(&mut self, sources: &mut dyn Sources, new_prompts: &[usize]) -> Result<()> {
        let prompts = Prompts::new(new_prompts.iter().map(|&number| self.new_prompt(number)))?;
        let logits = self.prefill_logits(sources, &prompts)?;
        self.keep_logits(new_prompts, logits);
        Ok(())
    }

    /// Prefills the next part of the first long prompt. After the last one its first completion begins.
    fn prefill_part(&mut self, sources: &mut dyn Sources) -> Result<()> {
        let &LongPrompt { request, num_cached, .. } = &self.long[0];
        let length = self.requests[&request].request.prompt.len();
        let end = length.min(num_cached + self.part_tokens());
        let part = Prompts::part(self.new_prompt(request), num_cached..end)?;
        let logits = self.prefill_logits(sources, &part)?;
        let mut long = self.long.pop_front().expect("looked at above");
        if end < length {
            long.num_cached = end;
            self.long.push_back(long);
            return Ok(());
        }
        self.texts.push(long.text);
        self.keep_logits(&[request], logits);
        Ok(())
    }

    /// Returns the tokens of a long prompt's part: a prompt in such parts has the bits of one in a single pass.
    fn part_tokens(&self) -> usize {
        let block = self.models.query_block();
        (self.options.prefill_tokens / block * block).max(block)
    }

    fn new_prompt(&self, request: usize) -> NewPrompt<'_> {
        let open = &self.requests[&request];
        let (prompt, cached) = (&open.request.prompt[..], open.cached());
        let length = (prompt.len() + self.limit(&open.request)) as u32;
        NewPrompt { prompt, length, row: cached.rows.start, keep: cached.slot }
    }

    fn prefill_logits(
        &mut self,
        sources: &mut dyn Sources,
        prompts: &Prompts,
    ) -> Result<Option<PolicyAndReferenceScores<Vec<f32>>>> {
        self.models.each(sources, |model, weights| {
            let logits = model.prefill(weights, prompts)?;
            logits.map(|logits| model.read(&logits)).transpose()
        })
    }

    /// Stores the logits after prompts, in their order; all stages but the last have none.
    fn keep_logits(&mut self, requests: &[usize], logits: Option<PolicyAndReferenceScores<Vec<f32>>>) {
        let Some(logits) = logits else { return };
        for (index, number) in requests.iter().enumerate() {
            let row = index * self.models.vocabulary()..(index + 1) * self.models.vocabulary();
            let cached = self.requests.get_mut(number).and_then(|open| open.cached.as_mut());
            cached.expect("admitted").logits = PolicyAndReferenceScores {
                policy: logits.policy[row.clone()].to_vec(),
                reference: logits.reference.as_ref().map(|logits| logits[row].to_vec()),
            };
        }
    }

    /// Returns the logits after the prompts of the completions from `first` on; `None` on all stages but the
    /// last.
    fn first_logits(&self, first: usize) -> Result<Option<PolicyAndReferenceScores<Tensor>>> {
        if !self.models.policy.walk.decoder.stage().is_last() {
            return Ok(None);
        }
        let prompts = || self.texts[first..].iter().map(|text| &self.requests[&text.request].cached().logits);
        let policy = self.stack(prompts().map(|logits| &logits.policy[..]))?;
        let reference: Option<Vec<_>> = prompts().map(|logits| logits.reference.as_deref()).collect();
        let reference = reference.map(|rows| self.stack(rows.into_iter())).transpose()?;
        Ok(Some(PolicyAndReferenceScores { policy, reference }))
    }

    /// Copies rows of logits to the device, `[rows, V]`.
    fn stack<'r>(&self, rows: impl ExactSizeIterator<Item = &'r [f32]>) -> Result<Tensor> {
        let device = self.models.policy.walk.device;
        let count = Extent::new(rows.len(), self.models.policy.room.step.scored);
        let vocabulary = Extent::exact(self.models.vocabulary());
        let mut logits = device.alloc_in(MemoryKind::Head, count, vocabulary, DType::F32)?;
        for (index, row) in rows.enumerate() {
            ops::write_f32(device, row, logits.view_mut().row_range(index..index + 1))?;
        }
        Ok(logits)
    }

    /// Returns the last token of every running completion.
    fn next_tokens(&self) -> NextTokens {
        let mut next = NextTokens::new();
        for text in &self.texts {
            let token = *text.tokens.last().expect("its first token came with the prompt");
            let own = text.rows.start..text.rows.start + text.tokens.len() as u32;
            let prompt = self.requests[&text.request].cached();
            // The first step continues the prompt.
            let from = if text.tokens.len() == 1 { prompt.slot } else { text.slot };
            next.push(token, &prompt.rows, own, text.limit, from.zip(text.slot));
        }
        next
    }

    /// Samples the next token of each completion from `first` on, from these logits; ended ones
    /// leave the batch. Stages without logits are told the tokens.
    fn draw(
        &mut self,
        logits: Option<PolicyAndReferenceScores<Tensor>>,
        first: usize,
        on_token: OnToken,
        ended: &mut Vec<Answer>,
    ) -> Result<()> {
        let mut drawn = match logits {
            Some(logits) => self.sample(logits, first)?,
            None => vec![(0, f32::NAN); self.texts.len() - first],
        };
        if let Some(stages) = self.models.policy.walk.stages {
            let mut numbers: Vec<i64> =
                drawn.iter().map(|&(token, p)| i64::from(token) << 32 | i64::from(p.to_bits())).collect();
            stages.broadcast_from_last(&mut numbers)?;
            for (drawn, number) in drawn.iter_mut().zip(numbers) {
                *drawn = ((number >> 32) as u32, f32::from_bits(number as u32));
            }
        }
        let continued = self.texts.split_off(first);
        for (mut text, (token, log_prob)) in continued.into_iter().zip(drawn) {
            let Text { request, answer, .. } = text;
            let index = text.tokens.len();
            text.tokens.push(token);
            if self.options.log_probs {
                text.log_probs.push(log_prob);
            }
            let finish = if self.requests[&request].request.stop.contains(&token) {
                Some(Finish::Stop)
            } else {
                (text.tokens.len() == text.limit).then_some(Finish::Length)
            };
            let flow = on_token(NewToken { request, answer, index, token, log_prob, finish });
            // A text may end with the last token that it may have.
            match if flow == Flow::End { Some(Finish::Stop) } else { finish } {
                None => self.texts.push(text),
                Some(finish) => ended.push(self.end(text, finish)),
            }
        }
        Ok(())
    }

    /// Samples the next token of each completion from `first` on; returns it with its log-probability, NaN
    /// where none is reported.
    fn sample(
        &mut self,
        mut logits: PolicyAndReferenceScores<Tensor>,
        first: usize,
    ) -> Result<Vec<(u32, f32)>> {
        let LayerExecutor { device, decoder, .. } = self.models.policy.walk;
        let drawn = match self.sample_on_device(&logits, first)? {
            Some(drawn) => drawn,
            None => self.sample_on_host(&logits, first)?,
        };
        if !self.options.log_probs {
            return Ok(drawn.into_iter().map(|token| (token, f32::NAN)).collect());
        }
        let rows: Vec<u32> = (0..drawn.len() as u32).collect();
        let targets = Targets { rows: &rows, targets: &drawn };
        let (logits, head) = (logits.policy.view_mut(), &decoder.spec().head.shape);
        let blocks = decoder.whole().sum_blocks().vocabulary();
        ops::score_logits(device, logits, targets, head, blocks, &mut self.scores)?;
        Ok(drawn.into_iter().zip(self.scores.log_prob.iter().copied()).collect())
    }

    /// Samples on a GPU, without reading the logits, if they are one model's and no completion's options need
    /// the host.
    fn sample_on_device(
        &self,
        logits: &PolicyAndReferenceScores<Tensor>,
        first: usize,
    ) -> Result<Option<Vec<u32>>> {
        let LayerExecutor { device, decoder, .. } = self.models.policy.walk;
        if device.backend() == Backend::Cpu || logits.reference.is_some() {
            return Ok(None);
        }
        let place = |text: &Text| {
            let request = &self.requests[&text.request].request;
            (&request.sampling, [request.number, text.answer as u64, text.tokens.len() as u64])
        };
        let texts = &self.texts[first..];
        let draw = |text| {
            let (sampling, place) = place(text);
            sampling.whole_draw(self.models.vocabulary(), place)
        };
        let Some(draws) = texts.iter().map(draw).collect::<Option<Vec<_>>>() else { return Ok(None) };
        let drawn = ops::sample(device, logits.policy.view(), &decoder.spec().head.shape, &draws)?;
        let token = |(drawn, text): (Option<u32>, &Text)| {
            drawn.ok_or(ModelError::NotFinite { token: text.tokens.len() as u64 })
        };
        drawn.into_iter().zip(texts).map(token).collect::<Result<_>>().map(Some)
    }

    fn sample_on_host(
        &mut self,
        logits: &PolicyAndReferenceScores<Tensor>,
        first: usize,
    ) -> Result<Vec<u32>> {
        let device = self.models.policy.walk.device;
        let shape = self.models.drawn_from(logits, &mut self.logits)?;
        let rows = self.logits.chunks_exact_mut(self.models.vocabulary());
        let rows: Vec<_> = rows.map(|row| Mutex::new((row, Ok(0)))).collect();
        device.each_on_host(rows.len(), |index| {
            let (row, drawn) = &mut *rows[index].lock().unwrap_or_else(PoisonError::into_inner);
            let text = &self.texts[first + index];
            let Request { prompt, number, sampling, .. } = &self.requests[&text.request].request;
            let place = [*number, text.answer as u64, text.tokens.len() as u64];
            *drawn = sampling.draw(device, row, &shape, [prompt, &text.tokens], place);
        });
        let drawn = rows.into_iter().map(|row| row.into_inner().unwrap_or_else(PoisonError::into_inner).1);
        drawn.collect()
    }

    /// Frees the cache rows of a finished completion, and of its prompt after the last completion.
    fn end(&mut self, text: Text, finish: Finish) -> Answer {
        self.give(text.rows.clone(), text.slot);
        let open = self.requests.get_mut(&text.request).expect("it has answers under way");
        open.remaining -= 1;
        if open.remaining == 0
            && let Some(Open { cached: Some(prompt), .. }) = self.requests.remove(&text.request)
        {
            self.forget(prompt);
        }
        text.end(finish)
    }

    /// Frees the cache rows and the slot of a prompt.
    pub(super) fn forget(&mut self, prompt: CachedPrompt) {
        self.give(prompt.rows, prompt.slot);
    }

    /// Frees cache rows and a slot.
    pub(super) fn give(&mut self, rows: Range<u32>, slot: Option<u32>) {
        self.rows.give(rows);
        if let Some((slots, slot)) = self.slots.as_mut().zip(slot) {
            slots.give(slot..slot + 1);
        }
    }

    /// Takes a slot, if texts have slots: `None` if none is free.
    pub(super) fn take_slot(&mut self) -> Option<Option<u32>> {
        match &mut self.slots {
            None => Some(None),
            Some(slots) => slots.take(1).map(|slot| Some(slot.start)),
        }
    }
}
