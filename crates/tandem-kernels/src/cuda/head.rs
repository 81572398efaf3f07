//! TODO.

use super::{Cuda, driver, failed, source};
use crate::ops::{HeadGradients, HeadParts, HeadShape, HeadWeights, Targets};
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("head.cu");

/// Columns of the buffer for logits that are not kept.
pub(crate) fn strip_width(vocabulary: usize) -> usize {
    vocabulary.min(16_384)
}

pub(crate) fn forward(
    cuda: &Cuda,
    hidden: View,
    weights: HeadWeights,
    targets: Targets,
    shape: &HeadShape,
    parts: &mut HeadParts,
    chunk: usize,
    kept: ViewMut,
    spare: ViewMut,
) -> Result<()> {
    let _ = (cuda, hidden, weights, targets, shape, parts, chunk, kept, spare);
    Err(failed("head", "not written"))
}

pub(crate) fn backward(
    cuda: &Cuda,
    hidden: View,
    weights: HeadWeights,
    targets: Targets,
    shape: &HeadShape,
    log_sum_exp: &[f32],
    d_log_prob: &[f32],
    gradients: HeadGradients,
    chunk: usize,
    kept: ViewMut,
    spare: ViewMut,
) -> Result<()> {
    let _ = (cuda, hidden, weights, targets, shape, log_sum_exp, d_log_prob, gradients, chunk, kept, spare);
    Err(failed("head", "not written"))
}
