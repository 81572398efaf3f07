//! Attention of a block: project, normalise heads, rotate (or rotate, normalise), attend, project back.

use std::ops::Range;

use tandem_kernels::ops::{AttentionShape, Gate, HeadGates};
use tandem_kernels::{DType, Device, Extent, Forest, Tensor, View, ViewMut, ops};

use super::linear_attention::Recurrence;
use super::low_rank::{LoraIntermediate, LowRankBackward};
use super::rows::BlockRows;
use super::{LayerExecutor, RankOrder};
use crate::Result;
use crate::layout::ParamKind;
use crate::spec::{AttentionSpec, NormKind, QkNorm, Rotation, TokenPlaces};
use crate::weights::{LayerGradients, LayerWeights};

/// Attention over the forest itself, or over a key/value cache.
pub(crate) trait AttentionKernel {
    /// Returns the place of each row in its text.
    fn places(&self) -> TokenPlaces<'_>;

    /// Computes the attention of block `layer`.
    fn attend(&mut self, layer: usize, heads: Heads) -> Result<()>;

    /// Returns the texts of the linear attention of block `layer`.
    fn recurrence(&mut self, layer: usize) -> Recurrence<'_>;
}

/// Operands of one block's attention.
pub(crate) struct Heads<'a> {
    /// `[T, H·d]`.
    pub(crate) q: View<'a>,
    /// `[T, K·d]`.
    pub(crate) k: View<'a>,
    /// `[T, K·d]`.
    pub(crate) v: View<'a>,
    pub(crate) shape: &'a AttentionShape,
    /// `[T, H·d]`.
    pub(crate) out: ViewMut<'a>,
    /// `[T, H]` f32. Need only be written if backward follows.
    pub(crate) log_sum_exp: ViewMut<'a>,
}

impl<'a> Heads<'a> {
    /// Computes attention over a forest.
    pub(crate) fn attend_forest(self, device: &Device, forest: &'a Forest) -> Result<()> {
        self.attend_from(0, device, forest)
    }

    /// Computes attention of the tokens from `first_query` on; `k` and `v` are those of all tokens.
    pub(crate) fn attend_from(self, first_query: usize, device: &Device, forest: &'a Forest) -> Result<()> {
        let Self { q, k, v, shape, out, log_sum_exp } = self;
        Ok(ops::attention(device, ops::Attention { q, k, v, forest, first_query, shape, out, log_sum_exp })?)
    }
}

/// Attention over a forest: training and evaluation.
pub(crate) struct ForestAttention<'a> {
    pub(crate) device: &'a Device,
    pub(crate) forest: &'a Forest,
}

impl AttentionKernel for ForestAttention<'_> {
    fn places(&self) -> TokenPlaces<'_> {
        TokenPlaces::of_forest(self.forest)
    }

    fn attend(&mut self, _: usize, heads: Heads) -> Result<()> {
        heads.attend_forest(self.device, self.forest)
    }

    fn recurrence(&mut self, _: usize) -> Recurrence<'_> {
        Recurrence::of_forest(self.forest)
    }
}

/// Tensors of attention that backward reads.
pub(super) struct Attended {
    operands: Option<Operands>,
    /// `[T, H·d]`.
    output: Option<Tensor>,
    /// The output through the gates, if heads have gates.
    gated: Option<Tensor>,
}

/// Operands of attention, and its normaliser.
struct Operands {
    /// `[T, (H+2K)·d]`: q and k rotated (unless they are normalised first: then as projected), v. Where
    /// heads have gates, each query head is followed by its own.
    qkv: Tensor,
    /// Normalised and rotated q and k `[T, (H+K)·d]`, and the inverse rms of each head `[H+K, T]`.
    normed: Option<(Tensor, Tensor)>,
    /// `[T, H]` f32.
    log_sum_exp: Tensor,
}

impl Attended {
    /// Returns the heads' outputs, which must not have been dropped.
    pub(super) fn output(&self) -> View<'_> {
        self.gated.as_ref().or(self.output.as_ref()).expect("the heads' output was dropped").view()
    }

    pub(super) fn drop_operands(&mut self) {
        self.operands = None;
    }

    pub(super) fn drop_output(&mut self) {
        (self.output, self.gated) = (None, None);
    }
}

