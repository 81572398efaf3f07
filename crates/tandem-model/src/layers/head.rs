//! Final norm and language-model head, over the scored rows only; or the [score
//! head](super::score).

use tandem_kernels::ops::{HeadGradients, HeadParts, HeadScores, KeptLogits, Targets};
use tandem_kernels::{DType, Extent, Forest, Tensor, View, ops};

use super::divergence::DivergencePass;
use super::norm::{FINAL_NORM, Normed, norm, norm_backward, restore};
use super::rows::SequenceParallelRows;
use super::streams::StreamWeights;
use super::{Checkpointing, LayerExecutor, PolicyAndReferenceScores};
use crate::Result;
use crate::layout::TensorParallelShard;
use crate::layout::{LayerId, ParamKind};
use crate::weights::{GradientSink, LayerWeights, LowRank, WeightSource};

/// Rows of the token axis with predictions, ascending, and each prediction's index among them.
pub(super) struct ScoredRows {
    rows: Vec<u32>,
    index: Vec<u32>,
}

impl ScoredRows {
    pub(super) fn new(forest: &Forest) -> Self {
        let (rows, index) = forest.scored_rows();
        Self { rows, index }
    }

    /// Returns the rows that the last block computes after attention; `None` for all, if nothing is
    /// scored.
    pub(super) fn of_last_block(&self) -> Option<&[u32]> {
        (!self.rows.is_empty()).then_some(&self.rows)
    }
}

/// Tensors of the head that backward reads.
pub(super) struct SavedHead {
    /// Index of each prediction among the scored rows.
    index: Vec<u32>,
    /// This rank's scored rows of the residual stream `[R,D]`, the norm of all of them, and
    /// their division over ranks. Absent if nothing is scored.
    pub(super) scored: Option<(Tensor, Normed, SequenceParallelRows)>,
    /// Logits that backward need not recompute.
    logits: Option<KeptLogits>,
}

/// Bytes of logits kept for backward without checkpointing. Beyond it the head computes logits
/// twice, so that memory does not grow with tokens × vocabulary.
const LOGITS_BUDGET: usize = 512 << 20;

