//! Logits over the whole vocabulary, for generation and tests: training and evaluation never hold
//! them.

use tandem_kernels::{DType, Extent, Forest, MemoryKind, Tensor, View, ViewMut, ops};

use super::attention::ForestAttention;
use super::norm::{FINAL_NORM, norm};
use super::{LayerExecutor, SavePolicy};
use crate::Result;
use crate::layout::TensorParallelShard;
use crate::layout::{LayerId, ParamKind};
use crate::weights::WeightSource;

impl LayerExecutor<'_> {
    /// Computes the logits `[R, V]` f32 of the given rows of the token axis, before the head's
    /// scale and softcap. Under tensor parallelism rows ascend, and every rank gets the logits of
    /// all tokens.
    pub fn logits(&self, weights: &mut dyn WeightSource, forest: &Forest, rows: &[u32]) -> Result<Tensor> {
        self.check_stage()?;
        let mut attend = ForestAttention { device: self.device, forest };
        let (x, _) =
            self.blocks_with(weights, &forest.tokens, &mut attend, SavePolicy::Nothing, Some(rows), false)?;
        self.head_logits(weights, x.policy.view(), forest.num_tokens(), Some(rows))
    }

    /// Computes logits `[R,V]` f32, before the head's scale and softcap, of `rows` of `num_tokens`
    /// tokens, or of all. `hidden` are this rank's rows of the residual stream.
    pub(crate) fn head_logits(
        &self,
        weights: &mut dyn WeightSource,
        hidden: View,
        num_tokens: usize,
        rows: Option<&[u32]>,
    ) -> Result<Tensor> {
        let shares = rows.map_or_else(|| self.shares(num_tokens), |rows| self.shares_of(rows, num_tokens));
        let normed = norm(&self.of_head(), &weights.fetch(LayerId::Head)?, FINAL_NORM, hidden, &shares)?;
        weights.release(LayerId::Head);
        let (x, vocabulary) = (normed.output(), self.decoder.whole().spec().vocab_size);
        let scored = Extent::new(x.rows(), self.room.scored);
        let Some(split) = self.split else {
            let mut logits =
                self.device.alloc_in(MemoryKind::Head, scored, Extent::exact(vocabulary), DType::F32)?;
            self.logits_into(weights, x, logits.view_mut())?;
            return Ok(logits);
        };
        // The logits of each rank's tokens, one rank's after another's.
        let TensorParallelShard { index, count } = self.decoder.slice();
        let tokens: Vec<_> =
            (0..count).map(|index| TensorParallelShard { index, count }.range(vocabulary)).collect();
        let counts: Vec<usize> = tokens.iter().map(|tokens| x.rows() * tokens.len()).collect();
        let place = |index: usize| x.rows() * tokens[index].start..x.rows() * tokens[index].end;
        let numbers = Extent::new(x.rows() * vocabulary, scored.room() * vocabulary);
        let mut parts = self.device.alloc_in(MemoryKind::Head, numbers, Extent::exact(1), DType::F32)?;
        let own = parts.view_mut().row_range(place(index)).reshape(x.rows(), tokens[index].len());
        self.logits_into(weights, x, own)?;
        split.gather_rows(self.device, &mut parts, &counts)?;
        let mut logits =
            self.device.alloc_in(MemoryKind::Head, scored, Extent::exact(vocabulary), DType::F32)?;
        for (index, tokens) in tokens.iter().enumerate() {
            let part = parts.view().row_range(place(index)).reshape(x.rows(), tokens.len());
            ops::cast(self.device, part, logits.view_mut().col_range(tokens.clone()))?;
        }
        Ok(logits)
    }

    /// Computes the logits of this rank's tokens from normalised rows.
    fn logits_into(&self, weights: &mut dyn WeightSource, x: View, logits: ViewMut) -> Result<()> {
        let (layer, part) = self.head_weight();
        let head = weights.fetch(layer)?;
        let (weight, bias) = (head.require(part)?, head.get(ParamKind::HeadBias));
        match head.low_rank(ParamKind::HeadWeight) {
            None => ops::sharded_linear(self.device, x, weight, None, bias, None, logits)?,
            Some(term) => {
                let (_, hidden) = self.terms_hidden(&term, x)?;
                let low_rank = ops::LowRank { h: hidden.view(), b: term.b };
                ops::sharded_linear_low_rank(self.device, x, weight, low_rank, bias, logits)?;
            }
        }
        weights.release(layer);
        Ok(())
    }
}