/// Views queries, keys and values as attention reads them.
fn query_key_value<'a>(
    spec: &AttentionSpec,
    qkv: &'a Tensor,
    normed: Option<&'a (Tensor, Tensor)>,
) -> (View<'a>, View<'a>, View<'a>) {
    let (query, both) = (spec.query_width(), spec.query_width() + spec.kv_width());
    let qk = normed.map_or_else(|| qkv.view(), |(qk, _)| qk.view());
    let v = qkv.view().col_range(spec.qkv_width() - spec.kv_width()..spec.qkv_width());
    (qk.col_range(0..query), qk.col_range(query..both), v)
}

/// Returns the places of the heads' gates among the projected queries, if heads have gates.
fn head_gates(spec: &AttentionSpec) -> Option<HeadGates> {
    let head_dim = spec.head_dim;
    spec.gated.then_some(HeadGates {
        function: Gate::Sigmoid,
        head_dim,
        step: 2 * head_dim,
        offset: head_dim,
    })
}

/// Views the projected queries with their gates.
fn projected_queries<'a>(spec: &AttentionSpec, qkv: &'a Tensor) -> View<'a> {
    qkv.view().col_range(0..spec.projected_query_width())
}

/// Computes the heads' outputs from the normalised input `[T,D]`; also returns the hidden columns
/// of the projection's low-rank terms.
pub(super) fn forward(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    layer: usize,
    input: View,
    attend: &mut dyn AttentionKernel,
) -> Result<(Attended, Option<Tensor>)> {
    let spec = &walk.decoder.spec().attention;
    let (mut qkv, reduced) = walk.linear(weights, ParamKind::QkvWeight, ParamKind::QkvBias, input)?;
    let rotates_first = spec.qk_norm == Some(QkNorm::PerHeadRotated);
    if rotates_first {
        rotate(walk, layer, qkv.view_mut(), attend.places(), false)?;
    }
    let mut normed = match spec.qk_norm {
        Some(kind) => Some(norm_heads(walk, weights, kind, qkv.view())?),
        None => None,
    };
    if !rotates_first {
        let qk = normed.as_mut().map_or_else(|| qkv.view_mut(), |(qk, _)| qk.view_mut());
        rotate(walk, layer, qk, attend.places(), false)?;
    }
    let mut output = walk.alloc(input.extent(), spec.query_width(), walk.dtype)?;
    let mut log_sum_exp = walk.alloc(input.extent(), spec.heads, DType::F32)?;
    let (q, k, v) = query_key_value(spec, &qkv, normed.as_ref());
    let (shape, out, log_sum_exp_out) = (&spec.shape(layer), output.view_mut(), log_sum_exp.view_mut());
    attend.attend(layer, Heads { q, k, v, shape, out, log_sum_exp: log_sum_exp_out })?;
    let mut gated = None;
    if let Some(gates) = head_gates(spec) {
        let h = gated.insert(walk.alloc(input.extent(), spec.query_width(), walk.dtype)?);
        let gate = projected_queries(spec, &qkv);
        ops::head_gate(walk.device, gates, output.view(), gate, h.view_mut())?;
    }
    let operands = Some(Operands { qkv, normed, log_sum_exp });
    Ok((Attended { operands, output: Some(output), gated }, reduced))
}

