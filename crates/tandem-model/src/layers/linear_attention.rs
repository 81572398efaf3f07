//! Linear attention of a block by the gated delta rule (Gated DeltaNet, arXiv 2412.06464).
//!
//! `C = 2K·dk + H·dv` channels:
//!
//! ```text
//! p        = n1 · Winᵀ                     [T, C + H·dv + 2H]: channels, gates z, inputs of β and decay
//! q, k, v  = split(silu(conv(p[channels])))
//! q, k     = q / ‖q‖, k / ‖k‖              by head, f32
//! o_TV     = delta_rule(q, k, v, decay, β)
//! h_TV     = norm(o) ⊙ silu(z)             by head
//! ```
//!
//! Backward starts from `p`, `o` and `h`; what lies between is cheap beside the rule and is computed
//! again.

use std::borrow::Cow;

use tandem_kernels::ops::{Activation, Gate, HeadGates};
use tandem_kernels::{DType, Forest, Runs, Tensor, View, ViewMut, ops};

use super::attention::AttentionKernel;
use super::low_rank::{LoraIntermediate, LowRankBackward};
use super::rows::BlockRows;
use super::{LayerExecutor, RankOrder};
use crate::Result;
use crate::layout::ParamKind;
use crate::spec::LinearAttentionSpec;
use crate::weights::{LayerGradients, LayerWeights};

/// Texts of a block's linear attention, and the memory of those that go on after the call.
pub(crate) struct Recurrence<'a> {
    pub(crate) runs: Cow<'a, Runs>,
    /// As [`ops::CausalConv::history`].
    pub(crate) history: Option<ViewMut<'a>>,
    /// As [`ops::DeltaRule::states`].
    pub(crate) states: Option<ViewMut<'a>>,
}

impl Recurrence<'_> {
    /// Makes the texts of a forest, of which nothing is kept.
    pub(crate) fn of_forest(forest: &Forest) -> Self {
        Self { runs: Cow::Owned(Runs::of_forest(forest)), history: None, states: None }
    }
}

/// Tensors of linear attention that backward reads.
pub(super) struct Recurred {
    operands: Option<Operands>,
    /// `h` `[T, H·dv]`.
    output: Option<Tensor>,
}

struct Operands {
    /// `p`.
    projected: Tensor,
    /// `o` `[T, H·dv]`.
    heads: Tensor,
}

impl Recurred {
    /// Returns the heads' outputs, which must not have been dropped.
    pub(super) fn output(&self) -> View<'_> {
        self.output.as_ref().expect("the heads' output was dropped").view()
    }

    pub(super) fn drop_operands(&mut self) {
        self.operands = None;
    }

    pub(super) fn drop_output(&mut self) {
        self.output = None;
    }
}

/// Queries, keys and values on their way into the rule.
struct Channels {
    /// After the convolution, `[T, C]`.
    convolved: Tensor,
    /// Queries and keys after SiLU `[T, 2K·dk]`.
    qk: Tensor,
    /// Values after SiLU `[T, H·dv]`.
    v: Tensor,
    /// Normalised queries and keys `[T, 2K·dk]` f32.
    normed: Tensor,
    /// Inverse norm of each query and key head `[2K, T]`, in the order of rows.
    inverse: Tensor,
    /// Weight that makes the norm by the rms one by the length, `[1, dk]`.
    weight: Tensor,
}

/// A block's linear attention on a device.
struct Pass<'a> {
    walk: &'a LayerExecutor<'a>,
    weights: &'a LayerWeights<'a>,
    spec: &'a LinearAttentionSpec,
}

/// Projection of the block's input. It has no bias: the name is of one that the layer lacks.
const PROJECTION: (ParamKind, ParamKind) = (ParamKind::DeltaInWeight, ParamKind::QkvBias);

/// `ε` of the length of a query or key: `x / √(Σ x² + ε)`.
const LENGTH_EPS: f32 = 1e-6;

