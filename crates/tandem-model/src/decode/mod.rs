//! Generation with a key/value cache: several prompts, several answers to each, in one batch that texts enter and leave.
//!
//! A prompt's keys and values are computed and kept once for all of its answers. Each step continues every text that
//! is under way by one token; a text that ends makes room for the next one at once. Products of few rows may differ
//! from products of many in the last bit, so a text depends on what else is in the batch only where two tokens
//! are equally likely to the last bit.

mod cache;
mod sample;

pub use sample::Sampling;

use std::collections::{BTreeMap, VecDeque};
use std::ops::{ControlFlow, Range};

use tandem_kernels::ops::Visible;
use tandem_kernels::{DType, Device, Forest, Segment, ops};

use crate::decoder::Decoder;
use crate::walk::{Checkpointing, Keep, Walk};
use crate::weights::WeightSource;
use crate::{ModelError, Result};
use cache::{Cache, Prefill, Step};

/// What to generate and within what memory.
#[derive(Clone, Debug, PartialEq)]
pub struct GeneratorOptions {
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Answers to each prompt.
    pub num_answers: usize,
    /// Tokens of an answer at most, its end token included.
    pub max_new_tokens: usize,
    /// Tokens that end an answer; it holds the one that did. Usually the spec's `eos_token_ids`.
    pub stop: Vec<u32>,
    /// Answers under way at the same time, at most.
    pub max_batch: usize,
    /// Rows of the cache: tokens of prompts and answers under way.
    pub cache_tokens: usize,
}

/// One token, as it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewToken {
    /// Number of the prompt.
    pub prompt: usize,
    /// Number of the answer to it.
    pub answer: usize,
    /// Number of the token in the answer.
    pub index: usize,
    /// The token.
    pub token: u32,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// With one of the stop tokens, which is its last.
    Stop,
    /// It has as many tokens as were allowed, or reached the decoder's last position.
    Length,
    /// The callback broke off.
    Interrupted,
}

/// A finished answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Number of the prompt.
    pub prompt: usize,
    /// Number of the answer to it.
    pub answer: usize,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

/// Generates text. The cache is allocated once and kept from call to call.
pub struct Generator<'a> {
    walk: Walk<'a>,
    options: GeneratorOptions,
    cache: Cache,
}

/// A prompt whose keys and values are in the cache.
struct CachedPrompt {
    rows: Range<u32>,
    /// Logits after its last token `[V]`, from which each answer's first token is drawn.
    logits: Vec<f32>,
}

/// An answer under way.
struct Text {
    prompt: usize,
    answer: usize,
    tokens: Vec<u32>,
    /// Cache rows for its tokens: all but the last, which nothing follows.
    rows: Range<u32>,
    /// Tokens it may have.
    limit: usize,
}

/// A call's bookkeeping.
struct Run<'p> {
    prompts: &'p [Vec<u32>],
    /// `(prompt, answer)` not yet begun.
    waiting: VecDeque<(usize, usize)>,
    /// Answers of each prompt that have not ended.
    remaining: Vec<usize>,
    cached: BTreeMap<usize, CachedPrompt>,
    texts: Vec<Text>,
    answers: Vec<Answer>,
}

