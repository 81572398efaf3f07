//! Divergence of a student's next-token distributions from those of a teacher, at the scored rows.
//!
//! The teacher is another decoder with the same vocabulary. Of its pass only the normalised scored rows
//! stay, `[R,D]`, with log Σ exp of each row's logits; both heads' logits are computed again, strip by
//! strip, in each pass over the divergence.

use tandem_kernels::ops::{
    DivergenceSide, HeadDivergence, HeadGradients, HeadScores, HeadWeights, LowRank, RowDivergence,
};
use tandem_kernels::{Forest, Tensor, View, ops};

use super::norm::{FINAL_NORM, restore};
use super::{Checkpointing, LayerExecutor, PolicyAndReferenceScores, SavedActivations};
use crate::decoder::Decoder;
use crate::layout::{LayerId, ParamKind};
use crate::weights::{LayerWeights, WeightSource};
use crate::{ModelError, Result};

/// Results of a teacher's forward pass.
#[derive(Default)]
pub struct TeacherRows {
    /// Normalised scored rows `[R,D]`; `None` if nothing is scored.
    hidden: Option<Tensor>,
    log_sum_exp: Vec<f32>,
}

/// A teacher after its forward pass.
pub struct TeacherHead<'a> {
    /// Its decoder.
    pub decoder: &'a Decoder,
    /// Its weights.
    pub weights: &'a mut dyn WeightSource,
    /// Its rows of this micro-batch.
    pub rows: &'a TeacherRows,
    /// Interpolation of the divergence: [`HeadDivergence::beta`].
    pub beta: f32,
}

impl TeacherHead<'_> {
    /// Fetches the head's weights, and calls `compute` with the teacher's side; without scored rows it
    /// only makes the calls to the source.
    fn with_side<T>(&mut self, compute: impl FnOnce(DivergenceSide) -> Result<T>) -> Result<Option<T>> {
        let (layer, part) = self.decoder.head_weight();
        let head = self.weights.fetch(layer)?;
        let computed = match &self.rows.hidden {
            None => None,
            Some(hidden) => Some(compute(DivergenceSide {
                hidden: hidden.view(),
                weights: HeadWeights::new(head.require(part)?, head.get(ParamKind::HeadBias)),
                shape: self.decoder.spec().head.shape,
                log_sum_exp: &self.rows.log_sum_exp,
            })?),
        };
        self.weights.release(layer);
        Ok(computed)
    }
}

/// The backward pass of a divergence.
pub struct DivergencePass<'a> {
    /// The teacher.
    pub teacher: TeacherHead<'a>,
    /// Divergences of the scored rows.
    pub rows: &'a [RowDivergence],
}

impl DivergencePass<'_> {
    /// Computes gradients of the student's head; `d` are the derivatives by the divergences of the
    /// predictions, whose rows are `index`.
    pub(super) fn backward(
        &mut self,
        walk: &LayerExecutor,
        (hidden, weights): (View, HeadWeights),
        scores: &HeadScores,
        (index, d): (&[u32], &[f32]),
        gradients: HeadGradients,
    ) -> Result<()> {
        let mut of_rows = vec![0.0; hidden.rows()];
        index.iter().zip(d).for_each(|(&row, d)| of_rows[row as usize] += d);
        let (beta, shape) = (self.teacher.beta, walk.decoder.spec().head.shape);
        let student = DivergenceSide { hidden, weights, shape, log_sum_exp: &scores.log_sum_exp };
        let rows = self.rows;
        self.teacher.with_side(|teacher| {
            let call = HeadDivergence { student, teacher, beta };
            Ok(ops::head_divergence_backward(walk.device, call, rows, &of_rows, gradients)?)
        })?;
        Ok(())
    }

    /// Makes the calls to the teacher's weights of a pass without scored rows.
    pub(super) fn idle(&mut self) -> Result<()> {
        self.teacher.decoder.idle_teacher(self.teacher.weights)
    }
}

