//! One transformer block, forward and backward, for every arrangement of its two halves.
//!
//! Forward. `R` is `T`, unless only the scored rows go on after the last block's attention. The
//! residual stream `x`, `m`, `y` is f32 or the compute type ([`crate::Decoder::residual`]), everything inside
//! a half is in the compute type:
//!
//! ```text
//! n1_TD   = norm1(x_TD)
//! q, k, v = split(n1 · Wqkvᵀ + b)                  [T, H·d], [T, K·d], [T, K·d]
//! q, k    = rope(head_norm(q)), rope(head_norm(k))   each where the model has it
//! a_TA    = attention(q, k, v)                     A = H·d
//! m_RD    = x + a · Woutᵀ + b
//! n2_RD   = norm2(m)
//! u_RF    = n2 · Wupᵀ + b                          gate and up [R, 2F], if gated
//! h_RF    = f(u), or f(gate) ⊙ up
//! y_RD    = m + h · Wdownᵀ + b
//! ```
//!
//! In a parallel block `n2 = norm2(x)`, or `n1` where one norm serves both halves.
//!
//! A sequential block may normalise what a half gives before or instead of what it takes, and scale
//! it: `m = x + s · post1(a · Woutᵀ + b)`, and so for `y`. Without norms before, `n1 = x` and `n2 = m`.
//!
//! A block may have linear attention in place of attention ([`super::linear_attention`]), between the same
//! norm and the same sum.
//!
//! Backward, from `dy_RD` to `dx_TD`. Each product `z = x · Wᵀ + b` also adds `dW += dzᵀ · x` and
//! `db += Σ_rows dz`:
//!
//! ```text
//! dh   = dy · Wdown
//! du   = f′(u) ⊙ dh, or (f′(gate) ⊙ up ⊙ dh, f(gate) ⊙ dh)
//! dn2  = du · Wup
//! dm   = dy + norm2′(m, dn2)
//! da   = dm · Wout
//! dqkv = attention′(q, k, v, a, da), rotated back, through the head norms
//! dn1  = dqkv · Wqkv
//! dx   = dm + norm1′(x, dn1)
//! ```
//!
//! In a parallel block `dm = dy`, and both norms' gradients are added to `dx`; a shared norm's are
//! summed first. Where a half's output is normalised or scaled, `dy` and `dm` go through `post′` and
//! `s` on their way into its products.
//!
//! Tensor parallelism: a rank holds some heads and channels, and its own rows of the residual
//! stream. `norm` gathers the rows of all ranks, [`LayerExecutor::join`] sums the ranks' terms where a half
//! ends (a parallel block once, at its end); backward, [`LayerExecutor::whole`] gathers and
//! [`LayerExecutor::sum_rows`] sums. Low-rank terms are part of a product ([`super::low_rank`]).
//!
//! Memory: [`SavePolicy`] says which tensors stay for backward; the others are dropped as soon as nothing
//! reads them.

use std::ops::Range;

use tandem_kernels::{DType, Extent, Forest, Tensor, View, ops};

use super::attention::{AttentionKernel, ForestAttention};
use super::away::OffloadedActivation;
use super::low_rank::LoraIntermediate;
use super::mixer::{self, Mixed};
use super::norm::{
    NORM1, NORM2, NormParts, Normed, POST_NORM1, POST_NORM2, norm, norm_after, norm_backward, restore,
};
use super::rows::{BlockRows, SequenceParallelRows, SomeRows};
use super::{LayerExecutor, SelectedRows, mlp};
use crate::Result;
use crate::layout::ParamKind;
use crate::spec::Residual;
use crate::weights::{LayerGradients, LayerWeights};

/// Tensors that a block's forward keeps for backward; each level includes the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SavePolicy {
    /// Nothing: no backward follows.
    Nothing,
    /// The block's input.
    Input,
    /// All but the outputs of norms and activations.
    Selective,
    /// All but the outputs of norms.
    AllButNorms,
    /// Everything backward reads.
    All,
}