impl<'a> Pass<'a> {
    fn new(walk: &'a LayerExecutor<'a>, weights: &'a LayerWeights<'a>, layer: usize) -> Self {
        let spec = walk.decoder.spec().linear_attention(layer).expect("a block of linear attention");
        Self { walk, weights, spec }
    }

    /// Computes queries, keys and values from what a token is projected to.
    fn channels(&self, projected: View, recurrence: &mut Recurrence) -> Result<Channels> {
        let Self { walk, weights, spec } = *self;
        let (rows, shape) = (projected.extent(), &spec.shape);
        let (channels, both) = (spec.conv_channels(), 2 * shape.key_width());
        let mut convolved = walk.alloc(rows, channels, walk.dtype)?;
        let w = weights.require(ParamKind::DeltaConvWeight)?;
        let x = projected.col_range(0..channels);
        let history = recurrence.history.as_mut().map(ViewMut::reborrow);
        let call = ops::CausalConv { x, w, runs: &recurrence.runs, history, y: convolved.view_mut() };
        ops::causal_conv(walk.device, call)?;
        let mut qk = walk.alloc(rows, both, walk.dtype)?;
        let mut v = walk.alloc(rows, shape.value_width(), walk.dtype)?;
        ops::activate(walk.device, Activation::Silu, convolved.view().col_range(0..both), qk.view_mut())?;
        ops::activate(
            walk.device,
            Activation::Silu,
            convolved.view().col_range(both..channels),
            v.view_mut(),
        )?;
        let mut weight = walk.alloc_row(shape.key_dim)?;
        let dims = shape.key_dim as f32;
        ops::fill(walk.device, weight.view_mut(), 1.0 / dims.sqrt())?;
        let mut normed = walk.alloc(rows, both, DType::F32)?;
        let mut inverse = walk.alloc_turned(2 * shape.key_heads, rows)?;
        let call = ops::RmsNorm {
            x: by_head(qk.view(), shape.key_dim),
            w: weight.view(),
            offset: 0.0,
            eps: LENGTH_EPS / dims,
            y: by_head_mut(&mut normed, shape.key_dim),
            inverse_rms: in_one_row(&mut inverse),
        };
        ops::rms_norm(walk.device, call)?;
        Ok(Channels { convolved, qk, v, normed, inverse, weight })
    }

    /// Normalises the heads of `o`; returns them with the inverse rms of each, `[H, T]` in the order of
    /// rows.
    fn norm_heads(&self, heads: View) -> Result<(Tensor, Tensor)> {
        let Self { walk, weights, spec } = *self;
        let mut normed = walk.alloc(heads.extent(), heads.cols(), walk.dtype)?;
        let mut inverse = walk.alloc_turned(heads.cols() / spec.shape.value_dim, heads.extent())?;
        let call = ops::RmsNorm {
            x: by_head(heads, spec.shape.value_dim),
            w: weights.require(ParamKind::DeltaNormWeight)?,
            offset: 0.0,
            eps: walk.decoder.spec().norm.eps,
            y: by_head_mut(&mut normed, spec.shape.value_dim),
            inverse_rms: in_one_row(&mut inverse),
        };
        ops::rms_norm(walk.device, call)?;
        Ok((normed, inverse))
    }

    fn gates(&self) -> HeadGates {
        let head_dim = self.spec.shape.value_dim;
        HeadGates { function: Gate::Silu, head_dim, step: head_dim, offset: 0 }
    }

    /// Splits what a token is projected to into channels, gates, and the inputs of β and the decay.
    fn split<'x>(&self, projected: View<'x>) -> [View<'x>; 4] {
        let mut start = 0;
        self.spec.projected_widths().map(|width| {
            start += width;
            projected.col_range(start - width..start)
        })
    }
}

/// Views heads as rows.
fn by_head(x: View, head_dim: usize) -> View {
    x.reshape(x.rows() * (x.cols() / head_dim), head_dim)
}

