//! Token and position look-up: the start of the residual stream.

use tandem_kernels::{DType, Forest, Tensor, ops};

use super::Walk;
use crate::layout::{LayerId, Part};
use crate::weights::{GradientSink, WeightSource};
use crate::{ModelError, Result};

impl Walk<'_> {
    /// `x[t] = scale · token_table[tokens[t]] (+ position_table[positions[t]])`, `[T,D]` f32 of this rank's rows. What a token
    /// looks up comes from the rank that holds it.
    pub(crate) fn embed(
        &self,
        weights: &mut dyn WeightSource,
        tokens: &[u32],
        positions: &[u32],
    ) -> Result<Tensor> {
        let spec = self.decoder.spec();
        let mut x = self.alloc(tokens.len(), spec.hidden_size, DType::F32)?;
        let layer = weights.fetch(LayerId::Embedding)?;
        let missing = || ModelError::Invalid("the weight source gave no token table".into());
        let table = layer.precise(Part::TokenTable).ok_or_else(missing)?;
        let tokens = self.own_tokens(tokens)?;
        ops::embedding(self.device, table, &tokens, spec.embedding.scale, x.view_mut(), false)?;
        if let Some(table) = layer.get(Part::PositionTable).filter(|_| self.leads()) {
            ops::embedding(self.device, table, positions, 1.0, x.view_mut(), true)?;
        }
        weights.release(LayerId::Embedding);
        self.join(x, &self.shares(tokens.len()))
    }

    /// The look-up's share of the tables' gradients; the end of the walk.
    pub(super) fn embedding_backward(
        &self,
        grads: &mut dyn GradientSink,
        forest: &Forest,
        dx: Tensor,
    ) -> Result<()> {
        let scale = self.decoder.spec().embedding.scale;
        let shares = self.shares(forest.num_tokens());
        let whole = self.whole(dx.view(), &shares, DType::F32)?;
        let dx = whole.unwrap_or(dx);
        let mut gradients = grads.open(LayerId::Embedding)?;
        if let Some(table) = gradients.get_mut(Part::TokenTable) {
            let tokens = self.own_tokens(&forest.tokens)?;
            ops::embedding_backward(self.device, &tokens, scale, dx.view(), table)?;
        }
        if let Some(table) = gradients.get_mut(Part::PositionTable) {
            ops::embedding_backward(self.device, &forest.positions, 1.0, dx.view(), table)?;
        }
        drop(dx);
        grads.emit(LayerId::Embedding)
    }
}
