//! The batch: what enters it, a step of it, and what leaves it.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use tandem_kernels::ops::{HeadScores, Targets, Visible};
use tandem_kernels::{DType, Device, Forest, Kind, Segment, Tensor, ops};

use super::cache::{Cache, Prefill, Step};
use super::{Answer, Finish, Flow, NewToken, Request};
use crate::decoder::Decoder;
use crate::walk::{Checkpointing, Keep, Walk};
use crate::weights::WeightSource;
use crate::{ModelError, Result};

/// Within what memory to generate, and what to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratorOptions {
    /// Answers under way at the same time, at most.
    pub max_batch: usize,
    /// Rows of the cache: tokens of prompts and answers under way.
    pub cache_tokens: usize,
    /// Tokens of prompts that are computed at once, at most; a longer prompt is computed alone.
    pub prefill_tokens: usize,
    /// Whether to tell log-probabilities.
    pub log_probs: bool,
}

/// Generates text. The cache is allocated once; requests may come at any time.
pub struct Generator<'a> {
    walk: Walk<'a>,
    options: GeneratorOptions,
    cache: Cache,
    /// By number.
    requests: BTreeMap<usize, Open>,
    next_request: usize,
    /// Answers not yet begun: request and number.
    waiting: VecDeque<(usize, usize)>,
    texts: Vec<Text>,
    scores: HeadScores,
}

/// A request that has answers to come.
struct Open {
    request: Request,
    /// Answers that have not ended.
    remaining: usize,
    cached: Option<CachedPrompt>,
}

/// A prompt whose keys and values are in the cache.
struct CachedPrompt {
    rows: Range<u32>,
    /// Logits after its last token `[V]`, from which each answer's first token is drawn.
    logits: Vec<f32>,
}

/// An answer under way.
struct Text {
    request: usize,
    answer: usize,
    tokens: Vec<u32>,
    log_probs: Vec<f32>,
    /// Cache rows for its tokens: all but the last, which nothing follows.
    rows: Range<u32>,
    /// Tokens it may have.
    limit: usize,
}

/// Told about every token.
pub type OnToken<'a> = &'a mut dyn FnMut(NewToken) -> Flow;

impl<'a> Generator<'a> {
    /// Reserves the cache on the device, in the compute type.
    ///
    /// # Errors
    /// If an option is out of range, `decoder` is a slice, or the device's memory does not suffice.
    pub fn new(
        decoder: &'a Decoder,
        device: &'a Device,
        dtype: DType,
        options: GeneratorOptions,
    ) -> Result<Self> {
        let GeneratorOptions { max_batch, cache_tokens, prefill_tokens, .. } = options;
        if [max_batch, cache_tokens, prefill_tokens].contains(&0) {
            return Err(ModelError::Invalid(format!(
                "batch ({max_batch}), cache ({cache_tokens}) and prompt tokens at once ({prefill_tokens}) must all be at \
                 least 1"
            )));
        }
        if decoder.slice().count > 1 {
            return Err(ModelError::Invalid("a slice of a decoder cannot generate".to_owned()));
        }
        Ok(Self {
            walk: Walk::new(decoder, device, dtype, Checkpointing::None),
            cache: Cache::new(decoder, device, dtype, cache_tokens)?,
            options,
            requests: BTreeMap::new(),
            next_request: 0,
            waiting: VecDeque::new(),
            texts: Vec::new(),
            scores: HeadScores::default(),
        })
    }

    /// Puts a request behind those that wait; returns its number.
    ///
    /// # Errors
    /// If a number of it is out of range, or its prompt is empty, has a token outside the vocabulary, fills the decoder's
    /// positions, or does not fit the cache with one answer.
    pub fn submit(&mut self, request: Request) -> Result<usize> {
        self.check(&request)?;
        let number = self.next_request;
        self.next_request += 1;
        self.waiting.extend((0..request.num_answers).map(|answer| (number, answer)));
        self.requests.insert(number, Open { remaining: request.num_answers, cached: None, request });
        Ok(number)
    }

    /// Whether nothing waits and nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Breaks off the answers of a request that have not ended, and returns those that had begun.
    pub fn cancel(&mut self, request: usize) -> Vec<Answer> {
        self.waiting.retain(|&(number, _)| number != request);
        let (ended, under_way) =
            std::mem::take(&mut self.texts).into_iter().partition(|text: &Text| text.request == request);
        self.texts = under_way;
        if let Some(Open { cached: Some(prompt), .. }) = self.requests.remove(&request) {
            self.cache.give(prompt.rows);
        }
        let end = |text: Text| {
            self.cache.give(text.rows.clone());
            text.end(Finish::Interrupted)
        };
        ended.into_iter().map(end).collect()
    }