/// Tensors that a block's forward kept.
pub(crate) struct SavedBlock {
    /// `[T,D]`, if it is on the device.
    pub(super) input: Option<Tensor>,
    /// The input, if it is offloaded.
    pub(super) away: Option<OffloadedActivation>,
    rows: BlockRows,
    inner: Option<Inner>,
}

/// Tensors between a block's input and its last product. A tensor-parallel rank has its heads and
/// channels of all rows; only the middle of a sequential block is of its own rows alone.
struct Inner {
    /// `n1`, of all rows.
    norm1: Normed,
    mixed: Mixed,
    /// `m` `[R,D]`, this rank's rows.
    middle: Option<Tensor>,
    /// `n2`, of R rows. Absent if one norm serves both halves.
    norm2: Option<Normed>,
    /// `u`.
    up: Option<Tensor>,
    /// `h`.
    hidden: Option<Tensor>,
    /// Output of attention, before its norm.
    attention_term: Option<HalfTerm>,
    /// Output of the feed-forward, before its norm.
    mlp_term: Option<HalfTerm>,
    reduced: LoraIntermediate,
}

/// Output of a half before the norm that follows it, `[R,D]` f32, and that norm's statistics.
struct HalfTerm {
    output: Tensor,
    normed: Normed,
}

impl Inner {
    /// Drops tensors that nothing reads after attention, but backward would.
    fn after_attention(&mut self, keep: SavePolicy, residual: Residual) {
        if keep < SavePolicy::Selective {
            self.mixed.drop_operands();
            self.reduced.qkv = None;
        }
        if keep < SavePolicy::All && residual != (Residual::Parallel { shared_norm: true }) {
            self.norm1.drop_output();
        }
    }

    /// Drops tensors that nothing reads after the heads' projection, but backward would.
    fn after_projection(&mut self, keep: SavePolicy) {
        if keep < SavePolicy::Selective {
            self.mixed.drop_output();
            self.reduced.out = None;
            self.attention_term = None;
        }
    }

    /// Drops tensors that nothing reads after the first product of the feed-forward, but backward
    /// would.
    fn after_up(&mut self, keep: SavePolicy) {
        if keep < SavePolicy::All {
            self.norm1.drop_output();
            self.norm2.iter_mut().for_each(Normed::drop_output);
        }
    }

    /// Drops tensors that nothing reads after the activation, but backward would.
    fn after_activation(&mut self, keep: SavePolicy) {
        if keep < SavePolicy::Selective {
            self.up = None;
            self.reduced.up = None;
        }
    }
}

pub(crate) struct Block<'a> {
    pub(crate) walk: &'a LayerExecutor<'a>,
    pub(crate) weights: &'a LayerWeights<'a>,
    pub(crate) index: usize,
}

