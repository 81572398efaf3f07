//! The batch: what enters it, a step of it, and what leaves it.

use std::collections::{BTreeMap, VecDeque};

use tandem_kernels::ops::{HeadScores, Targets};
use tandem_kernels::{DType, Device, Kind, Tensor, ops};

use super::batch::{NextTokens, Prompts};
use super::model::Model;
use super::rows::Rows;
use super::text::{Open, Text};
use super::{Alone, Answer, Finish, Flow, Meet, NewToken, Request};
use crate::decoder::Decoder;
use crate::walk::{Checkpointing, Walk};
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
    pub(super) model: Model<'a>,
    pub(super) options: GeneratorOptions,
    /// Of the cache.
    pub(super) rows: Rows,
    /// By number.
    pub(super) requests: BTreeMap<usize, Open>,
    next_request: usize,
    /// Answers not yet begun: request and number.
    pub(super) waiting: VecDeque<(usize, usize)>,
    pub(super) texts: Vec<Text>,
    scores: HeadScores,
}

/// Told about every token.
pub type OnToken<'a> = &'a mut dyn FnMut(NewToken) -> Flow;

impl<'a> Generator<'a> {
    /// Reserves the cache on the device, in the compute type.
    ///
    /// # Errors
    /// If an option is out of range, `decoder` is a part of one or a reward model, or the device's memory does not suffice.
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
        let walk = Walk::new(decoder, device, dtype, Checkpointing::None);
        Ok(Self {
            model: Model::new(walk, cache_tokens)?,
            options,
            rows: Rows::new(cache_tokens),
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
            self.rows.give(prompt.rows);
        }
        let end = |text: Text| {
            self.rows.give(text.rows.clone());
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
        self.generate_with(weights, &mut Alone, requests, on_token)
    }

    /// As [`Generator::generate`], together with other ranks: each calls it with requests of its own, or with none, and it returns
    /// when all of them are answered.
    ///
    /// # Errors
    /// As [`Generator::generate`], and if a rank is lost. A rank that fails is lost to the others: they wait for it until `meet`, or
    /// their weights, fail.
    ///
    /// # Panics
    /// If other requests are under way.
    pub fn generate_with(
        &mut self,
        weights: &mut dyn WeightSource,
        meet: &mut dyn Meet,
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
            answers.extend(self.step_with(weights, meet, &mut |mut token| {
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
        self.step_with(weights, &mut Alone, on_token)
    }

    /// As [`Generator::step`], together with other ranks, who call it at the same time: each layer is fetched by all of them, or by
    /// none.
    ///
    /// # Errors
    /// As [`Generator::step`], and if a rank is lost.
    pub fn step_with(
        &mut self,
        weights: &mut dyn WeightSource,
        meet: &mut dyn Meet,
        on_token: OnToken,
    ) -> Result<Vec<Answer>> {
        let mut ended = Vec::new();
        let result = self.advance(weights, meet, on_token, &mut ended);
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
        meet: &mut dyn Meet,
        on_token: OnToken,
        ended: &mut Vec<Answer>,
    ) -> Result<()> {
        let under_way = self.texts.len();
        if meet.any(under_way > 0)? {
            if under_way > 0 {
                let logits = self.model.step(weights, &self.next_tokens())?;
                self.draw(logits, 0, on_token, ended)?;
            } else {
                self.model.walk.idle_forward(weights)?;
            }
        }
        let first = self.texts.len();
        let new_prompts = self.admit();
        if meet.any(!new_prompts.is_empty())? {
            if new_prompts.is_empty() {
                self.model.walk.idle_forward(weights)?;
            } else {
                self.prefill(weights, &new_prompts)?;
            }
        }
        if first < self.texts.len() {
            let logits = self.first_logits(first)?;
            self.draw(logits, first, on_token, ended)?;
        } else if under_way == 0 && !self.is_idle() {
            // Prompts kept for their next answers lie in the way of these. Alone, each fits.
            for open in self.requests.values_mut() {
                if let Some(prompt) = open.cached.take() {
                    self.rows.give(prompt.rows);
                }
            }
        }
        Ok(())
    }

    /// Computes the keys and values of new prompts, and the logits after each.
    fn prefill(&mut self, weights: &mut dyn WeightSource, new_prompts: &[usize]) -> Result<()> {
        let prompts = Prompts::new(new_prompts.iter().map(|number| {
            let open = &self.requests[number];
            (&open.request.prompt[..], open.cached().rows.start)
        }))?;
        let logits = self.model.prefill(weights, &prompts)?;
        let logits = self.model.read(&logits)?;
        for (number, row) in new_prompts.iter().zip(logits.chunks_exact(self.model.vocabulary())) {
            let cached = self.requests.get_mut(number).and_then(|open| open.cached.as_mut());
            cached.expect("admitted").logits = row.to_vec();
        }
        Ok(())
    }

    /// The logits after the prompts of the texts from `first` on.
    fn first_logits(&self, first: usize) -> Result<Tensor> {
        let texts = &self.texts[first..];
        let device = self.model.walk.device;
        let mut logits = device.alloc(Kind::Head, texts.len(), self.model.vocabulary(), DType::F32)?;
        for (row, text) in texts.iter().enumerate() {
            let prompt = self.requests[&text.request].cached();
            ops::write_f32(device, &prompt.logits, logits.view_mut().row_range(row..row + 1))?;
        }
        Ok(logits)
    }

    /// The last token of every text.
    fn next_tokens(&self) -> NextTokens {
        let mut next = NextTokens::new();
        for text in &self.texts {
            let token = *text.tokens.last().expect("its first token came with the prompt");
            let own = text.rows.start..text.rows.start + text.tokens.len() as u32;
            next.push(token, &self.requests[&text.request].cached().rows, own);
        }
        next
    }

    /// Draws the next token of each text from `first` on, of which these are the logits; those that end leave the batch.
    fn draw(
        &mut self,
        mut logits: Tensor,
        first: usize,
        on_token: OnToken,
        ended: &mut Vec<Answer>,
    ) -> Result<()> {
        let Walk { device, decoder, .. } = self.model.walk;
        let head = &decoder.spec().head.shape;
        let mut values = self.model.read(&logits)?;
        let rows = values.chunks_exact_mut(self.model.vocabulary());
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
        self.rows.give(text.rows.clone());
        let open = self.requests.get_mut(&text.request).expect("it has answers under way");
        open.remaining -= 1;
        if open.remaining == 0
            && let Some(Open { cached: Some(prompt), .. }) = self.requests.remove(&text.request)
        {
            self.rows.give(prompt.rows);
        }
        text.end(finish)
    }
}