    /// Answers every request, and returns answers in the order of requests, whose numbers are their places.
    ///
    /// # Errors
    /// As [`Generator::submit`], before anything is computed, and [`Generator::step`].
    ///
    /// # Panics
    /// If other requests are under way.
    pub fn generate(
        &mut self,
        weights: &mut dyn WeightSource,
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
        while !self.is_idle() {
            answers.extend(self.step(weights, &mut |mut token| {
                token.request -= first;
                on_token(token)
            })?);
        }
        answers.iter_mut().for_each(|answer| answer.request -= first);
        answers.sort_by_key(|answer| (answer.request, answer.answer));
        Ok(answers)
    }

    /// Begins what there is room for, and continues every answer under way by a token; returns those that end. `on_token` sees
    /// each token as it is drawn.
    ///
    /// # Errors
    /// If weights cannot be had or memory runs out; everything is broken off then.
    pub fn step(&mut self, weights: &mut dyn WeightSource, on_token: OnToken) -> Result<Vec<Answer>> {
        let mut ended = Vec::new();
        let result = self.advance(weights, on_token, &mut ended);
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
        weights: &mut dyn WeightSource,
        on_token: OnToken,
        ended: &mut Vec<Answer>,
    ) -> Result<()> {
        let under_way = self.texts.len();
        if under_way > 0 {
            let logits = self.continue_all(weights)?;
            self.draw(logits, 0, on_token, ended)?;
        }
        let first = self.texts.len();
        let new_prompts = self.admit();
        if !new_prompts.is_empty() {
            self.prefill(weights, &new_prompts)?;
        }
        if first < self.texts.len() {
            let logits = self.first_logits(first)?;
            self.draw(logits, first, on_token, ended)?;
        } else if under_way == 0 && !self.is_idle() {
            // Prompts kept for their next answers lie in the way of these. Alone, each fits.
            for open in self.requests.values_mut() {
                if let Some(prompt) = open.cached.take() {
                    self.cache.give(prompt.rows);
                }
            }
        }
        Ok(())
    }

