//! A norm over the hidden dimension, forward and backward, of whichever kind the model has.

use tandem_kernels::{DType, Tensor, View, ViewMut, ops};

use super::Walk;
use crate::Result;
use crate::layout::Part;
use crate::spec::NormKind;
use crate::weights::{LayerGradients, LayerWeights};

/// What a norm keeps: its statistics, and its output unless that is computed again.
pub(crate) struct Normed {
    /// `[1,T]` inverse rms, or `[T,2]` mean and inverse deviation.
    statistics: Tensor,
    /// `[T,D]` in the compute type.
    output: Option<Tensor>,
}

impl Normed {
    /// The output, which must be there.
    pub(crate) fn output(&self) -> View<'_> {
        self.output.as_ref().expect("the norm's output was dropped or not recomputed").view()
    }

    pub(crate) fn drop_output(&mut self) {
        self.output = None;
    }
}

/// Which norm of a layer.
pub(crate) type NormParts = (Part, Part);
pub(crate) const NORM1: NormParts = (Part::Norm1Weight, Part::Norm1Bias);
pub(crate) const NORM2: NormParts = (Part::Norm2Weight, Part::Norm2Bias);
pub(crate) const FINAL_NORM: NormParts = (Part::FinalNormWeight, Part::FinalNormBias);

/// Normalises `x` `[T,D]` f32 into the compute type.
pub(crate) fn norm(walk: &Walk, weights: &LayerWeights, parts: NormParts, x: View) -> Result<Normed> {
    let spec = walk.decoder.spec().norm;
    let weight = weights.require(parts.0)?;
    let mut output = walk.alloc(x.rows(), x.cols(), walk.dtype)?;
    let statistics = match spec.kind {
        NormKind::Rms { offset } => {
            let mut inverse = walk.alloc(1, x.rows(), DType::F32)?;
            ops::rms_norm(walk.device, x, weight, offset, spec.eps, output.view_mut(), inverse.view_mut())?;
            inverse
        }
        NormKind::Layer => {
            let bias = weights.require(parts.1)?;
            let mut moments = walk.alloc(x.rows(), 2, DType::F32)?;
            ops::layer_norm(walk.device, x, weight, bias, spec.eps, output.view_mut(), moments.view_mut())?;
            moments
        }
    };
    Ok(Normed { statistics, output: Some(output) })
}

/// Computes the output again if it was dropped: the same operation on the same input, so the same bits.
pub(crate) fn restore(
    walk: &Walk,
    weights: &LayerWeights,
    parts: NormParts,
    x: View,
    normed: &mut Normed,
) -> Result<()> {
    if normed.output.is_none() {
        *normed = norm(walk, weights, parts, x)?;
    }
    Ok(())
}

/// Adds into `dx` f32 and into the gradients of weight and bias.
pub(crate) fn norm_backward(
    walk: &Walk,
    weights: &LayerWeights,
    parts: NormParts,
    x: View,
    normed: &Normed,
    dy: View,
    dx: ViewMut,
    gradients: &mut LayerGradients,
) -> Result<()> {
    let weight = weights.require(parts.0)?;
    let statistics = normed.statistics.view();
    match walk.decoder.spec().norm.kind {
        NormKind::Rms { offset } => {
            let dw = gradients.get_mut(parts.0);
            ops::rms_norm_backward(walk.device, x, weight, offset, statistics, dy, dx, dw)?;
        }
        NormKind::Layer => {
            let (dw, db) = gradients.each_mut(parts.0, parts.1);
            ops::layer_norm_backward(walk.device, x, weight, statistics, dy, dx, dw.zip(db))?;
        }
    }
    Ok(())
}