fn by_head_mut(x: &mut Tensor, head_dim: usize) -> ViewMut<'_> {
    let rows = x.rows() * (x.cols() / head_dim);
    x.view_mut().reshape(rows, head_dim)
}

/// Views a tensor as one row.
fn in_one_row(x: &mut Tensor) -> ViewMut<'_> {
    let len = x.rows() * x.cols();
    x.view_mut().reshape(1, len)
}

/// Computes the heads' outputs from the normalised input `[T,D]`; also returns the hidden columns of
/// the projection's low-rank terms.
pub(super) fn forward(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    layer: usize,
    input: View,
    attend: &mut dyn AttentionKernel,
) -> Result<(Recurred, Option<Tensor>)> {
    let pass = Pass::new(walk, weights, layer);
    let shape = &pass.spec.shape;
    let (projected, reduced) = walk.linear(weights, PROJECTION.0, PROJECTION.1, input)?;
    let mut recurrence = attend.recurrence(layer);
    let mut heads = walk.alloc(input.extent(), shape.value_width(), walk.dtype)?;
    let [_, z, b, a] = pass.split(projected.view());
    {
        let channels = pass.channels(projected.view(), &mut recurrence)?;
        let call = ops::DeltaRule {
            q: channels.normed.view().col_range(0..shape.key_width()),
            k: channels.normed.view().col_range(shape.key_width()..2 * shape.key_width()),
            v: channels.v.view(),
            a,
            b,
            decay_log: weights.require(ParamKind::DeltaDecayLog)?,
            decay_bias: weights.require(ParamKind::DeltaDecayBias)?,
            shape,
            runs: &recurrence.runs,
            states: recurrence.states.as_mut().map(ViewMut::reborrow),
            out: heads.view_mut(),
        };
        ops::delta_rule(walk.device, call)?;
    }
    let mut output = walk.alloc(input.extent(), shape.value_width(), walk.dtype)?;
    let (normed, _) = pass.norm_heads(heads.view())?;
    ops::head_gate(walk.device, pass.gates(), normed.view(), z, output.view_mut())?;
    drop(normed);
    Ok((Recurred { operands: Some(Operands { projected, heads }), output: Some(output) }, reduced))
}

