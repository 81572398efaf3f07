//! The feed-forward half of a block: `down(f(gate(n)) · up(n))`, or `down(f(up(n)))`.

use tandem_kernels::{Tensor, View, ViewMut, ops};

use super::LayerExecutor;
use super::low_rank::{LoraIntermediate, LowRankBackward};
use super::rows::SequenceParallelRows;
use crate::Result;
use crate::layout::ParamKind;
use crate::weights::{LayerGradients, LayerWeights};

/// Computes `h = f(u)` `[T,F]` from `u` `[T,F]` or `[T,2F]`.
pub(super) fn activate(walk: &LayerExecutor, up: View) -> Result<Tensor> {
    let mlp = walk.decoder.spec().mlp;
    let mut hidden = walk.alloc(up.extent(), mlp.width, walk.dtype)?;
    if mlp.gated {
        ops::gated(walk.device, mlp.activation, up, hidden.view_mut())?;
    } else {
        ops::activate(walk.device, mlp.activation, up, hidden.view_mut())?;
    }
    Ok(hidden)
}

/// Computes this rank's term of the gradient of the half's input from `dy` in the compute type;
/// overwrites `d_input`. Returns the result of [`LayerExecutor::linear_input`].
pub(super) fn backward(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    input: View,
    up: Tensor,
    hidden: Option<Tensor>,
    reduced: &mut LoraIntermediate,
    dy: View,
    d_input: ViewMut,
    shares: &SequenceParallelRows,
    gradients: &mut LayerGradients,
) -> Result<LowRankBackward> {
    let mlp = walk.decoder.spec().mlp;
    let hidden = match hidden {
        Some(hidden) => hidden,
        None => activate(walk, up.view())?,
    };
    let (weight, bias) = (ParamKind::DownWeight, ParamKind::DownBias);
    let low_rank = walk.linear_gradients(
        weights,
        gradients,
        weight,
        bias,
        hidden.view(),
        reduced.down.take(),
        dy,
        shares,
    )?;
    // The activation's output becomes its gradient: same shape, same type.
    let mut d_hidden = hidden;
    walk.linear_input(weights, weight, dy, low_rank, d_hidden.view_mut())?;
    let mut d_up = walk.alloc(up.extent(), up.cols(), walk.dtype)?;
    if mlp.gated {
        ops::gated_backward(walk.device, mlp.activation, up.view(), d_hidden.view(), d_up.view_mut())?;
    } else {
        ops::activate_backward(walk.device, mlp.activation, up.view(), d_hidden.view(), d_up.view_mut())?;
    }
    drop((up, d_hidden));
    let (weight, bias) = (ParamKind::UpWeight, ParamKind::UpBias);
    let low_rank = walk.linear_gradients(
        weights,
        gradients,
        weight,
        bias,
        input,
        reduced.up.take(),
        d_up.view(),
        shares,
    )?;
    walk.linear_input(weights, weight, d_up.view(), low_rank, d_input)
}