/// Computes this rank's term of the gradient of the half's input from `dy`, which is in the compute type
/// and of the rows that went on; overwrites `d_input`. Returns the result of
/// [`LayerExecutor::linear_input`].
pub(super) fn backward(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    layer: usize,
    input: View,
    attended: Attended,
    reduced: LoraIntermediate,
    rows: &BlockRows,
    forest: &Forest,
    dy: View,
    d_input: ViewMut,
    gradients: &mut LayerGradients,
) -> Result<LowRankBackward> {
    let spec = &walk.decoder.spec().attention;
    let (picked, after, tokens, rows) = (rows.picked(), rows.after(), &rows.tokens, input.extent());
    let Attended { operands: Some(operands), output: Some(output), gated } = attended else {
        unreachable!("forward kept attention's operands and output");
    };
    let Operands { qkv, normed, log_sum_exp } = operands;
    let heads = walk.pick(gated.as_ref().unwrap_or(&output).view(), picked)?;
    let (weight, bias) = (ParamKind::OutWeight, ParamKind::OutBias);
    let low_rank =
        walk.linear_gradients(weights, gradients, weight, bias, heads.view(), reduced.out, dy, after)?;
    drop(heads);
    drop(gated);
    let mut d_heads = walk.alloc(dy.extent(), spec.query_width(), walk.dtype)?;
    walk.linear_input(weights, weight, dy, low_rank, d_heads.view_mut())?;
    let mut d_output = walk.spread(d_heads, picked, rows)?;
    let mut d_qkv = walk.alloc(rows, spec.qkv_width(), walk.dtype)?;
    let widths = [spec.projected_query_width(), spec.kv_width(), spec.kv_width()];
    // Beside gates, the gradients of queries and keys do not have the places of the projected ones.
    let mut d_qk = None;
    if let Some(gates) = head_gates(spec) {
        let [d_queries, _, _] = d_qkv.view_mut().split_cols(widths);
        let mut d_raw = walk.alloc(rows, spec.query_width(), walk.dtype)?;
        let (gate, dh, dx) = (projected_queries(spec, &qkv), d_output.view(), d_raw.view_mut());
        ops::head_gate_backward(walk.device, gates, output.view(), gate, dh, dx, d_queries)?;
        d_output = d_raw;
        d_qk = Some(walk.alloc(rows, spec.query_width() + spec.kv_width(), walk.dtype)?);
    }
    {
        let (q, k, v) = query_key_value(spec, &qkv, normed.as_ref());
        let [dq, dk, dv] = d_qkv.view_mut().split_cols(widths);
        let [dq, dk] = match &mut d_qk {
            None => [dq, dk],
            Some(d_qk) => d_qk.view_mut().split_cols([spec.query_width(), spec.kv_width()]),
        };
        let (out, lse, d_out) = (output.view(), log_sum_exp.view(), d_output.view());
        let call = ops::AttentionBackward {
            q,
            k,
            v,
            out,
            log_sum_exp: lse,
            d_out,
            forest,
            shape: &spec.shape(layer),
            model_kv_heads: walk.decoder.whole().spec().attention.kv_heads,
            dq,
            dk,
            dv,
        };
        ops::attention_backward(walk.device, call)?;
    }
    drop((d_output, output, log_sum_exp));
    let rotates_first = spec.qk_norm == Some(QkNorm::PerHeadRotated);
    if !rotates_first {
        let rotated = d_qk.as_mut().map_or_else(|| d_qkv.view_mut(), Tensor::view_mut);
        rotate(walk, layer, rotated, TokenPlaces::of_forest(forest), true)?;
    }
    if let Some(((normed, inverse_rms), kind)) = normed.zip(spec.qk_norm) {
        drop(normed);
        let inverse = inverse_rms.view();
        norm_heads_backward(walk, weights, kind, qkv.view(), inverse, d_qk.as_ref(), &mut d_qkv, gradients)?;
    }
    if rotates_first {
        rotate(walk, layer, d_qkv.view_mut(), TokenPlaces::of_forest(forest), true)?;
    }
    drop(qkv);
    let (weight, bias) = (ParamKind::QkvWeight, ParamKind::QkvBias);
    let low_rank =
        walk.linear_gradients(weights, gradients, weight, bias, input, reduced.qkv, d_qkv.view(), tokens)?;
    walk.linear_input(weights, weight, d_qkv.view(), low_rank, d_input)
}

/// Rotates the queries and keys of a block, the first columns of `qk`, in place; `inverse` rotates
/// their gradient back.
fn rotate(walk: &LayerExecutor, layer: usize, qk: ViewMut, places: TokenPlaces, inverse: bool) -> Result<()> {
    let spec = &walk.decoder.spec().attention;
    let Some(rope) = walk.decoder.rope(layer) else { return Ok(()) };
    let Rotation { tables, rows } = rope.rotation(places);
    let [queries, keys, _] = {
        let rest = qk.cols() - spec.query_width() - spec.kv_width();
        match tables.keys {
            None => qk.split_cols([spec.query_width() + spec.kv_width(), 0, rest]),
            Some(_) => qk.split_cols([spec.query_width(), spec.kv_width(), rest]),
        }
    };
    ops::rope(walk.device, queries, spec.head_dim, &rows, &tables.queries, inverse)?;
    if let Some(table) = &tables.keys {
        ops::rope(walk.device, keys, spec.head_dim, &rows, table, inverse)?;
    }
    Ok(())
}