/// Computes the gradient of the half's input, as [`super::attention::backward`].
pub(super) fn backward(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    layer: usize,
    input: View,
    recurred: Recurred,
    reduced: LoraIntermediate,
    rows: &BlockRows,
    forest: &Forest,
    dy: View,
    d_input: ViewMut,
    gradients: &mut LayerGradients,
) -> Result<LowRankBackward> {
    let pass = Pass::new(walk, weights, layer);
    let (picked, after, tokens) = (rows.picked(), rows.after(), &rows.tokens);
    let (spec, shape, rows) = (pass.spec, &pass.spec.shape, input.extent());
    let Recurred { operands: Some(Operands { projected, heads }), output: Some(output) } = recurred else {
        unreachable!("forward kept the operands and the output of linear attention");
    };
    let picked_heads = walk.pick(output.view(), picked)?;
    let (weight, bias) = (ParamKind::DeltaOutWeight, ParamKind::OutBias);
    let read = picked_heads.view();
    let low_rank = walk.linear_gradients(weights, gradients, weight, bias, read, reduced.out, dy, after)?;
    drop(picked_heads);
    drop(output);
    let mut d_heads = walk.alloc(dy.extent(), shape.value_width(), walk.dtype)?;
    walk.linear_input(weights, weight, dy, low_rank, d_heads.view_mut())?;
    let d_output = walk.spread(d_heads, picked, rows)?;

    let [_, z, b, a] = pass.split(projected.view());
    let mut d_projected = walk.alloc(rows, projected.cols(), walk.dtype)?;
    let [mut d_channels, d_z, db, mut da] = d_projected.view_mut().split_cols(spec.projected_widths());
    let d_heads = pass.output_backward(heads.view(), z, d_output, d_z, gradients)?;
    drop(heads);

    let mut recurrence = Recurrence::of_forest(forest);
    let channels = pass.channels(projected.view(), &mut recurrence)?;
    let mut d_normed = walk.alloc(rows, 2 * shape.key_width(), DType::F32)?;
    let mut d_values = walk.alloc(rows, shape.value_width(), walk.dtype)?;
    let mut d_decay_log = walk.alloc(rows, shape.value_heads, DType::F32)?;
    {
        let [dq, dk] = d_normed.view_mut().split_cols([shape.key_width(); 2]);
        let call = ops::DeltaRuleBackward {
            q: channels.normed.view().col_range(0..shape.key_width()),
            k: channels.normed.view().col_range(shape.key_width()..2 * shape.key_width()),
            v: channels.v.view(),
            a,
            b,
            decay_log: weights.require(ParamKind::DeltaDecayLog)?,
            decay_bias: weights.require(ParamKind::DeltaDecayBias)?,
            shape,
            runs: &recurrence.runs,
            d_out: d_heads.view(),
            dq,
            dk,
            dv: d_values.view_mut(),
            da: da.reborrow(),
            db,
            d_decay_log: d_decay_log.view_mut(),
        };
        ops::delta_rule_backward(walk.device, call)?;
    }
    drop(d_heads);
    let decay = [(ParamKind::DeltaDecayLog, d_decay_log.view()), (ParamKind::DeltaDecayBias, da.view())];
    for (part, terms) in decay {
        if let Some(sum) = gradients.get_mut(part) {
            ops::bias_backward(walk.device, terms, sum)?;
        }
    }
    drop(d_decay_log);
    let d_convolved = pass.channels_backward(channels, d_normed, d_values)?;
    let call = ops::CausalConvBackward {
        x: projected.view().col_range(0..spec.conv_channels()),
        w: weights.require(ParamKind::DeltaConvWeight)?,
        runs: &recurrence.runs,
        dy: d_convolved.view(),
        dx: d_channels.reborrow(),
        dw: gradients.get_mut(ParamKind::DeltaConvWeight),
    };
    ops::causal_conv_backward(walk.device, call)?;
    drop((d_convolved, projected));
    let (weight, bias) = PROJECTION;
    let d_projected = d_projected.view();
    let low_rank =
        walk.linear_gradients(weights, gradients, weight, bias, input, reduced.qkv, d_projected, tokens)?;
    walk.linear_input(weights, weight, d_projected, low_rank, d_input)
}

