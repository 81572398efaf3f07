//! Norm over the hidden dimension, forward and backward. A rank normalises its own rows and gathers
//! the others'.

use std::ops::Range;

use tandem_kernels::{DType, Extent, Tensor, View, ViewMut, ops};

use super::rows::SequenceParallelRows;
use super::{LayerExecutor, RankOrder};
use crate::Result;
use crate::layout::ParamKind;
use crate::spec::NormKind;
use crate::weights::{LayerGradients, LayerWeights};

/// Statistics of a norm, and its output unless it is computed again.
pub(crate) struct Normed {
    /// `[1,T]` inverse rms, or `[T,2]` mean and inverse deviation, of this rank's rows. `None` where the
    /// model has no norm, and the output is the input.
    statistics: Option<Tensor>,
    /// `[T,D]` in the compute type, of all rows.
    output: Option<Tensor>,
}

impl Normed {
    /// Returns the output, which must not have been dropped.
    pub(crate) fn output(&self) -> View<'_> {
        self.output.as_ref().expect("the norm's output was dropped or not recomputed").view()
    }

    /// Returns the output itself.
    pub(crate) fn into_output(self) -> Tensor {
        self.output.expect("the norm's output was dropped or not recomputed")
    }

    pub(crate) fn drop_output(&mut self) {
        self.output = None;
    }
}

/// Weight and bias of a norm.
pub(crate) type NormParts = (ParamKind, ParamKind);
pub(crate) const NORM1: NormParts = (ParamKind::Norm1Weight, ParamKind::Norm1Bias);
pub(crate) const NORM2: NormParts = (ParamKind::Norm2Weight, ParamKind::Norm2Bias);
/// The norms after a half; no family's has a bias.
pub(crate) const POST_NORM1: NormParts = (ParamKind::PostNorm1Weight, ParamKind::PostNorm1Weight);
pub(crate) const POST_NORM2: NormParts = (ParamKind::PostNorm2Weight, ParamKind::PostNorm2Weight);
pub(crate) const FINAL_NORM: NormParts = (ParamKind::FinalNormWeight, ParamKind::FinalNormBias);

/// Normalises `x` `[T,D]`, this rank's rows, into the compute type; gathers all rows. Where the
/// model has no norm, the rows themselves are cast and gathered.
pub(crate) fn norm(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    parts: NormParts,
    x: View,
    shares: &SequenceParallelRows,
) -> Result<Normed> {
    let mut output = walk.alloc(shares.all(), x.cols(), walk.dtype)?;
    let y = output.view_mut().row_range(shares.own());
    let statistics = if parts == FINAL_NORM || walk.decoder.spec().norms_before() {
        Some(normalise(walk, weights, parts, x, y, shares.own_extent())?)
    } else {
        ops::cast(walk.device, x, y)?;
        None
    };
    walk.gather_rows(&mut output, shares)?;
    Ok(Normed { statistics, output: Some(output) })
}

/// Normalises the output `x` `[R,D]` f32 of a half, this rank's rows, in f32.
pub(crate) fn norm_after(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    parts: NormParts,
    x: View,
    rows: Extent,
) -> Result<(Tensor, Normed)> {
    let mut y = walk.alloc(rows, x.cols(), DType::F32)?;
    let statistics = Some(normalise(walk, weights, parts, x, y.view_mut(), rows)?);
    Ok((y, Normed { statistics, output: None }))
}

