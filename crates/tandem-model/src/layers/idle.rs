//! Passes without a batch, on a rank that has no micro-batch while others compute.
//!
//! With sharded weights or reduced gradients, every rank must make the same calls in the same
//! order: see [`crate::weights`].

use super::{DivergencePass, LayerExecutor};
use crate::Result;
use crate::layout::LayerId;
use crate::weights::{GradientSink, WeightSource};

impl LayerExecutor<'_> {
    /// Makes the calls of [`LayerExecutor::stage_forward`] to the source.
    pub fn idle_forward(&self, weights: &mut dyn WeightSource) -> Result<()> {
        let (own, stage) = (self.decoder.blocks(), self.decoder.stage());
        if stage.is_first() {
            weights.prefetch(LayerId::Embedding)?;
        }
        weights.prefetch(LayerId::Block(own.start))?;
        if stage.is_first() {
            touch(weights, LayerId::Embedding)?;
        }
        for index in own {
            self.prefetch_after(weights, index)?;
            touch(weights, LayerId::Block(index))?;
        }
        if stage.is_last() { self.idle_head_forward(weights) } else { Ok(()) }
    }

    /// Makes the calls of [`LayerExecutor::stage_backward`], with gradients of zero; also to the weights of
    /// a teacher, if others begin with a divergence from it.
    pub fn idle_backward(
        &self,
        weights: &mut dyn WeightSource,
        grads: &mut dyn GradientSink,
        mut divergence: Option<DivergencePass>,
    ) -> Result<()> {
        let (own, stage) = (self.decoder.blocks(), self.decoder.stage());
        if let Some(last) = own.clone().next_back() {
            weights.prefetch(LayerId::Block(last))?;
        }
        if stage.is_last() {
            self.idle_head_backward(weights, grads, divergence.as_mut())?;
        }
        for index in own.clone().rev() {
            let layer = LayerId::Block(index);
            if index > own.start {
                weights.prefetch(LayerId::Block(index - 1))?;
            }
            touch(weights, layer)?;
            grads.open(layer)?;
            grads.emit(layer)?;
        }
        if !stage.is_first() {
            return Ok(());
        }
        if self.looks_up_terms() {
            touch(weights, LayerId::Embedding)?;
        }
        grads.open(LayerId::Embedding)?;
        grads.emit(LayerId::Embedding)
    }

    /// Makes the calls of [`LayerExecutor::divergence`] to the student's source.
    ///
    /// # Errors
    /// A layer cannot be fetched.
    pub fn idle_divergence(&self, weights: &mut dyn WeightSource) -> Result<()> {
        touch(weights, LayerId::Head)?;
        touch(weights, self.head_weight().0)
    }

    pub(super) fn idle_head_forward(&self, weights: &mut dyn WeightSource) -> Result<()> {
        touch(weights, LayerId::Head)?;
        touch(weights, self.head_weight().0)
    }

    pub(super) fn idle_head_backward(
        &self,
        weights: &mut dyn WeightSource,
        grads: &mut dyn GradientSink,
        divergence: Option<&mut DivergencePass>,
    ) -> Result<()> {
        let (layer, _) = self.head_weight();
        touch(weights, LayerId::Head)?;
        touch(weights, layer)?;
        // A rank waits in each call for the others, so that calls to both models' weights have one order.
        divergence.map_or(Ok(()), DivergencePass::idle)?;
        if layer != LayerId::Head {
            grads.open(layer)?;
            grads.emit(layer)?;
        }
        touch(weights, LayerId::Head)?;
        grads.open(LayerId::Head)?;
        grads.emit(LayerId::Head)
    }
}

/// Takes part in the transfers of a layer that no product reads.
fn touch(weights: &mut dyn WeightSource, layer: LayerId) -> Result<()> {
    weights.fetch_packed(layer)?;
    weights.release(layer);
    Ok(())
}
