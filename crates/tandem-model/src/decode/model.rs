//! A model that text is generated from: its walk and its cache.

use tandem_kernels::{Tensor, ops};

use super::batch::{NextTokens, Prompts};
use super::cache::{Cache, Prefill, Step};
use crate::layers::{Keep, Room, Walk};
use crate::weights::WeightSource;
use crate::{ModelError, Result};

/// One of the models; rows of its cache are the same texts' as of any other's.
pub(super) struct Model<'a> {
    pub(super) walk: Walk<'a>,
    cache: Cache,
}

impl<'a> Model<'a> {
    /// Reserves a cache of so many rows.
    pub(super) fn new(walk: Walk<'a>, rows: usize) -> Result<Self> {
        let Walk { decoder, device, dtype, .. } = walk;
        let refused = |problem: &str| Err(ModelError::Invalid(problem.to_owned()));
        walk.check_split()?;
        if decoder.stage().count > 1 {
            return refused("a stage of a decoder cannot generate");
        }
        if decoder.spec().head.is_score() {
            return refused("a reward model gives scores and no text");
        }
        let walk = Walk { dropout: None, host: None, room: Room::default(), ..walk };
        Ok(Self { walk, cache: Cache::new(decoder, device, dtype, rows)? })
    }

    /// Tokens that there are.
    pub(super) fn vocabulary(&self) -> usize {
        self.walk.decoder.whole().spec().vocab_size
    }

    /// Computes keys and values of prompts: the logits after each, `[prompts, V]`.
    pub(super) fn prefill(&mut self, weights: &mut dyn WeightSource, prompts: &Prompts) -> Result<Tensor> {
        let Prompts { forest, last, .. } = prompts;
        let mut attend = Prefill { cache: &mut self.cache, prompts };
        let (x, _) =
            self.walk.blocks_with(weights, &forest.tokens, &mut attend, Keep::Nothing, Some(last), false)?;
        self.walk.head_logits(weights, x.policy.view(), forest.num_tokens(), Some(last))
    }

    /// Goes on by a token of every text: the logits after each, `[texts, V]`.
    pub(super) fn step(&mut self, weights: &mut dyn WeightSource, next: &NextTokens) -> Result<Tensor> {
        let mut attend = Step { cache: &mut self.cache, next };
        let (x, _) = self.walk.blocks_with(weights, &next.tokens, &mut attend, Keep::Nothing, None, false)?;
        self.walk.head_logits(weights, x.policy.view(), next.tokens.len(), None)
    }

    /// Numbers from the device.
    pub(super) fn read(&self, logits: &Tensor) -> Result<Vec<f32>> {
        Ok(ops::read_f32(self.walk.device, logits.view())?)
    }

    /// The same, in place of other numbers.
    pub(super) fn read_into(&self, logits: &Tensor, values: &mut Vec<f32>) -> Result<()> {
        Ok(ops::read_f32_into(self.walk.device, logits.view(), values)?)
    }
}
