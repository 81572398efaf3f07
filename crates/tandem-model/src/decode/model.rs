//! One model to sample from: its forward pass and its cache.

use tandem_kernels::{Tensor, ops};

use super::batch::{NextTokens, Prompts};
use super::cache::{Cache, CacheSize, Prefill, Step};
use crate::layers::{BatchCapacity, LayerExecutor, SavePolicy};
use crate::weights::WeightSource;
use crate::{ModelError, Result};

/// Model with its cache; models of a mixture use the same cache rows for the same text.
pub(super) struct Model<'a> {
    pub(super) walk: LayerExecutor<'a>,
    cache: Cache,
}

impl<'a> Model<'a> {
    /// Allocates a cache.
    pub(super) fn new(walk: LayerExecutor<'a>, size: CacheSize) -> Result<Self> {
        let LayerExecutor { decoder, device, dtype, .. } = walk;
        let refused = |problem: &str| Err(ModelError::Invalid(problem.to_owned()));
        walk.check_split()?;
        if decoder.stage().count > 1 {
            return refused("a stage of a decoder cannot generate");
        }
        if decoder.spec().head.is_score() {
            return refused("a reward model gives scores and no text");
        }
        let walk =
            LayerExecutor { dropout: None, noise: None, host: None, room: BatchCapacity::default(), ..walk };
        Ok(Self { walk, cache: Cache::new(decoder, device, dtype, size)? })
    }

    pub(super) fn vocabulary(&self) -> usize {
        self.walk.decoder.whole().spec().vocab_size
    }

    /// Caches prompts; returns the logits after each, `[prompts, V]`.
    pub(super) fn prefill(&mut self, weights: &mut dyn WeightSource, prompts: &Prompts) -> Result<Tensor> {
        let Prompts { forest, last, .. } = prompts;
        let mut attend = Prefill { cache: &mut self.cache, prompts };
        let (x, _) = self.walk.blocks_with(
            weights,
            &forest.tokens,
            &mut attend,
            SavePolicy::Nothing,
            Some(last),
            false,
        )?;
        self.walk.head_logits(weights, x.policy.view(), forest.num_tokens(), Some(last))
    }

    /// Extends every completion by a token; returns the logits after each, `[completions, V]`.
    pub(super) fn step(&mut self, weights: &mut dyn WeightSource, next: &NextTokens) -> Result<Tensor> {
        let runs = next.runs()?;
        let mut attend = Step { cache: &mut self.cache, next, runs: &runs };
        let (x, _) =
            self.walk.blocks_with(weights, &next.tokens, &mut attend, SavePolicy::Nothing, None, false)?;
        self.walk.head_logits(weights, x.policy.view(), next.tokens.len(), None)
    }

    pub(super) fn read(&self, logits: &Tensor) -> Result<Vec<f32>> {
        Ok(ops::read_f32(self.walk.device, logits.view())?)
    }

    /// Reads logits from the device into `values`.
    pub(super) fn read_into(&self, logits: &Tensor, values: &mut Vec<f32>) -> Result<()> {
        Ok(ops::read_f32_into(self.walk.device, logits.view(), values)?)
    }
}