/// Lists the parts of queries and keys that are normalised together, by columns of
/// [`heads_of_norm`], with their norm's weight: each query head, then each key head, or all query
/// heads, then all key heads.
fn norm_groups(
    spec: &AttentionSpec,
    kind: QkNorm,
) -> impl Iterator<Item = (ParamKind, Range<usize>)> + use<> {
    let (query, key, query_step, key_step) = match kind {
        QkNorm::PerHead | QkNorm::PerHeadRotated => {
            (spec.query_width(), spec.kv_width(), spec.head_dim, spec.head_dim)
        }
        QkNorm::Full { queries, keys } => (queries, keys, queries, keys),
    };
    let groups = |part, range: Range<usize>, step| {
        range.step_by(step).map(move |start: usize| (part, start..start + step))
    };
    let queries = groups(ParamKind::QNormWeight, 0..query, query_step);
    queries.chain(groups(ParamKind::KNormWeight, query..query + key, key_step))
}

/// Gathers the queries and keys of all ranks `[T, (H+K)·d]`, if they are normalised together; `own`
/// begins with this rank's.
fn heads_of_norm(walk: &LayerExecutor, kind: QkNorm, own: View) -> Result<Option<Tensor>> {
    let (Some(split), QkNorm::Full { queries, keys }) = (walk.split, kind) else { return Ok(None) };
    let (slice, rows) = (walk.decoder.slice(), own.extent());
    let (query, key) = (queries / slice.count, keys / slice.count);
    let of_ranks = Extent::new(slice.count * rows.len(), slice.count * rows.room());
    let mut gathered = walk.alloc(of_ranks, query + key, own.dtype())?;
    let rows_of = |rank: usize| rank * rows.len()..(rank + 1) * rows.len();
    let place = gathered.view_mut().row_range(rows_of(slice.index));
    ops::cast(walk.device, own.col_range(0..query + key), place)?;
    split.gather_rows(walk.device, &mut gathered, &vec![rows.len(); slice.count])?;
    let mut all = walk.alloc(rows, queries + keys, own.dtype())?;
    for rank in 0..slice.count {
        let from = gathered.view().row_range(rows_of(rank));
        for (start, width, offset) in [(0, query, 0), (query, key, queries)] {
            let to = offset + rank * width..offset + (rank + 1) * width;
            ops::cast(walk.device, from.col_range(start..start + width), all.view_mut().col_range(to))?;
        }
    }
    Ok(Some(all))
}

/// Returns this rank's columns among those of a group that all ranks' heads form, and their columns in
/// its projection.
fn own_columns(walk: &LayerExecutor, group: &Range<usize>) -> (Range<usize>, Range<usize>) {
    let slice = walk.decoder.slice();
    let width = group.len() / slice.count;
    let within = slice.index * width..(slice.index + 1) * width;
    let start = group.start / slice.count;
    (within, start..start + width)
}

/// Returns the projected columns of a group of queries or keys: beside gates, a query head lies before
/// its own.
fn projected_columns(spec: &AttentionSpec, group: &Range<usize>) -> Range<usize> {
    let gates = match group.start.checked_sub(spec.query_width()) {
        Some(_) => spec.projected_query_width() - spec.query_width(),
        None if spec.gated => group.start,
        None => 0,
    };
    group.start + gates..group.end + gates
}

fn rms_offset(walk: &LayerExecutor) -> f32 {
    match walk.decoder.spec().norm.kind {
        NormKind::Rms { offset } => offset,
        NormKind::Layer { .. } => 0.0,
    }
}