/// Told about every token; breaks off the generation if it likes.
pub type OnToken<'a> = &'a mut dyn FnMut(NewToken) -> ControlFlow<()>;

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
        options.sampling.check()?;
        let GeneratorOptions { num_answers, max_new_tokens, max_batch, cache_tokens, .. } = options;
        if [num_answers, max_new_tokens, max_batch, cache_tokens].contains(&0) {
            return Err(ModelError::Invalid(format!(
                "answers ({num_answers}), new tokens ({max_new_tokens}), batch ({max_batch}) and cache \
                 ({cache_tokens}) must all be at least 1"
            )));
        }
        if decoder.slice().count > 1 {
            return Err(ModelError::Invalid("a slice of a decoder cannot generate".to_owned()));
        }
        let cache = Cache::new(decoder, device, dtype, cache_tokens)?;
        let walk = Walk::new(decoder, device, dtype, Checkpointing::None);
        Ok(Self { walk, options, cache })
    }

    /// Answers every prompt; answers come in the order of prompts. `on_token` sees each token as soon as it is drawn;
    /// if it breaks off, answers are returned as far as they got.
    ///
    /// # Errors
    /// If a prompt is empty, fills the decoder's positions, or does not fit the cache with one answer; or weights
    /// cannot be had.
    pub fn generate(
        &mut self,
        weights: &mut dyn WeightSource,
        prompts: &[Vec<u32>],
        on_token: OnToken,
    ) -> Result<Vec<Answer>> {
        self.check(prompts)?;
        let answers = self.options.num_answers;
        let mut run = Run {
            prompts,
            waiting: (0..prompts.len()).flat_map(|p| (0..answers).map(move |a| (p, a))).collect(),
            remaining: vec![answers; prompts.len()],
            cached: BTreeMap::new(),
            texts: Vec::new(),
            answers: Vec::new(),
        };
        let result = self.run(weights, &mut run, on_token);
        // Whatever happened, the cache is empty for the next call.
        for text in run.texts.drain(..) {
            self.cache.give(text.rows.clone());
            run.answers.push(text.end(Finish::Interrupted));
        }
        self.forget(&mut run);
        result?;
        run.answers.sort_by_key(|a| (a.prompt, a.answer));
        Ok(run.answers)
    }

    fn check(&self, prompts: &[Vec<u32>]) -> Result<()> {
        for (index, prompt) in prompts.iter().enumerate() {
            let (tokens, positions) = (prompt.len(), self.walk.decoder.positions());
            let problem = if tokens == 0 {
                "is empty".into()
            } else if tokens >= positions {
                format!(
                    "has {tokens} tokens, which leaves no room for an answer within {positions} positions"
                )
            } else if tokens + self.limit(tokens) - 1 > self.options.cache_tokens {
                format!(
                    "has {tokens} tokens and its answer up to {}; the cache holds {}",
                    self.limit(tokens),
                    self.options.cache_tokens
                )
            } else {
                continue;
            };
            return Err(ModelError::Invalid(format!("prompt {index} {problem}")));
        }
        Ok(())
    }

    /// Tokens that an answer to a prompt of that length may have.
    fn limit(&self, prompt_tokens: usize) -> usize {
        self.options.max_new_tokens.min(self.walk.decoder.positions() - prompt_tokens)
    }

    fn run(&mut self, weights: &mut dyn WeightSource, run: &mut Run, on_token: OnToken) -> Result<()> {
        loop {
            let first = run.texts.len();
            let new_prompts = self.admit(run);
            if !new_prompts.is_empty() {
                self.prefill(weights, run, &new_prompts)?;
            }
            let admitted = &run.texts[first..];
            let drawn: Vec<u32> =
                admitted.iter().map(|text| self.draw(&run.cached[&text.prompt].logits, text)).collect();
            if self.accept(run, first, &drawn, on_token).is_break() {
                return Ok(());
            }
            if run.texts.is_empty() {
                if run.waiting.is_empty() {
                    return Ok(());
                }
                if drawn.is_empty() {
                    // A prompt kept for its next answers may lie in the way of them. Alone, each fits.
                    self.forget(run);
                }
                continue;
            }
            let logits = self.step(weights, run)?;
            let rows = logits.chunks_exact(self.walk.decoder.spec().vocab_size);
            let drawn: Vec<u32> = rows.zip(&run.texts).map(|(row, text)| self.draw(row, text)).collect();
            if self.accept(run, 0, &drawn, on_token).is_break() {
                return Ok(());
            }
        }
    }

    /// Begins waiting answers while there is room; returns the prompts that are new to the cache.
    fn admit(&mut self, run: &mut Run) -> Vec<usize> {
        let mut new_prompts = Vec::new();
        while run.texts.len() < self.options.max_batch
            && let Some(&(prompt, answer)) = run.waiting.front()
        {
            let tokens = run.prompts[prompt].len();
            let missing = if run.cached.contains_key(&prompt) { 0 } else { tokens };
            let Some(prompt_rows) = self.cache.take(missing) else { break };
            let limit = self.limit(tokens);
            let Some(rows) = self.cache.take(limit - 1) else {
                self.cache.give(prompt_rows);
                break;
            };
            if !prompt_rows.is_empty() {
                run.cached.insert(prompt, CachedPrompt { rows: prompt_rows, logits: Vec::new() });
                new_prompts.push(prompt);
            }
            run.waiting.pop_front();
            run.texts.push(Text { prompt, answer, tokens: Vec::new(), rows, limit });
        }
        new_prompts
    }

    /// Computes the keys and values of new prompts, and the logits after each.
    fn prefill(
        &mut self,
        weights: &mut dyn WeightSource,
        run: &mut Run,
        new_prompts: &[usize],
    ) -> Result<()> {
        let (mut tokens, mut segments) = (Vec::new(), Vec::new());
        let (mut rows, mut last) = (Vec::new(), Vec::new());
        for prompt in new_prompts {
            let start = tokens.len() as u32;
            tokens.extend_from_slice(&run.prompts[*prompt]);
            let end = tokens.len() as u32;
            segments.push(Segment { range: start..end, parent: None, first_position: 0 });
            rows.push(run.cached[prompt].rows.start);
            last.push(end - 1);
        }
        let forest = Forest::new(tokens, segments, Vec::new(), 0)?;
        let mut attend = Prefill { cache: &mut self.cache, forest: &forest, rows: &rows };
        let (x, _) =
            self.walk.blocks_with(weights, &forest.tokens, &mut attend, Keep::Nothing, Some(&last), false)?;
        let logits = self.walk.head_logits(weights, x.policy.view())?;
        let logits = ops::read_f32(self.walk.device, logits.view())?;
        for (prompt, row) in new_prompts.iter().zip(logits.chunks_exact(self.walk.decoder.spec().vocab_size))
        {
            run.cached.get_mut(prompt).expect("admitted above").logits = row.to_vec();
        }
        Ok(())
    }

    /// Continues every text by its last token: the next one's logits `[texts, V]`.
    fn step(&mut self, weights: &mut dyn WeightSource, run: &Run) -> Result<Vec<f32>> {
        let mut visible = Visible { offsets: vec![0], ranges: Vec::new() };
        let (mut tokens, mut positions, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for text in &run.texts {
            let (prompt, length) = (&run.cached[&text.prompt].rows, text.tokens.len() as u32);
            tokens.push(*text.tokens.last().expect("its first token came with the prompt"));
            positions.push(run.prompts[text.prompt].len() as u32 + length - 1);
            rows.push(text.rows.start + length - 1);
            visible.ranges.extend([prompt.clone(), text.rows.start..text.rows.start + length]);
            visible.offsets.push(visible.ranges.len() as u32);
        }
        let mut attend =
            Step { cache: &mut self.cache, positions: &positions, rows: &rows, visible: &visible };
        let (x, _) = self.walk.blocks_with(weights, &tokens, &mut attend, Keep::Nothing, None, false)?;
        let logits = self.walk.head_logits(weights, x.policy.view())?;
        Ok(ops::read_f32(self.walk.device, logits.view())?)
    }

    fn draw(&self, logits: &[f32], text: &Text) -> u32 {
        let place = [text.prompt, text.answer, text.tokens.len()].map(|n| n as u64);
        self.options.sampling.draw(logits, &self.walk.decoder.spec().head.shape, place)
    }

    /// Appends drawn tokens to the texts from `first` on; those that end leave the batch.
    fn accept(&mut self, run: &mut Run, first: usize, drawn: &[u32], on_token: OnToken) -> ControlFlow<()> {
        let mut flow = ControlFlow::Continue(());
        let continued = run.texts.split_off(first);
        for (mut text, &token) in continued.into_iter().zip(drawn) {
            if flow.is_break() {
                run.texts.push(text);
                continue;
            }
            let Text { prompt, answer, .. } = text;
            flow = on_token(NewToken { prompt, answer, index: text.tokens.len(), token });
            text.tokens.push(token);
            let finish = if self.options.stop.contains(&token) {
                Some(Finish::Stop)
            } else {
                (text.tokens.len() == text.limit).then_some(Finish::Length)
            };
            match finish {
                None => run.texts.push(text),
                Some(finish) => self.end(run, text, finish),
            }
        }
        flow
    }

    /// Takes a finished text out of the cache, and its prompt if it was the last answer to it.
    fn end(&mut self, run: &mut Run, text: Text, finish: Finish) {
        self.cache.give(text.rows.clone());
        run.remaining[text.prompt] -= 1;
        if run.remaining[text.prompt] == 0
            && let Some(prompt) = run.cached.remove(&text.prompt)
        {
            self.cache.give(prompt.rows);
        }
        run.answers.push(text.end(finish));
    }

    /// Takes every prompt out of the cache.
    fn forget(&mut self, run: &mut Run) {
        while let Some((_, prompt)) = run.cached.pop_first() {
            self.cache.give(prompt.rows);
        }
    }
}

impl Text {
    fn end(self, finish: Finish) -> Answer {
        Answer { prompt: self.prompt, answer: self.answer, tokens: self.tokens, finish }
    }
}
