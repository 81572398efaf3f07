//! Token and position look-up: the start of the residual stream.

use std::borrow::Cow;

use tandem_kernels::ops::ELSEWHERE;
use tandem_kernels::{DType, Forest, Tensor, ops};

use super::streams::StreamWeights;
use super::{LayerExecutor, PolicyAndReferenceScores};
use crate::layout::{LayerId, ParamKind};
use crate::weights::{GradientSink, LayerGradients, LayerWeights, LowRank, WeightSource};
use crate::{ModelError, Result};

impl LayerExecutor<'_> {
    /// Computes `x[t] = scale · token_table[tokens[t]] (+ position_table[positions[t]])`, this
    /// rank's rows `[T,D]`. Each row comes from the rank that holds the token.
    pub(crate) fn embed(
        &self,
        weights: &mut dyn WeightSource,
        tokens: &[u32],
        positions: &[u32],
        both: bool,
    ) -> Result<PolicyAndReferenceScores<Tensor>> {
        self.device.set_place(format_args!("forward {}", LayerId::Embedding));
        let layer = StreamWeights::fetch(weights, LayerId::Embedding, both, false)?;
        let tokens = self.own_tokens(tokens)?;
        let streams = PolicyAndReferenceScores { policy: (), reference: both.then_some(()) };
        let x = streams.try_map(|(), is_reference| {
            let walk = self.for_stream(is_reference);
            let x = walk.look_up(layer.stream(is_reference), &tokens, positions)?;
            let shares = self.shares(tokens.len());
            let mut x = self.join(x, &shares)?;
            if let Some(noise) = walk.noise {
                let own = shares.own();
                ops::add_noise(self.device, x.view_mut().row_range(0..own.len()), &noise[own])?;
            }
            self.in_stream_type(x)
        })?;
        weights.release(LayerId::Embedding);
        Ok(x)
    }

    /// Computes this rank's term of the residual stream's start, of all rows.
    fn look_up(&self, layer: &LayerWeights, tokens: &[u32], positions: &[u32]) -> Result<Tensor> {
        let spec = self.decoder.spec();
        let missing = || ModelError::Invalid("the weight source gave no token table".into());
        let table = layer.precise(ParamKind::TokenTable).ok_or_else(missing)?;
        let mut x = self.alloc(self.shares(tokens.len()).all(), spec.hidden_size, DType::F32)?;
        ops::embedding(self.device, table, tokens, spec.embedding.scale, x.view_mut(), false)?;
        if let Some(term) = layer.low_rank(ParamKind::TokenTable) {
            let hidden = self.in_compute_type(self.looked_up(&term, tokens)?)?;
            ops::linear_add(self.device, hidden.view(), term.b, x.view_mut())?;
        }
        if let Some(table) = layer.get(ParamKind::PositionTable).filter(|_| self.leads()) {
            ops::embedding(self.device, table, positions, 1.0, x.view_mut(), true)?;
        }
        Ok(x)
    }

    /// Computes `scale · s · A[tokens]` `[T, r]` f32, zero where another rank holds the token.
    fn looked_up(&self, term: &LowRank, tokens: &[u32]) -> Result<Tensor> {
        let all = self.shares(tokens.len()).all();
        let mut rows = self.alloc(all, term.rank, DType::F32)?;
        let scale = self.decoder.spec().embedding.scale * term.scale;
        ops::embedding(self.device, term.a, tokens, scale, rows.view_mut(), false)?;
        Ok(rows)
    }

    /// Adds the look-up's gradient to the tables'; the end of backward.
    pub(super) fn embedding_backward(
        &self,
        weights: &mut dyn WeightSource,
        grads: &mut dyn GradientSink,
        forest: &Forest,
        dx: Tensor,
    ) -> Result<()> {
        let scale = self.decoder.spec().embedding.scale;
        self.device.set_place(format_args!("backward {}", LayerId::Embedding));
        let shares = self.shares(forest.num_tokens());
        let whole = self.whole(dx.view(), &shares, DType::F32)?;
        let dx = whole.unwrap_or(dx);
        let mut gradients = grads.open(LayerId::Embedding)?;
        let tokens = self.own_tokens(&forest.tokens)?;
        let trained = self.trained_tokens(&forest.tokens, &tokens);
        let term_limit = gradients.term_limit();
        if let Some(table) = gradients.get_mut(ParamKind::TokenTable) {
            let dx = dx.view();
            match term_limit {
                None => ops::embedding_backward(self.device, &trained, scale, dx, table)?,
                Some(limit) => {
                    ops::embedding_backward_exact(self.device, &trained, scale, dx, table, limit)?;
                }
            }
        }
        if let Some(table) = gradients.get_mut(ParamKind::PositionTable) {
            ops::embedding_backward(self.device, &forest.positions, 1.0, dx.view(), table)?;
        }
        if self.looks_up_terms() {
            let layer = weights.fetch(LayerId::Embedding)?;
            let term = layer.low_rank(ParamKind::TokenTable).expect("the adapter has it");
            self.looked_up_backward(&term, [&tokens, &trained], dx, &mut gradients)?;
            weights.release(LayerId::Embedding);
        }
        grads.emit(LayerId::Embedding)
    }

    /// Returns the rows of this rank's shard that look-ups train: those of all tokens but padding.
    fn trained_tokens<'t>(&self, tokens: &[u32], own: &'t [u32]) -> Cow<'t, [u32]> {
        let mut trained = Cow::Borrowed(own);
        if let Some(padding) = self.decoder.whole().spec().embedding.padding {
            for (index, _) in tokens.iter().enumerate().filter(|(_, token)| **token == padding) {
                trained.to_mut()[index] = ELSEWHERE;
            }
        }
        trained
    }

    /// Returns whether the look-up has low-rank terms, so that its backward needs weights.
    pub(super) fn looks_up_terms(&self) -> bool {
        self.decoder.adapter().is_some_and(|adapter| adapter.get(ParamKind::TokenTable).is_some())
    }

    /// Adds the gradients of the look-up's low-rank terms: `A` of this rank's trained tokens, `B` of all rows.
    fn looked_up_backward(
        &self,
        term: &LowRank,
        [tokens, trained]: [&[u32]; 2],
        dx: Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let shares = self.shares(tokens.len());
        let dy = self.in_compute_type(dx)?;
        if let Some(db) = gradients.get_mut(ParamKind::TokenLoraB) {
            // One rank has a row that is not zero: the sum is that row.
            let mut rows = self.looked_up(term, tokens)?;
            self.sum_rows(&mut rows, &shares)?;
            self.gather_rows(&mut rows, &shares)?;
            let hidden = self.in_compute_type(rows)?;
            ops::linear_backward_weight(self.device, dy.view(), hidden.view(), db, true)?;
        }
        if let Some(da) = gradients.get_mut(ParamKind::TokenLoraA) {
            let mut dh = self.alloc(dy.extent(), term.rank, DType::F32)?;
            ops::linear_backward_input(self.device, dy.view(), term.b, dh.view_mut(), false)?;
            let scale = self.decoder.spec().embedding.scale * term.scale;
            ops::embedding_backward(self.device, trained, scale, dh.view(), da)?;
        }
        Ok(())
    }
}