impl Decoder {
    /// Returns the layer and the part that hold the head's weight.
    pub(super) fn head_weight(&self) -> (LayerId, ParamKind) {
        if self.spec().head.tied {
            (LayerId::Embedding, ParamKind::TokenTable)
        } else {
            (LayerId::Head, ParamKind::HeadWeight)
        }
    }

    /// Makes the calls of a pass over a divergence to a teacher's weights, on a rank without a batch.
    ///
    /// # Errors
    /// A layer cannot be fetched.
    pub fn idle_teacher(&self, weights: &mut dyn WeightSource) -> Result<()> {
        let (layer, _) = self.head_weight();
        weights.fetch(layer)?;
        weights.release(layer);
        Ok(())
    }
}

impl LayerExecutor<'_> {
    /// Runs the forward pass of a teacher, which is no stage of several: scores the forest's
    /// predictions, and returns what a divergence needs.
    ///
    /// # Errors
    /// As [`LayerExecutor::forward`].
    pub fn teacher_forward(
        &self,
        weights: &mut dyn WeightSource,
        forest: &Forest,
        scores: &mut HeadScores,
    ) -> Result<TeacherRows> {
        self.check_stage()?;
        // The head then leaves its rows.
        let walk = Self { checkpointing: Checkpointing::None, ..*self };
        let streams = PolicyAndReferenceScores::one(&mut *scores);
        let (_, saved) = walk.stage_forward(weights, forest, None, streams, false)?;
        let scored = saved.head.and_then(|head| head.scored);
        let hidden = scored.map(|(_, normed, _)| normed.into_output());
        Ok(TeacherRows { hidden, log_sum_exp: scores.log_sum_exp.clone() })
    }

    /// Computes the divergence of each scored row after a forward pass that was kept or not.
    ///
    /// # Errors
    /// The models' vocabularies differ, weights cannot be loaded, or memory runs out.
    pub fn divergence(
        &self,
        weights: &mut dyn WeightSource,
        saved: &mut SavedActivations,
        scores: &HeadScores,
        teacher: &mut TeacherHead,
        out: &mut Vec<RowDivergence>,
    ) -> Result<()> {
        let Some(head) = &mut saved.head else {
            return Err(ModelError::Invalid("a divergence is that of the last stage".to_owned()));
        };
        let Some((hidden, normed, shares)) = &mut head.scored else {
            out.clear();
            self.idle_divergence(weights)?;
            return teacher.decoder.idle_teacher(teacher.weights);
        };
        {
            let final_norm = weights.fetch(LayerId::Head)?;
            restore(&self.of_head(), &final_norm, FINAL_NORM, hidden.view(), shares, normed)?;
            weights.release(LayerId::Head);
        }
        self.device.set_place(format_args!("divergence"));
        let (layer, _) = self.head_weight();
        let head = weights.fetch(layer)?;
        let hidden = normed.output();
        let term = head.low_rank(ParamKind::HeadWeight);
        let h = term.as_ref().map(|term| self.terms_hidden(term, hidden)).transpose()?;
        let low_rank = h.as_ref().zip(term.as_ref()).map(|((_, h), term)| LowRank { h: h.view(), b: term.b });
        let student = DivergenceSide {
            hidden,
            weights: self.head_weights(&head, low_rank)?,
            shape: self.decoder.spec().head.shape,
            log_sum_exp: &scores.log_sum_exp,
        };
        let beta = teacher.beta;
        teacher.with_side(|teacher| {
            Ok(ops::head_divergence(self.device, HeadDivergence { student, teacher, beta }, out)?)
        })?;
        weights.release(layer);
        if self.checkpointing != Checkpointing::None {
            normed.drop_output();
        }
        Ok(())
    }

    /// Returns the head's operands.
    pub(super) fn head_weights<'w>(
        &self,
        head: &LayerWeights<'w>,
        low_rank: Option<LowRank<'w>>,
    ) -> Result<HeadWeights<'w>> {
        let (_, part) = self.head_weight();
        Ok(HeadWeights { weight: head.require(part)?, bias: head.get(ParamKind::HeadBias), low_rank })
    }
}
