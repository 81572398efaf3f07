//! Score head of a reward model: the product of each prediction's normalised hidden state with one
//! row of weights. All of it is f32, final norm included, whatever the compute type: there are few
//! rows, and rewards are compared.

use tandem_kernels::ops::HeadScores;
use tandem_kernels::{DType, Extent, View, ViewMut, ops};

use super::LayerExecutor;
use crate::Result;
use crate::layout::ParamKind;
use crate::weights::{LayerGradients, LayerWeights};

impl LayerExecutor<'_> {
    /// Returns the passes in the compute type of the head.
    pub(super) fn of_head(&self) -> Self {
        let dtype = if self.decoder.spec().head.is_score() { DType::F32 } else { self.dtype };
        Self { dtype, ..*self }
    }

    /// Scores predictions from normalised rows `[R,D]` f32: prediction `i` has row `index[i]`. A
    /// score stands in place of a log-probability.
    pub(super) fn score_sequences(
        &self,
        head: &LayerWeights,
        hidden: View,
        index: &[u32],
        scores: &mut HeadScores,
    ) -> Result<()> {
        let mut of_rows = self.alloc(hidden.extent(), 1, DType::F32)?;
        let weight = head.require(ParamKind::ScoreWeight)?;
        ops::linear(self.device, hidden, weight, None, None, of_rows.view_mut())?;
        let of_rows = ops::read_f32(self.device, of_rows.view())?;
        scores.clear();
        scores.log_prob.extend(index.iter().map(|&row| of_rows[row as usize]));
        Ok(())
    }

    /// Computes the gradient of normalised rows, into `d_hidden` `[R,D]` f32, and adds that of the
    /// weights, from the derivative by each prediction's score.
    pub(super) fn score_backward(
        &self,
        head: &LayerWeights,
        hidden: View,
        index: &[u32],
        d_score: &[f32],
        d_hidden: ViewMut,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let rows: Extent = hidden.extent();
        let mut of_rows = self.alloc(rows, 1, DType::F32)?;
        self.device.host_write(of_rows.view_mut(), |of_rows: &mut [f32]| {
            of_rows.fill(0.0);
            // Two sequences may end in one row.
            for (&row, d_score) in index.iter().zip(d_score) {
                of_rows[row as usize] += d_score;
            }
        })?;
        let (dy, weight) = (of_rows.view(), head.require(ParamKind::ScoreWeight)?);
        ops::linear_backward_input(self.device, dy, weight, d_hidden, false)?;
        if let Some(d_weight) = gradients.get_mut(ParamKind::ScoreWeight) {
            ops::linear_backward_weight(self.device, dy, hidden, d_weight, true)?;
        }
        Ok(())
    }
}