/// Normalises queries and keys of `qkv` by the rms of each group: `([T, (H+K)·d], inverse rms [groups,
/// T])`.
fn norm_heads(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    kind: QkNorm,
    qkv: View,
) -> Result<(Tensor, Tensor)> {
    let (spec, eps, offset) =
        (&walk.decoder.spec().attention, walk.decoder.spec().norm.eps, rms_offset(walk));
    let width = spec.query_width() + spec.kv_width();
    let mut inverse = walk.alloc_turned(norm_groups(spec, kind).count(), qkv.extent())?;
    let mut qk = walk.alloc(qkv.extent(), width, walk.dtype)?;
    let all = heads_of_norm(walk, kind, qkv)?;
    for (group, (part, cols)) in norm_groups(spec, kind).enumerate() {
        let weight = weights.require(part)?;
        let r = inverse.view_mut().row_range(group..group + 1);
        let Some(all) = &all else {
            let (y, projected) = (qk.view_mut().col_range(cols.clone()), projected_columns(spec, &cols));
            let call =
                ops::RmsNorm { x: qkv.col_range(projected), w: weight, offset, eps, y, inverse_rms: r };
            ops::rms_norm(walk.device, call)?;
            continue;
        };
        let mut normed = walk.alloc(qkv.extent(), cols.len(), walk.dtype)?;
        let (x, y) = (all.view().col_range(cols.clone()), normed.view_mut());
        ops::rms_norm(walk.device, ops::RmsNorm { x, w: weight, offset, eps, y, inverse_rms: r })?;
        let (within, own) = own_columns(walk, &cols);
        ops::cast(walk.device, normed.view().col_range(within), qk.view_mut().col_range(own))?;
    }
    Ok((qk, inverse))
}

/// Turns the gradient of the normalised queries and keys, in `d_qk` or in place, into that of the projected
/// ones in `d_qkv`.
fn norm_heads_backward(
    walk: &LayerExecutor,
    weights: &LayerWeights,
    kind: QkNorm,
    qkv: View,
    inverse: View,
    d_qk: Option<&Tensor>,
    d_qkv: &mut Tensor,
    gradients: &mut LayerGradients,
) -> Result<()> {
    let (spec, offset) = (&walk.decoder.spec().attention, rms_offset(walk));
    let widest = norm_groups(spec, kind).map(|(_, cols)| cols.len()).max().expect("a model has heads");
    let mut d_group = walk.alloc(qkv.extent(), widest, DType::F32)?;
    let all = match heads_of_norm(walk, kind, qkv)? {
        Some(x) => heads_of_norm(walk, kind, d_qkv.view())?.map(|dy| (x, dy)),
        None => None,
    };
    // Where each head has a norm, one weight serves the heads of all ranks, so its gradient is summed
    // over blocks of heads and over ranks. Where all heads have one, every rank computes all of it.
    let is_by_head = !matches!(kind, QkNorm::Full { .. });
    let mut d_weights = if is_by_head && walk.sums_terms() { Some(walk.terms(2, widest)?) } else { None };
    let num_blocks = walk.decoder.sum_blocks().num_own();
    for (group, (part, cols)) in norm_groups(spec, kind).enumerate() {
        let (weight, r) = (weights.require(part)?, inverse.row_range(group..group + 1));
        let width = cols.len();
        ops::fill_zero(walk.device, d_group.view_mut().col_range(0..width))?;
        let projected = projected_columns(spec, &cols);
        let (x, dy) = match (&all, d_qk) {
            (Some((x, dy)), _) => (x.view().col_range(cols.clone()), dy.view().col_range(cols.clone())),
            (None, Some(d_qk)) => (qkv.col_range(projected.clone()), d_qk.view().col_range(cols.clone())),
            (None, None) => (qkv.col_range(cols.clone()), d_qkv.view().col_range(cols.clone())),
        };
        let is_key = part == ParamKind::KNormWeight;
        let (start, all_heads) =
            if is_key { (spec.query_width(), spec.kv_width()) } else { (0, spec.query_width()) };
        let block = (cols.start - start) * num_blocks / all_heads.max(1);
        let row = 2 * block + usize::from(is_key);
        let dw = match &mut d_weights {
            Some(terms) => Some(terms.view_mut().row_range(row..row + 1)),
            None => gradients.get_mut(part),
        };
        let dx = d_group.view_mut().col_range(0..width);
        let call = ops::RmsNormBackward { x, w: weight, offset, inverse_rms: r, dy, dx, dw };
        ops::rms_norm_backward(walk.device, call)?;
        let (within, own) = if all.is_some() { own_columns(walk, &cols) } else { (0..width, projected) };
        ops::cast(walk.device, d_group.view().col_range(within), d_qkv.view_mut().col_range(own))?;
    }
    d_weights.map_or(Ok(()), |terms| {
        let parts = [ParamKind::QNormWeight, ParamKind::KNormWeight];
        walk.add_terms(terms, &parts, RankOrder::Ranks, gradients)
    })
}