/// Normalises rows of `x` into `y`; returns the statistics.
fn normalise(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    parts: NormParts,
    x: View,
    y: ViewMut,
    rows: Extent,
) -> Result<Tensor> {
    let spec = walk.decoder.spec().norm;
    let weight = weights.require(parts.0)?;
    Ok(match spec.kind {
        NormKind::Rms { offset } => {
            let mut inverse = walk.alloc_turned(1, rows)?;
            let call =
                ops::RmsNorm { x, w: weight, offset, eps: spec.eps, y, inverse_rms: inverse.view_mut() };
            ops::rms_norm(walk.device, call)?;
            inverse
        }
        NormKind::Layer { bias } => {
            let b = if bias { Some(weights.require(parts.1)?) } else { None };
            let mut moments = walk.alloc(rows, 2, DType::F32)?;
            let call = ops::LayerNorm { x, w: weight, b, eps: spec.eps, y, mean_inverse: moments.view_mut() };
            ops::layer_norm(walk.device, call)?;
            moments
        }
    })
}

/// Computes the output again if it was dropped: the same operation on the same input gives the same
/// bits.
pub(crate) fn restore(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    parts: NormParts,
    x: View,
    shares: &SequenceParallelRows,
    normed: &mut Normed,
) -> Result<()> {
    if normed.output.is_none() {
        *normed = norm(walk, weights, parts, x, shares)?;
    }
    Ok(())
}

/// Adds into `dx` f32 and into the gradients of weight and bias; `x`, `dy` and `dx` are this rank's
/// rows, of which `blocks` are summed apart.
pub(crate) fn norm_backward(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    parts: NormParts,
    x: View,
    normed: &Normed,
    dy: View,
    mut dx: ViewMut,
    blocks: &[Range<usize>],
    gradients: &mut LayerGradients,
) -> Result<()> {
    let Some(statistics) = &normed.statistics else { return Ok(ops::add(walk.device, dy, dx)?) };
    let statistics = statistics.view();
    let weight = weights.require(parts.0)?;
    let num_parts =
        usize::from(gradients.trains(parts.0)) + usize::from(parts.1 != parts.0 && gradients.trains(parts.1));
    if !walk.sums_terms() || !gradients.trains(parts.0) {
        let (dw, db) = match parts.0 == parts.1 {
            true => (gradients.get_mut(parts.0), None),
            false => gradients.each_mut(parts.0, parts.1),
        };
        return rows_backward(walk, weight, statistics, (x, dy, dx), (dw, db));
    }
    // A block's rows give a term of the gradient of weights that every rank holds.
    let mut terms = walk.terms(num_parts, x.cols())?;
    for (block, rows) in blocks.iter().enumerate() {
        let own = terms.view_mut().row_range(block * num_parts..(block + 1) * num_parts);
        let [dw, db] = own.split_rows(1);
        let statistics = match walk.decoder.spec().norm.kind {
            NormKind::Rms { .. } => statistics.col_range(rows.clone()),
            NormKind::Layer { .. } => statistics.row_range(rows.clone()),
        };
        let (x, dy) = (x.row_range(rows.clone()), dy.row_range(rows.clone()));
        let dx = dx.reborrow().row_range(rows.clone());
        let of_weights = (Some(dw), Some(db).filter(|db| db.rows() > 0));
        rows_backward(walk, weight, statistics, (x, dy, dx), of_weights)?;
    }
    walk.add_terms(terms, &[parts.0, parts.1], RankOrder::TokenParts, gradients)
}

/// Adds the gradient of the norm of some rows.
fn rows_backward(
    walk: &LayerExecutor,
    w: View,
    statistics: View,
    (x, dy, dx): (View, View, ViewMut),
    (dw, db): (Option<ViewMut>, Option<ViewMut>),
) -> Result<()> {
    match walk.decoder.spec().norm.kind {
        NormKind::Rms { offset } => {
            let call = ops::RmsNormBackward { x, w, offset, inverse_rms: statistics, dy, dx, dw };
            Ok(ops::rms_norm_backward(walk.device, call)?)
        }
        NormKind::Layer { .. } => {
            let dw_db = dw.map(|dw| (dw, db));
            let call = ops::LayerNormBackward { x, w, mean_inverse: statistics, dy, dx, dw_db };
            Ok(ops::layer_norm_backward(walk.device, call)?)
        }
    }
}
