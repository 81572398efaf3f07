//! One model to sample from: its forward pass and its cache.

use tandem_kernels::{Tensor, ops};

use super::batch::{NextTokens, Prompts};
use super::cache::{Cache, CacheSize, Prefill, Step};
use crate::layers::{BatchCapacity, LayerExecutor};
use crate::weights::WeightSource;
use crate::{ModelError, Result};

/// Model with its cache; models of a mixture use the same cache rows for the same text.
pub(super) struct Model<'a> {
    pub(super) walk: LayerExecutor<'a>,
    pub(super) room: PassRoom,
    cache: Cache,
}

/// Capacities that passes allocate.
#[derive(Clone, Copy, Default)]
pub(super) struct PassRoom {
    /// Capacity of a prefill.
    pub(super) prefill: BatchCapacity,
    /// Capacity of a step, which has a token of every completion.
    pub(super) step: BatchCapacity,
}

impl<'a> Model<'a> {
    /// Allocates a cache.
    pub(super) fn new(walk: LayerExecutor<'a>, size: CacheSize, room: PassRoom) -> Result<Self> {
        let LayerExecutor { decoder, device, dtype, .. } = walk;
        let refused = |problem: &str| Err(ModelError::Invalid(problem.to_owned()));
        walk.check_split()?;
        if decoder.stage().count > 1 && walk.stages.is_none() {
            return refused("a stage of a decoder cannot generate without the others");
        }
        if decoder.spec().head.is_score() {
            return refused("a reward model gives scores and no text");
        }
        let walk = LayerExecutor { dropout: None, noise: None, host: None, room: room.prefill, ..walk };
        Ok(Self { walk, room, cache: Cache::new(decoder, device, dtype, size)? })
    }

    pub(super) fn vocabulary(&self) -> usize {
        self.walk.decoder.whole().spec().vocab_size
    }

    /// Caches prompts; returns the logits after each, `[prompts, V]`, on the last stage.
    pub(super) fn prefill(
        &mut self,
        weights: &mut dyn WeightSource,
        prompts: &Prompts,
    ) -> Result<Option<Tensor>> {
        let (tokens, last) = (prompts.tokens(), &prompts.last[..]);
        let mut attend = Prefill { cache: &mut self.cache, prompts };
        let x = self.walk.generate_blocks(weights, tokens, &mut attend, Some(last))?;
        let logits = |x: Tensor| self.walk.head_logits(weights, x.view(), tokens.len(), Some(last));
        x.map(logits).transpose()
    }

    /// Extends every completion by a token; returns the logits after each, `[completions, V]`, on the last
    /// stage. On a GPU, steps of as many completions are one CUDA graph ([`Device::repeated`]).
    ///
    /// [`Device::repeated`]: tandem_kernels::Device::repeated
    pub(super) fn step(
        &mut self,
        weights: &mut dyn WeightSource,
        next: &NextTokens,
    ) -> Result<Option<Tensor>> {
        let walk = LayerExecutor { room: self.room.step, ..self.walk };
        let (cache, tokens) = (&mut self.cache, next.tokens.len());
        let runs = next.runs()?;
        let key = (cache.address(), tokens);
        let mut step = || {
            let mut attend = Step { cache, next, runs: &runs };
            let x = walk.generate_blocks(weights, &next.tokens, &mut attend, None)?;
            x.map(|x| walk.head_logits(weights, x.view(), tokens, None)).transpose()
        };
        // Other ranks take part in the step of a shard or a stage.
        if walk.split.is_some() || walk.stages.is_some() { step() } else { walk.device.repeated(key, step) }
    }

    pub(super) fn read(&self, logits: &Tensor) -> Result<Vec<f32>> {
        Ok(ops::read_f32(self.walk.device, logits.view())?)
    }

    /// Reads logits from the device into `values`.
    pub(super) fn read_into(&self, logits: &Tensor, values: &mut Vec<f32>) -> Result<()> {
        Ok(ops::read_f32_into(self.walk.device, logits.view(), values)?)
    }
}