impl Pass<'_> {
    /// Goes back through gates and norm: writes the gradient of the gates, and returns that of `o`.
    fn output_backward(
        &self,
        heads: View,
        z: View,
        d_output: Tensor,
        d_z: ViewMut,
        gradients: &mut LayerGradients,
    ) -> Result<Tensor> {
        let Self { walk, spec, .. } = *self;
        let (normed, inverse) = self.norm_heads(heads)?;
        let mut d_normed = walk.alloc(heads.extent(), heads.cols(), walk.dtype)?;
        let (dx, dh) = (d_normed.view_mut(), d_output.view());
        ops::head_gate_backward(walk.device, self.gates(), normed.view(), z, dh, dx, d_z)?;
        drop((normed, d_output));
        let mut d_heads = walk.alloc(heads.extent(), heads.cols(), DType::F32)?;
        // One weight serves the heads of all ranks, so its gradient is summed over blocks of heads and
        // over ranks.
        let (num_blocks, part) = (walk.decoder.sum_blocks().num_own(), ParamKind::DeltaNormWeight);
        if num_blocks == 1 {
            let mut terms = if walk.sums_terms() { Some(walk.terms(1, spec.shape.value_dim)?) } else { None };
            let dw = match &mut terms {
                Some(terms) => Some(terms.view_mut()),
                None => gradients.get_mut(part),
            };
            self.norm_backward(heads, inverse, d_normed.view(), &mut d_heads, dw)?;
            drop(d_normed);
            terms.map_or(Ok(()), |terms| walk.add_terms(terms, &[part], RankOrder::Ranks, gradients))?;
            return walk.in_compute_type(d_heads);
        }
        drop(inverse);
        let mut terms = walk.terms(1, spec.shape.value_dim)?;
        let width = heads.cols() / num_blocks;
        for block in 0..num_blocks {
            let columns = block * width..(block + 1) * width;
            let own = |x: View, dtype| -> Result<Tensor> {
                let mut own = walk.alloc(x.extent(), width, dtype)?;
                ops::cast(walk.device, x.col_range(columns.clone()), own.view_mut())?;
                Ok(own)
            };
            let (x, dy) = (own(heads, walk.dtype)?, own(d_normed.view(), walk.dtype)?);
            let (_, inverse) = self.norm_heads(x.view())?;
            let mut dx = walk.alloc(heads.extent(), width, DType::F32)?;
            let dw = terms.view_mut().row_range(block..block + 1);
            self.norm_backward(x.view(), inverse, dy.view(), &mut dx, Some(dw))?;
            ops::cast(walk.device, dx.view(), d_heads.view_mut().col_range(columns))?;
        }
        drop(d_normed);
        walk.add_terms(terms, &[part], RankOrder::Ranks, gradients)?;
        walk.in_compute_type(d_heads)
    }

    /// Computes the gradient of the norm of some heads; overwrites `d_heads`, adds to `dw`.
    fn norm_backward(
        &self,
        heads: View,
        inverse: Tensor,
        d_normed: View,
        d_heads: &mut Tensor,
        dw: Option<ViewMut>,
    ) -> Result<()> {
        let (walk, head_dim) = (self.walk, self.spec.shape.value_dim);
        ops::fill_zero(walk.device, d_heads.view_mut())?;
        let call = ops::RmsNormBackward {
            x: by_head(heads, head_dim),
            w: self.weights.require(ParamKind::DeltaNormWeight)?,
            offset: 0.0,
            inverse_rms: inverse.view().reshape(1, inverse.rows() * inverse.cols()),
            dy: by_head(d_normed, head_dim),
            dx: by_head_mut(d_heads, head_dim),
            dw,
        };
        Ok(ops::rms_norm_backward(walk.device, call)?)
    }

    /// Goes back through norm and SiLU: returns the gradient of what the convolution gave.
    fn channels_backward(&self, channels: Channels, d_normed: Tensor, d_values: Tensor) -> Result<Tensor> {
        let (walk, shape) = (self.walk, &self.spec.shape);
        let Channels { convolved, qk, normed, inverse, weight, .. } = channels;
        drop(normed);
        let (rows, both) = (qk.extent(), qk.cols());
        let mut d_qk = walk.alloc(rows, both, DType::F32)?;
        ops::fill_zero(walk.device, d_qk.view_mut())?;
        let call = ops::RmsNormBackward {
            x: by_head(qk.view(), shape.key_dim),
            w: weight.view(),
            offset: 0.0,
            inverse_rms: inverse.view().reshape(1, inverse.rows() * inverse.cols()),
            dy: by_head(d_normed.view(), shape.key_dim),
            dx: by_head_mut(&mut d_qk, shape.key_dim),
            dw: None,
        };
        ops::rms_norm_backward(walk.device, call)?;
        drop((d_normed, qk));
        let d_qk = walk.in_compute_type(d_qk)?;
        let mut d_convolved = walk.alloc(rows, convolved.cols(), walk.dtype)?;
        let [of_qk, of_v] = d_convolved.view_mut().split_cols([both, shape.value_width()]);
        let (u_qk, u_v) =
            (convolved.view().col_range(0..both), convolved.view().col_range(both..convolved.cols()));
        ops::activate_backward(walk.device, Activation::Silu, u_qk, d_qk.view(), of_qk)?;
        ops::activate_backward(walk.device, Activation::Silu, u_v, d_values.view(), of_v)?;
        Ok(d_convolved)
    }
}