impl LayerExecutor<'_> {
    /// Returns the layer and the part that hold the head's weight.
    pub(super) fn head_weight(&self) -> (LayerId, ParamKind) {
        self.decoder.head_weight()
    }

    /// Returns each prediction's target as a row of this rank's shard of the vocabulary.
    fn targets(&self, forest: &Forest) -> Result<Vec<u32>> {
        let targets: Vec<u32> = forest.predictions.iter().map(|p| p.target).collect();
        Ok(self.own_tokens(&targets)?.into_owned())
    }

    fn final_norm(
        &self,
        weights: &mut dyn WeightSource,
        hidden: &PolicyAndReferenceScores<Tensor>,
        shares: &SequenceParallelRows,
    ) -> Result<PolicyAndReferenceScores<Normed>> {
        let layer = StreamWeights::fetch(weights, LayerId::Head, hidden.reference.is_some(), false)?;
        let hidden =
            PolicyAndReferenceScores { policy: &hidden.policy, reference: hidden.reference.as_ref() };
        let normed = hidden.try_map(|hidden, is_reference| {
            norm(self, layer.stream(is_reference), FINAL_NORM, hidden.view(), shares)
        })?;
        weights.release(LayerId::Head);
        Ok(normed)
    }

    /// Scores the forest's predictions from `hidden` `[R,D]`, this rank's scored rows of the
    /// residual stream. With `keep`, backward of the policy follows.
    pub(super) fn head_forward(
        &self,
        weights: &mut dyn WeightSource,
        forest: &Forest,
        scored_rows: ScoredRows,
        hidden: PolicyAndReferenceScores<Tensor>,
        mut scores: PolicyAndReferenceScores<&mut HeadScores>,
        keep: bool,
    ) -> Result<SavedHead> {
        let ScoredRows { rows, index } = scored_rows;
        if rows.is_empty() {
            for scores in std::iter::once(&mut scores.policy).chain(&mut scores.reference) {
                scores.clear();
            }
            self.idle_head_forward(weights)?;
            return Ok(SavedHead { index, scored: None, logits: None });
        }
        self.device.set_place(format_args!("forward {}", LayerId::Head));
        let shares = self.shares_of(&rows, forest.num_tokens());
        let PolicyAndReferenceScores { policy: mut normed, reference } =
            self.of_head().final_norm(weights, &hidden, &shares)?;
        let PolicyAndReferenceScores { policy: hidden, reference: of_reference } = hidden;
        drop(of_reference);
        let (layer, _) = self.head_weight();
        let head = StreamWeights::fetch(weights, layer, reference.is_some(), false)?;
        let logits = if self.decoder.spec().head.is_score() {
            self.score_sequences(head.stream(false), normed.output(), &index, scores.policy)?;
            None
        } else {
            let targets = self.targets(forest)?;
            let targets = Targets { rows: &index, targets: &targets };
            if let Some((normed, scores)) = reference.zip(scores.reference) {
                self.for_stream(true).score(head.stream(true), normed.output(), targets, scores, 0)?;
            }
            let keeps = keep && self.keeps_logits && self.checkpointing == Checkpointing::None;
            let budget = if keeps { LOGITS_BUDGET } else { 0 };
            Some(self.score(head.stream(false), normed.output(), targets, scores.policy, budget)?)
        };
        weights.release(layer);
        if self.checkpointing != Checkpointing::None {
            normed.drop_output();
        }
        Ok(SavedHead { index, scored: Some((hidden, normed, shares)), logits })
    }

    /// Scores the predictions of one stream from normalised rows; keeps logits of up to `budget`
    /// bytes.
    fn score(
        &self,
        head: &LayerWeights,
        hidden: View,
        targets: Targets,
        scores: &mut HeadScores,
        budget: usize,
    ) -> Result<KeptLogits> {
        let (TensorParallelShard { index, count }, blocks) =
            (self.decoder.slice(), self.decoder.sum_blocks());
        let (first, all) = (index * blocks.num_own(), count * blocks.num_own());
        let mut parts = HeadParts::new(first, all, hidden.rows(), targets.targets.len());
        let term = head.low_rank(ParamKind::HeadWeight);
        let h = term.as_ref().map(|term| self.terms_hidden(term, hidden)).transpose()?;
        let low_rank =
            h.as_ref().zip(term.as_ref()).map(|((_, h), term)| ops::LowRank { h: h.view(), b: term.b });
        let operands = self.head_weights(head, low_rank)?;
        let call = ops::Head::new(hidden, operands, targets, &self.decoder.spec().head.shape)
            .in_blocks(blocks.vocabulary());
        let logits = ops::head_part(self.device, call, &mut parts, budget)?;
        if let Some(split) = self.split {
            split.gather(parts.numbers_mut())?;
        }
        parts.join(targets.rows, self.decoder.whole().spec().vocab_size, scores);
        Ok(logits)
    }

    /// Returns the gradient of the last block's output, f32, this rank's rows: `[R,D]` of the
    /// scored rows, or zeros `[T,D]` if nothing is scored. With `divergence` the derivatives are by the
    /// divergence of each prediction's row.
    pub(super) fn head_backward(
        &self,
        weights: &mut dyn WeightSource,
        grads: &mut dyn GradientSink,
        forest: &Forest,
        saved: SavedHead,
        scores: &HeadScores,
        d_log_prob: &[f32],
        mut divergence: Option<DivergencePass>,
    ) -> Result<Tensor> {
        let SavedHead { index, scored, logits } = saved;
        let hidden_size = self.decoder.spec().hidden_size;
        let (layer, part) = self.head_weight();
        let Some((hidden, mut normed, shares)) = scored else {
            // A rank without scored rows also fetches, opens and emits the same layers in the same
            // order.
            self.idle_head_backward(weights, grads, divergence.as_mut())?;
            return self.zeros(self.shares(forest.num_tokens()).own_extent(), hidden_size);
        };
        {
            let final_norm = weights.fetch(LayerId::Head)?;
            restore(&self.of_head(), &final_norm, FINAL_NORM, hidden.view(), &shares, &mut normed)?;
            weights.release(LayerId::Head);
        }
        self.device.set_place(format_args!("backward {}", LayerId::Head));
        let mut dn = self.alloc(shares.all(), hidden_size, DType::F32)?;
        if self.decoder.spec().head.is_score() {
            // Every rank has the whole score head, and computes the gradient of all rows.
            let head = weights.fetch(layer)?;
            let mut gradients = grads.open(layer)?;
            let (hidden, dn) = (normed.output(), dn.view_mut());
            self.score_backward(&head, hidden, &index, d_log_prob, dn, &mut gradients)?;
            weights.release(layer);
        } else {
            let targets = self.targets(forest)?;
            let head = weights.fetch(layer)?;
            let mut gradients = grads.open(layer)?;
            let term = head.low_rank(ParamKind::HeadWeight);
            let hidden = normed.output();
            let h = term.as_ref().map(|term| self.terms_hidden(term, hidden)).transpose()?;
            let low_rank =
                h.as_ref().zip(term.as_ref()).map(|((_, h), term)| ops::LowRank { h: h.view(), b: term.b });
            let mut dh = match &term {
                Some(term) => Some(self.alloc(hidden.extent(), term.rank, DType::F32)?),
                None => None,
            };
            let d_low = dh.as_mut().map(Tensor::view_mut);
            let of_head = match &term {
                // The adapter's own factor trains, or the head's weight and bias: never both.
                Some(_) => {
                    let b = gradients.get_mut(ParamKind::HeadLoraB);
                    HeadGradients { b, h: d_low, ..HeadGradients::from_hidden(dn.view_mut()) }
                }
                None => {
                    let adds_to_weight = gradients.begin_product(part);
                    let (weight, bias) = gradients.each_mut(part, ParamKind::HeadBias);
                    let of_hidden = HeadGradients::from_hidden(dn.view_mut());
                    HeadGradients { weight, adds_to_weight, bias, ..of_hidden }
                }
            };
            let operands = self.head_weights(&head, low_rank)?;
            match &mut divergence {
                None => {
                    let targets = Targets { rows: &index, targets: &targets };
                    let call = ops::Head::new(hidden, operands, targets, &self.decoder.spec().head.shape)
                        .in_blocks(self.decoder.sum_blocks().vocabulary());
                    ops::head_backward(self.device, call, scores, d_log_prob, logits, of_head)?;
                }
                Some(pass) => {
                    let d = (&index[..], d_log_prob);
                    pass.backward(self, (hidden, operands), scores, d, of_head)?;
                }
            }
            self.sum_rows(&mut dn, &shares)?;
            if let Some(((term, (dropped, _)), dh)) = term.as_ref().zip(h.as_ref()).zip(dh) {
                let x = dropped.as_ref().map_or(hidden, Tensor::view);
                let dh = self.whole_hidden(term, dh, &shares)?;
                if let Some(da) = gradients.get_mut(ParamKind::HeadLoraA) {
                    ops::linear_backward_weight(self.device, dh.view(), x, da, true)?;
                }
                self.add_own_input(term, dh.view(), &shares, &mut dn)?;
            }
            weights.release(layer);
        }
        if layer != LayerId::Head {
            grads.emit(layer)?;
        }
        normed.drop_output();
        let mut d_hidden = self.zeros(shares.own_extent(), hidden_size)?;
        {
            let final_norm = weights.fetch(LayerId::Head)?;
            let mut gradients = grads.open(LayerId::Head)?;
            let (x, dx) = (hidden.view(), d_hidden.view_mut());
            let dy = shares.own_of(dn.view());
            norm_backward(
                self,
                &final_norm,
                FINAL_NORM,
                x,
                &normed,
                dy,
                dx,
                shares.blocks(),
                &mut gradients,
            )?;
            weights.release(LayerId::Head);
        }
        grads.emit(LayerId::Head)?;
        Ok(d_hidden)
    }

    fn zeros(&self, rows: Extent, cols: usize) -> Result<Tensor> {
        let mut zeros = self.alloc(rows, cols, DType::F32)?;
        ops::fill_zero(self.device, zeros.view_mut())?;
        Ok(zeros)
    }

    /// Computes `x̃`, if dropout makes it differ from `x`, and `s · x̃ Aᵀ`.
    pub(super) fn terms_hidden(&self, term: &LowRank, x: View) -> Result<(Option<Tensor>, Tensor)> {
        let dropped = self.dropped(term, x)?;
        let hidden = self.low_rank_hidden(term, dropped.as_ref().map_or(x, Tensor::view))?;
        Ok((dropped, hidden))
    }
}
