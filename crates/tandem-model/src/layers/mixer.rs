//! The first half of a block: attention or linear attention, whichever the block has.

use tandem_kernels::{Forest, Tensor, View, ViewMut};

use super::LayerExecutor;
use super::attention::{self, Attended, AttentionKernel};
use super::linear_attention::{self, Recurred};
use super::low_rank::{LoraIntermediate, LowRankBackward};
use super::rows::BlockRows;
use crate::Result;
use crate::layout::ParamKind;
use crate::weights::{LayerGradients, LayerWeights};

/// Tensors that backward reads.
#[expect(clippy::large_enum_variant, reason = "a box would be an allocation in every block")]
pub(super) enum Mixed {
    Attention(Attended),
    Linear(Recurred),
}

impl Mixed {
    /// Returns the heads' outputs, which must not have been dropped.
    pub(super) fn output(&self) -> View<'_> {
        match self {
            Self::Attention(attended) => attended.output(),
            Self::Linear(recurred) => recurred.output(),
        }
    }

    pub(super) fn drop_operands(&mut self) {
        match self {
            Self::Attention(attended) => attended.drop_operands(),
            Self::Linear(recurred) => recurred.drop_operands(),
        }
    }

    pub(super) fn drop_output(&mut self) {
        match self {
            Self::Attention(attended) => attended.drop_output(),
            Self::Linear(recurred) => recurred.drop_output(),
        }
    }

    /// Returns the weight of the projection back.
    pub(super) fn out_weight(&self) -> ParamKind {
        match self {
            Self::Attention(_) => ParamKind::OutWeight,
            Self::Linear(_) => ParamKind::DeltaOutWeight,
        }
    }
}

/// Computes the heads' outputs from the normalised input `[T,D]`; also returns the hidden columns of
/// the projection's low-rank terms.
pub(super) fn forward(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    layer: usize,
    input: View,
    attend: &mut dyn AttentionKernel,
) -> Result<(Mixed, Option<Tensor>)> {
    if walk.decoder.spec().linear_attention(layer).is_some() {
        let (recurred, reduced) = linear_attention::forward(walk, weights, layer, input, attend)?;
        return Ok((Mixed::Linear(recurred), reduced));
    }
    let (attended, reduced) = attention::forward(walk, weights, layer, input, attend)?;
    Ok((Mixed::Attention(attended), reduced))
}

/// Computes this rank's term of the gradient of the half's input, as [`attention::backward`]. Returns the
/// result of [`LayerExecutor::linear_input`] with the weight that it is of.
pub(super) fn backward(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    layer: usize,
    input: View,
    mixed: Mixed,
    reduced: LoraIntermediate,
    rows: &BlockRows,
    forest: &Forest,
    dy: View,
    d_input: ViewMut,
    gradients: &mut LayerGradients,
) -> Result<(ParamKind, LowRankBackward)> {
    match mixed {
        Mixed::Attention(attended) => {
            let low_rank = attention::backward(
                walk, weights, layer, input, attended, reduced, rows, forest, dy, d_input, gradients,
            )?;
            Ok((ParamKind::QkvWeight, low_rank))
        }
        Mixed::Linear(recurred) => {
            let low_rank = linear_attention::backward(
                walk, weights, layer, input, recurred, reduced, rows, forest, dy, d_input, gradients,
            )?;
            Ok((ParamKind::DeltaInWeight, low_rank))
        }
    }
}