impl Block<'_> {
    /// Computes the residual stream after the block, `[R,D]`, from the one before it, `[T,D]`;
    /// both are this rank's rows.
    pub(crate) fn forward(
        &self,
        x: Tensor,
        attend: &mut dyn AttentionKernel,
        rows: BlockRows,
        keep: SavePolicy,
    ) -> Result<(Tensor, SavedBlock)> {
        let mut input = Some(x);
        let mut inner = self.inner(&mut input, attend, &rows, keep)?;
        let y = self.last_product(&mut inner, &rows)?;
        if keep < SavePolicy::AllButNorms {
            inner.hidden = None;
        }
        if !matches!(self.residual(), Residual::Sequential { .. }) {
            inner.middle = None;
        }
        let inner = (keep >= SavePolicy::Selective).then_some(inner);
        Ok((y, SavedBlock { input, away: None, rows, inner }))
    }

    /// Computes the residual stream after the block from `h` and `m`.
    fn last_product(&self, inner: &mut Inner, rows: &BlockRows) -> Result<Tensor> {
        let (hidden, middle) = inner.hidden.as_ref().zip(inner.middle.as_ref()).expect("inner() leaves both");
        let (walk, weight, bias) = (self.walk, ParamKind::DownWeight, ParamKind::DownBias);
        let (hidden, middle) = (hidden.view(), middle.view());
        let residual = (!self.changes_terms()).then_some(middle);
        let (y, reduced) = walk.linear_term(self.weights, weight, bias, hidden, residual, rows.after())?;
        let (y, term) = self.add_term(y, middle, POST_NORM2, rows.after())?;
        (inner.reduced.down, inner.mlp_term) = (reduced, term);
        Ok(y)
    }

    fn residual(&self) -> Residual {
        self.walk.decoder.spec().residual
    }

    /// Returns the factor on what a half adds to the residual stream.
    fn residual_scale(&self) -> f32 {
        match self.residual() {
            Residual::Sequential { scale, .. } => scale,
            Residual::Parallel { .. } => 1.0,
        }
    }

    /// Returns whether a half's output is normalised or scaled before it joins the residual stream.
    fn changes_terms(&self) -> bool {
        self.walk.decoder.spec().norms_after() || self.residual_scale() != 1.0
    }

    /// Adds a half's output to this rank's rows of the residual stream. `output` contains the stream
    /// already unless the output is normalised or scaled first.
    fn add_term(
        &self,
        output: Tensor,
        stream: View,
        post_norm: NormParts,
        rows: &SequenceParallelRows,
    ) -> Result<(Tensor, Option<HalfTerm>)> {
        if !self.changes_terms() {
            return Ok((output, None));
        }
        let (walk, scale) = (self.walk, self.residual_scale());
        let (mut sum, term) = if walk.decoder.spec().norms_after() {
            let (y, normed) = norm_after(walk, self.weights, post_norm, output.view(), rows.own_extent())?;
            (y, Some(HalfTerm { output, normed }))
        } else {
            (output, None)
        };
        if scale != 1.0 {
            ops::scale(walk.device, sum.view_mut(), scale)?;
        }
        ops::add(walk.device, stream, sum.view_mut())?;
        Ok((walk.in_stream_type(sum)?, term))
    }

    /// Computes the gradient of a half's output from `dy`, that of the residual stream after it, this
    /// rank's rows. `None` if they are the same.
    fn term_backward(
        &self,
        term: Option<HalfTerm>,
        post_norm: NormParts,
        dy: View,
        blocks: &[Range<usize>],
        gradients: &mut LayerGradients,
    ) -> Result<Option<Tensor>> {
        let (walk, scale) = (self.walk, self.residual_scale());
        let scaled = if scale == 1.0 { None } else { Some(self.scaled(dy, scale)?) };
        if !walk.decoder.spec().norms_after() {
            return Ok(scaled);
        }
        let dy = scaled.as_ref().map_or(dy, Tensor::view);
        let HalfTerm { output, normed } = term.expect("forward kept the half's output");
        let mut d_term = walk.alloc(dy.extent(), dy.cols(), DType::F32)?;
        ops::fill_zero(walk.device, d_term.view_mut())?;
        self.norm_backward(post_norm, output.view(), &normed, dy, &mut d_term, blocks, gradients)?;
        Ok(Some(d_term))
    }

    /// Computes `scale · x`, f32.
    fn scaled(&self, x: View, scale: f32) -> Result<Tensor> {
        let mut y = self.walk.alloc(x.extent(), x.cols(), DType::F32)?;
        ops::cast(self.walk.device, x, y.view_mut())?;
        ops::scale(self.walk.device, y.view_mut(), scale)?;
        Ok(y)
    }

    /// Computes all but the last product; `hidden` and `middle` stay whatever `keep` says. Backward
    /// runs it again for tensors that were not kept: the same operations in the same order give the
    /// same bits.
    fn inner(
        &self,
        input: &mut Option<Tensor>,
        attend: &mut dyn AttentionKernel,
        rows: &BlockRows,
        keep: SavePolicy,
    ) -> Result<Inner> {
        let (walk, weights, residual) = (self.walk, self.weights, self.residual());
        let x = input.as_ref().expect("a block starts with its input").view();

        let norm1 = norm(walk, weights, NORM1, x, &rows.tokens)?;
        let (mixed, qkv) = mixer::forward(walk, weights, self.index, norm1.output(), attend)?;
        let reduced = LoraIntermediate { qkv, ..LoraIntermediate::default() };
        let mut inner = Inner {
            norm1,
            mixed,
            middle: None,
            norm2: None,
            up: None,
            hidden: None,
            attention_term: None,
            mlp_term: None,
            reduced,
        };
        inner.after_attention(keep, residual);

        let x_picked = walk.pick(x, rows.own_picked())?;
        let (mut middle, out) = {
            let heads = walk.pick(inner.mixed.output(), rows.picked())?;
            let (weight, bias) = (inner.mixed.out_weight(), ParamKind::OutBias);
            let stream = (!self.changes_terms()).then_some(x_picked.view());
            walk.linear_term(weights, weight, bias, heads.view(), stream, rows.after())?
        };
        (middle, inner.attention_term) = self.add_term(middle, x_picked.view(), POST_NORM1, rows.after())?;
        inner.reduced.out = out;
        inner.after_projection(keep);

        inner.norm2 = match residual {
            Residual::Sequential { .. } => Some(norm(walk, weights, NORM2, middle.view(), rows.after())?),
            Residual::Parallel { shared_norm: false } => {
                Some(norm(walk, weights, NORM2, x_picked.view(), rows.after())?)
            }
            Residual::Parallel { shared_norm: true } => None,
        };
        inner.middle = Some(middle);
        drop(x_picked);
        if keep == SavePolicy::Nothing {
            *input = None;
        }

        let (up, reduced_up) = {
            let n2 = match &inner.norm2 {
                Some(norm2) => SelectedRows::All(norm2.output()),
                None => walk.pick(inner.norm1.output(), rows.picked())?,
            };
            walk.linear(weights, ParamKind::UpWeight, ParamKind::UpBias, n2.view())?
        };
        inner.after_up(keep);
        inner.hidden = Some(mlp::activate(walk, up.view())?);
        (inner.up, inner.reduced.up) = (Some(up), reduced_up);
        inner.after_activation(keep);
        Ok(inner)
    }

    /// Turns `dx`, the gradient of the residual stream after the block `[R,D]`, into the one before
    /// it `[T,D]`, in place; both are this rank's rows.
    pub(super) fn backward(
        &self,
        saved: SavedBlock,
        forest: &Forest,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let SavedBlock { mut input, rows, inner, .. } = saved;
        let mut inner = match inner {
            Some(inner) => inner,
            None => {
                let mut attend = ForestAttention { device: self.walk.device, forest };
                let mut inner = self.inner(&mut input, &mut attend, &rows, SavePolicy::All)?;
                if self.walk.decoder.spec().norms_after() {
                    self.last_product(&mut inner, &rows)?;
                }
                inner
            }
        };
        let x = input.expect("forward kept the block's input");
        match self.residual() {
            Residual::Sequential { .. } => {
                let middle = inner.middle.take().expect("forward kept the middle");
                self.mlp_half(&mut inner, middle.view(), rows.after(), dx, gradients)?;
                drop(middle);
                self.attention_half(inner, x.view(), &rows, forest, dx, gradients)
            }
            Residual::Parallel { shared_norm } => {
                self.parallel(inner, x.view(), &rows, shared_norm, forest, dx, gradients)
            }
        }
    }

    /// Adds the gradient of `mlp(norm2(m))` by `m` to `dx`, in a sequential block.
    fn mlp_half(
        &self,
        inner: &mut Inner,
        middle: View,
        shares: &SequenceParallelRows,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let (walk, weights) = (self.walk, self.weights);
        let mut norm2 = inner.norm2.take().expect("a sequential block has a second norm");
        restore(walk, weights, NORM2, middle, shares, &mut norm2)?;
        let mut dn = walk.alloc(shares.all(), dx.cols(), walk.branch_type())?;
        {
            let d_term =
                self.term_backward(inner.mlp_term.take(), POST_NORM2, dx.view(), shares.blocks(), gradients)?;
            let d_own = d_term.as_ref().map_or_else(|| dx.view(), Tensor::view);
            let whole = walk.whole(d_own, shares, walk.dtype)?;
            let dy = whole.as_ref().map_or(d_own, Tensor::view);
            let (up, hidden) = (inner.up.take(), inner.hidden.take());
            self.mlp_backward(
                up,
                hidden,
                &mut inner.reduced,
                norm2.output(),
                dy,
                &mut dn,
                shares,
                gradients,
            )?;
        }
        norm2.drop_output();
        let dn = shares.own_of(dn.view());
        self.norm_backward(NORM2, middle, &norm2, dn, dx, shares.blocks(), gradients)
    }

    /// Adds the gradient of `attention(norm1(x))` by `x` to `dx`, in a sequential block.
    fn attention_half(
        &self,
        inner: Inner,
        x: View,
        rows: &BlockRows,
        forest: &Forest,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let (walk, weights) = (self.walk, self.weights);
        let Inner { mut norm1, mixed, reduced, attention_term, .. } = inner;
        restore(walk, weights, NORM1, x, &rows.tokens, &mut norm1)?;
        let mut dn = walk.alloc(rows.tokens.all(), x.cols(), walk.branch_type())?;
        {
            let d_term =
                self.term_backward(attention_term, POST_NORM1, dx.view(), rows.after().blocks(), gradients)?;
            let d_own = d_term.as_ref().map_or_else(|| dx.view(), Tensor::view);
            let whole = walk.whole(d_own, rows.after(), walk.dtype)?;
            let dy = whole.as_ref().map_or(d_own, Tensor::view);
            self.mixer_backward(norm1.output(), mixed, reduced, rows, forest, dy, &mut dn, gradients)?;
        }
        norm1.drop_output();
        self.spread(dx, rows.own_picked(), rows.tokens.own_extent())?;
        let dn = rows.tokens.own_of(dn.view());
        self.norm_backward(NORM1, x, &norm1, dn, dx, rows.tokens.blocks(), gradients)
    }

    /// Adds the gradients of both halves of a parallel block to `dx`. Both read the same `dx`, so
    /// it changes last.
    fn parallel(
        &self,
        mut inner: Inner,
        x: View,
        rows: &BlockRows,
        shared_norm: bool,
        forest: &Forest,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let (walk, weights) = (self.walk, self.weights);
        let (tokens, after) = (&rows.tokens, rows.after());
        let whole = walk.whole(dx.view(), after, walk.dtype)?;
        let dy = whole.as_ref().map_or_else(|| dx.view(), Tensor::view);
        restore(walk, weights, NORM1, x, tokens, &mut inner.norm1)?;
        let mut dn2 = walk.alloc(after.all(), dx.cols(), DType::F32)?;
        let (up, hidden) = (inner.up.take(), inner.hidden.take());
        let norm2 = if shared_norm {
            let read = walk.pick(inner.norm1.output(), rows.picked())?;
            self.mlp_backward(up, hidden, &mut inner.reduced, read.view(), dy, &mut dn2, after, gradients)?;
            None
        } else {
            let mut norm2 = inner.norm2.take().expect("a block without a shared norm has a second one");
            let x_picked = walk.pick(x, rows.own_picked())?;
            restore(walk, weights, NORM2, x_picked.view(), after, &mut norm2)?;
            let read = norm2.output();
            self.mlp_backward(up, hidden, &mut inner.reduced, read, dy, &mut dn2, after, gradients)?;
            norm2.drop_output();
            Some((norm2, x_picked))
        };
        let mut dn1 = walk.alloc(tokens.all(), x.cols(), DType::F32)?;
        let Inner { mut norm1, mixed, reduced, .. } = inner;
        self.mixer_backward(norm1.output(), mixed, reduced, rows, forest, dy, &mut dn1, gradients)?;
        norm1.drop_output();
        drop(whole);
        match norm2 {
            Some((norm2, x_picked)) => {
                let dn2 = after.own_of(dn2.view());
                let x = x_picked.view();
                self.norm_backward(NORM2, x, &norm2, dn2, dx, after.blocks(), gradients)?;
            }
            // Both halves read one norm.
            None => self.add_own_rows(&dn2, rows, &mut dn1)?,
        }
        self.spread(dx, rows.own_picked(), rows.tokens.own_extent())?;
        self.norm_backward(NORM1, x, &norm1, tokens.own_of(dn1.view()), dx, tokens.blocks(), gradients)
    }

    /// Adds this rank's rows of `from`, of those that went on, to its rows of `to`, of all tokens.
    fn add_own_rows(&self, from: &Tensor, rows: &BlockRows, to: &mut Tensor) -> Result<()> {
        let (walk, own) = (self.walk, rows.after().own_of(from.view()));
        let to = to.view_mut().row_range(rows.tokens.own());
        let Some(SomeRows { rows: places, .. }) = rows.own_picked() else {
            return Ok(ops::add(walk.device, own, to)?);
        };
        let mut spread = walk.alloc(rows.tokens.own_extent(), from.cols(), DType::F32)?;
        ops::spread_rows(walk.device, own, places, spread.view_mut())?;
        Ok(ops::add(walk.device, spread.view(), to)?)
    }

    /// Computes the gradient of the first half's input: this rank's rows of `dn` are the sum over ranks.
    fn mixer_backward(
        &self,
        read: View,
        mixed: Mixed,
        reduced: LoraIntermediate,
        rows: &BlockRows,
        forest: &Forest,
        dy: View,
        dn: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let (walk, weights, d_read) = (self.walk, self.weights, dn.view_mut());
        let (weight, low_rank) = mixer::backward(
            walk, weights, self.index, read, mixed, reduced, rows, forest, dy, d_read, gradients,
        )?;
        walk.sum_rows(dn, &rows.tokens)?;
        walk.add_low_rank_input(weights, weight, low_rank, &rows.tokens, dn)
    }

    /// Turns a gradient of the rows that went on into one of all rows, zero elsewhere.
    fn spread(&self, dx: &mut Tensor, rows: Option<SomeRows>, all: Extent) -> Result<()> {
        if rows.is_some() {
            let nothing = self.walk.alloc(Extent::exact(0), dx.cols(), DType::F32)?;
            *dx = self.walk.spread(std::mem::replace(dx, nothing), rows, all)?;
        }
        Ok(())
    }

    /// Computes the gradient of the feed-forward's input: this rank's rows of `dn` are the sum over ranks.
    fn mlp_backward(
        &self,
        up: Option<Tensor>,
        hidden: Option<Tensor>,
        reduced: &mut LoraIntermediate,
        read: View,
        dy: View,
        dn: &mut Tensor,
        shares: &SequenceParallelRows,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let (walk, weights, d_read) = (self.walk, self.weights, dn.view_mut());
        let up = up.expect("forward kept the feed-forward's input");
        let low_rank =
            mlp::backward(walk, weights, read, up, hidden, reduced, dy, d_read, shares, gradients)?;
        walk.sum_rows(dn, shares)?;
        walk.add_low_rank_input(weights, ParamKind::UpWeight, low_rank, shares, dn)
    }

    fn norm_backward(
        &self,
        parts: NormParts,
        x: View,
        normed: &Normed,
        dn: View,
        dx: &mut Tensor,
        blocks: &[Range<usize>],
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        norm_backward(self.walk, self.weights, parts, x, normed, dn, dx.view_mut(), blocks, gradients)
    }
}