    fn check(&self, request: &Request) -> Result<()> {
        let Request { prompt, num_answers, max_new_tokens, sampling, .. } = request;
        let invalid = |problem: String| Err(ModelError::Invalid(problem));
        sampling.check()?;
        if [*num_answers, *max_new_tokens].contains(&0) {
            return invalid(format!(
                "answers ({num_answers}) and new tokens ({max_new_tokens}) must be at least 1"
            ));
        }
        let (tokens, positions) = (prompt.len(), self.walk.decoder.positions());
        let vocabulary = self.walk.decoder.spec().vocab_size;
        if tokens == 0 {
            return invalid("it is empty".to_owned());
        }
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocabulary) {
            return invalid(format!("token {token} is outside the model's vocabulary of {vocabulary}"));
        }
        if tokens >= positions {
            return invalid(format!(
                "it has {tokens} tokens, which leaves no room for an answer within {positions} positions"
            ));
        }
        let limit = self.limit(request);
        if tokens + limit - 1 > self.options.cache_tokens {
            return invalid(format!(
                "it has {tokens} tokens and its answer up to {limit}; the cache holds {}",
                self.options.cache_tokens
            ));
        }
        Ok(())
    }

    /// Tokens that an answer may have.
    fn limit(&self, request: &Request) -> usize {
        request.max_new_tokens.min(self.walk.decoder.positions() - request.prompt.len())
    }

    /// Begins waiting answers while there is room; returns the requests whose prompts are new to the cache.
    fn admit(&mut self) -> Vec<usize> {
        let (mut new_prompts, mut new_tokens) = (Vec::new(), 0);
        while self.texts.len() < self.options.max_batch
            && let Some(&(number, answer)) = self.waiting.front()
        {
            let open = &self.requests[&number];
            let limit = self.limit(&open.request);
            let missing = if open.cached.is_some() { 0 } else { open.request.prompt.len() };
            if missing > 0 && new_tokens > 0 && new_tokens + missing > self.options.prefill_tokens {
                break;
            }
            let Some(prompt_rows) = self.cache.take(missing) else { break };
            let Some(rows) = self.cache.take(limit - 1) else {
                self.cache.give(prompt_rows);
                break;
            };
            if missing > 0 {
                new_tokens += missing;
                let cached = CachedPrompt { rows: prompt_rows, logits: Vec::new() };
                self.requests.get_mut(&number).expect("found above").cached = Some(cached);
                new_prompts.push(number);
            }
            self.waiting.pop_front();
            let (tokens, log_probs) = (Vec::with_capacity(limit), Vec::new());
            self.texts.push(Text { request: number, answer, tokens, log_probs, rows, limit });
        }
        new_prompts
    }

    /// Computes the keys and values of new prompts, and the logits after each.
    fn prefill(&mut self, weights: &mut dyn WeightSource, new_prompts: &[usize]) -> Result<()> {
        let (mut tokens, mut segments) = (Vec::new(), Vec::new());
        let (mut rows, mut last) = (Vec::new(), Vec::new());
        for number in new_prompts {
            let Open { request, cached, .. } = &self.requests[number];
            let start = tokens.len() as u32;
            tokens.extend_from_slice(&request.prompt);
            let end = tokens.len() as u32;
            segments.push(Segment { range: start..end, parent: None, first_position: 0 });
            rows.push(cached.as_ref().expect("admitted").rows.start);
            last.push(end - 1);
        }
        let forest = Forest::new(tokens, segments, Vec::new(), 0)?;
        let mut attend = Prefill { cache: &mut self.cache, forest: &forest, rows: &rows };
        let (x, _) =
            self.walk.blocks_with(weights, &forest.tokens, &mut attend, Keep::Nothing, Some(&last), false)?;
        let logits = self.walk.head_logits(weights, x.policy.view())?;
        let logits = ops::read_f32(self.walk.device, logits.view())?;
        for (number, row) in new_prompts.iter().zip(logits.chunks_exact(self.vocabulary())) {
            let cached = self.requests.get_mut(number).and_then(|open| open.cached.as_mut());
            cached.expect("admitted").logits = row.to_vec();
        }
        Ok(())
    }

    /// The logits after the prompts of the texts from `first` on.
    fn first_logits(&self, first: usize) -> Result<Tensor> {
        let texts = &self.texts[first..];
        let device = self.walk.device;
        let mut logits = device.alloc(Kind::Head, texts.len(), self.vocabulary(), DType::F32)?;
        for (row, text) in texts.iter().enumerate() {
            let prompt = self.requests[&text.request].cached.as_ref().expect("it is kept for its answers");
            ops::write_f32(device, &prompt.logits, logits.view_mut().row_range(row..row + 1))?;
        }
        Ok(logits)
    }

    /// Continues every text by its last token: the next one's logits `[texts, V]`.
    fn continue_all(&mut self, weights: &mut dyn WeightSource) -> Result<Tensor> {
        let mut visible = Visible { offsets: vec![0], ranges: Vec::new() };
        let (mut tokens, mut positions, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for text in &self.texts {
            let Open { request, cached, .. } = &self.requests[&text.request];
            let prompt = &cached.as_ref().expect("it is kept for its answers").rows;
            let length = text.tokens.len() as u32;
            tokens.push(*text.tokens.last().expect("its first token came with the prompt"));
            positions.push(request.prompt.len() as u32 + length - 1);
            rows.push(text.rows.start + length - 1);
            visible.ranges.extend([prompt.clone(), text.rows.start..text.rows.start + length]);
            visible.offsets.push(visible.ranges.len() as u32);
        }
        let mut attend =
            Step { cache: &mut self.cache, positions: &positions, rows: &rows, visible: &visible };
        let (x, _) = self.walk.blocks_with(weights, &tokens, &mut attend, Keep::Nothing, None, false)?;
        self.walk.head_logits(weights, x.policy.view())
    }

    /// Draws the next token of each text from `first` on, of which these are the logits; those that end leave the batch.
    fn draw(
        &mut self,
        mut logits: Tensor,
        first: usize,
        on_token: OnToken,
        ended: &mut Vec<Answer>,
    ) -> Result<()> {
        let (device, head) = (self.walk.device, &self.walk.decoder.spec().head.shape);
        let mut values = ops::read_f32(device, logits.view())?;
        let rows = values.chunks_exact_mut(self.vocabulary());
        let drawn = rows
            .zip(&self.texts[first..])
            .map(|(row, text)| {
                let Request { prompt, number, sampling, .. } = &self.requests[&text.request].request;
                let place = [*number, text.answer as u64, text.tokens.len() as u64];
                sampling.draw(device, row, head, [prompt, &text.tokens], place)
            })
            .collect::<Result<Vec<u32>>>()?;
        if self.options.log_probs {
            let rows: Vec<u32> = (0..drawn.len() as u32).collect();
            let targets = Targets { rows: &rows, targets: &drawn };
            ops::score_logits(device, logits.view_mut(), targets, head, &mut self.scores)?;
        }
        drop(logits);
        let continued = self.texts.split_off(first);
        for (i, (mut text, token)) in continued.into_iter().zip(drawn).enumerate() {
            let log_prob = if self.options.log_probs { self.scores.log_prob[i] } else { f32::NAN };
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
            match finish.or((flow == Flow::End).then_some(Finish::Stop)) {
                None => self.texts.push(text),
                Some(finish) => ended.push(self.end(text, finish)),
            }
        }
        Ok(())
    }

    /// Takes a finished text out of the cache, and its prompt if it was the last answer to it.
    fn end(&mut self, text: Text, finish: Finish) -> Answer {
        self.cache.give(text.rows.clone());
        let open = self.requests.get_mut(&text.request).expect("it has answers under way");
        open.remaining -= 1;
        if open.remaining == 0
            && let Some(Open { cached: Some(prompt), .. }) = self.requests.remove(&text.request)
        {
            self.cache.give(prompt.rows);
        }
        text.end(finish)
    }

    fn vocabulary(&self) -> usize {
        self.walk.decoder.spec().vocab_size
    }
}

impl Text {
    fn end(self, finish: Finish) -> Answer {
        let Self { request, answer, tokens, log_probs, .. } = self;
        Answer { request, answer, tokens, log_probs, finish }
    }
}
