//! One transformer block, forward and backward, for every arrangement of its two halves.

use tandem_kernels::{DType, Extent, Forest, Tensor, View};

use super::attention::{self, Attend, Attended, ForestAttention};
use super::away::AwayInput;
use super::low_rank::Reduced;
use super::norm::{NORM1, NORM2, NormParts, Normed, norm, norm_backward, restore};
use super::rows::{BlockRows, Shares, SomeRows};
use super::{Picked, Walk, mlp};
use crate::Result;
use crate::layout::Part;
use crate::spec::Residual;
use crate::weights::{LayerGradients, LayerWeights};

/// What a block's forward leaves behind; each level holds what the one before it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Keep {
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

/// What a block's forward left behind.
pub(crate) struct SavedBlock {
    /// `[T,D]` f32, if it is here.
    pub(super) input: Option<Tensor>,
    /// The input, if it waits elsewhere.
    pub(super) away: Option<AwayInput>,
    rows: BlockRows,
    inner: Option<Inner>,
}

/// What happens between a block's input and its last product. `R` is `T` unless only some rows went on after attention. A slice
/// has its heads and channels of all these rows; only the middle of a sequential block is of this rank's rows alone.
struct Inner {
    /// Of all rows.
    norm1: Normed,
    attended: Attended,
    /// `x + attention` `[R,D]` f32: what the feed-forward adds to, and in a sequential block what it reads. In a parallel
    /// one, this rank's term of it, of all rows.
    middle: Option<Tensor>,
    /// Of R rows. Absent if one norm serves both halves.
    norm2: Option<Normed>,
    /// `[R,F]`, or `[R,2F]` gate and up.
    up: Option<Tensor>,
    /// `[R,F]`.
    hidden: Option<Tensor>,
    reduced: Reduced,
}

/// One block with its weights.
pub(crate) struct Block<'a> {
    pub(crate) walk: &'a Walk<'a>,
    pub(crate) weights: &'a LayerWeights<'a>,
    pub(crate) index: usize,
}

impl Block<'_> {
    /// From the residual stream before the block, `[T,D]` f32, to the one after it, `[R,D]`; of both, this rank's rows.
    pub(crate) fn forward(
        &self,
        x: Tensor,
        attend: &mut dyn Attend,
        rows: BlockRows,
        keep: Keep,
    ) -> Result<(Tensor, SavedBlock)> {
        let mut input = Some(x);
        let mut inner = self.inner(&mut input, attend, &rows, keep)?;
        let (hidden, middle) = inner.hidden.as_ref().zip(inner.middle.as_ref()).expect("inner() leaves both");
        // Beside a parallel feed-forward the middle is this rank's term: the block is summed over ranks once, here.
        let (walk, weight, bias) = (self.walk, Part::DownWeight, Part::DownBias);
        let (hidden, middle) = (hidden.view(), middle.view());
        let (y, reduced) = walk.linear_term(self.weights, weight, bias, hidden, middle, rows.after())?;
        let y = walk.join(y, rows.after())?;
        if keep < Keep::AllButNorms {
            inner.hidden = None;
        }
        inner.reduced.down = reduced;
        if self.residual() != Residual::Sequential {
            inner.middle = None;
        }
        let inner = (keep >= Keep::Selective).then_some(inner);
        Ok((y, SavedBlock { input, away: None, rows, inner }))
    }

    fn residual(&self) -> Residual {
        self.walk.decoder.spec().residual
    }

    /// All but the last product. Returns memory as soon as nothing reads it any more; `hidden` and `middle` stay.
    fn inner(
        &self,
        input: &mut Option<Tensor>,
        attend: &mut dyn Attend,
        rows: &BlockRows,
        keep: Keep,
    ) -> Result<Inner> {
        let (walk, weights, residual) = (self.walk, self.weights, self.residual());
        let x = input.as_ref().expect("a block starts with its input").view();
        let mut norm1 = norm(walk, weights, NORM1, x, &rows.tokens)?;
        let mut reduced = Reduced::default();
        let (mut attended, of_qkv) = attention::forward(walk, weights, self.index, norm1.output(), attend)?;
        if keep < Keep::Selective {
            attended.drop_operands();
        }
        reduced.qkv = of_qkv.filter(|_| keep >= Keep::Selective);
        if keep < Keep::All && residual != (Residual::Parallel { shared_norm: true }) {
            norm1.drop_output();
        }
        let x_picked = walk.pick(x, rows.own_picked())?;
        let (mut middle, of_out) = {
            let heads = walk.pick(attended.output(), rows.picked())?;
            let (weight, bias) = (Part::OutWeight, Part::OutBias);
            walk.linear_term(weights, weight, bias, heads.view(), x_picked.view(), rows.after())?
        };
        if residual == Residual::Sequential {
            middle = walk.join(middle, rows.after())?;
        }
        if keep < Keep::Selective {
            attended.drop_output();
        }
        reduced.out = of_out.filter(|_| keep >= Keep::Selective);
        let mut norm2 = match residual {
            Residual::Sequential => Some(norm(walk, weights, NORM2, middle.view(), rows.after())?),
            Residual::Parallel { shared_norm: false } => {
                Some(norm(walk, weights, NORM2, x_picked.view(), rows.after())?)
            }
            Residual::Parallel { shared_norm: true } => None,
        };
        drop(x_picked);
        if keep == Keep::Nothing {
            *input = None;
        }
        let (up, of_up) = {
            let read = match &norm2 {
                Some(norm2) => Picked::All(norm2.output()),
                None => walk.pick(norm1.output(), rows.picked())?,
            };
            walk.linear(weights, Part::UpWeight, Part::UpBias, read.view())?
        };
        if keep < Keep::All {
            norm1.drop_output();
            norm2.iter_mut().for_each(Normed::drop_output);
        }
        let hidden = mlp::activate(walk, up.view())?;
        let up = (keep >= Keep::Selective).then_some(up);
        reduced.up = of_up.filter(|_| keep >= Keep::Selective);
        Ok(Inner { norm1, attended, middle: Some(middle), norm2, up, hidden: Some(hidden), reduced })
    }

    /// Turns `dx`, the gradient of the residual stream after the block (of the rows that went on), into the one before it
    /// (of all rows), in place; of both, this rank's rows.
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
                self.inner(&mut input, &mut attend, &rows, Keep::All)?
            }
        };
        let x = input.expect("forward kept the block's input");
        match self.residual() {
            Residual::Sequential => {
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

    /// `dx += ∂ mlp(norm2(middle))`.
    fn mlp_half(
        &self,
        inner: &mut Inner,
        middle: View,
        shares: &Shares,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let (walk, weights) = (self.walk, self.weights);
        let mut norm2 = inner.norm2.take().expect("a sequential block has a second norm");
        restore(walk, weights, NORM2, middle, shares, &mut norm2)?;
        let mut dn = walk.alloc(shares.all(), dx.cols(), DType::F32)?;
        {
            let whole = walk.whole(dx.view(), shares, walk.dtype)?;
            let dy = whole.as_ref().map_or_else(|| dx.view(), Tensor::view);
            let (up, hidden) = (inner.up.take(), inner.hidden.take());
            self.mlp_backward(up, hidden, &mut inner.reduced, norm2.output(), dy, &mut dn, gradients)?;
        }
        walk.sum_rows(&mut dn, shares)?;
        norm2.drop_output();
        self.norm_backward(NORM2, middle, &norm2, shares.own_of(dn.view()), dx, gradients)
    }

    /// `dx += ∂ attention(norm1(x))`.
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
        let Inner { mut norm1, attended, reduced, .. } = inner;
        restore(walk, weights, NORM1, x, &rows.tokens, &mut norm1)?;
        let mut dn = walk.alloc(rows.tokens.all(), x.cols(), DType::F32)?;
        {
            let whole = walk.whole(dx.view(), rows.after(), walk.dtype)?;
            let dy = whole.as_ref().map_or_else(|| dx.view(), Tensor::view);
            let (n, dn, picked) = (norm1.output(), dn.view_mut(), rows.picked());
            attention::backward(
                walk, weights, self.index, n, attended, reduced, picked, forest, dy, dn, false, gradients,
            )?;
        }
        walk.sum_rows(&mut dn, &rows.tokens)?;
        norm1.drop_output();
        self.spread(dx, rows.own_picked(), rows.tokens.own_extent())?;
        self.norm_backward(NORM1, x, &norm1, rows.tokens.own_of(dn.view()), dx, gradients)
    }

    /// `dx += ∂ (attention(norm1(x)) + mlp(norm2(x)))`; both halves see the same `dx`, so it changes at the end.
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
        let (mut dn1, own) = if shared_norm {
            let (up, hidden) = (inner.up.take(), inner.hidden.take());
            let read = walk.pick(inner.norm1.output(), rows.picked())?;
            self.mlp_backward(up, hidden, &mut inner.reduced, read.view(), dy, &mut dn2, gradients)?;
            // Attention adds its share to this one, for both read the same norm.
            (walk.spread(dn2, rows.picked(), tokens.all())?, None)
        } else {
            let mut norm2 = inner.norm2.take().expect("a block without a shared norm has a second one");
            let (up, hidden) = (inner.up.take(), inner.hidden.take());
            let x_picked = walk.pick(x, rows.own_picked())?;
            restore(walk, weights, NORM2, x_picked.view(), after, &mut norm2)?;
            self.mlp_backward(up, hidden, &mut inner.reduced, norm2.output(), dy, &mut dn2, gradients)?;
            walk.sum_rows(&mut dn2, after)?;
            norm2.drop_output();
            (walk.alloc(tokens.all(), x.cols(), DType::F32)?, Some((norm2, x_picked, dn2)))
        };
        let Inner { mut norm1, attended, reduced, .. } = inner;
        let (n, d_n) = (norm1.output(), dn1.view_mut());
        let (layer, picked, add) = (self.index, rows.picked(), shared_norm);
        attention::backward(
            walk, weights, layer, n, attended, reduced, picked, forest, dy, d_n, add, gradients,
        )?;
        walk.sum_rows(&mut dn1, tokens)?;
        norm1.drop_output();
        drop(whole);
        if let Some((norm2, x_picked, dn2)) = own {
            let dn2 = after.own_of(dn2.view());
            self.norm_backward(NORM2, x_picked.view(), &norm2, dn2, dx, gradients)?;
        }
        self.spread(dx, rows.own_picked(), rows.tokens.own_extent())?;
        self.norm_backward(NORM1, x, &norm1, tokens.own_of(dn1.view()), dx, gradients)
    }

    /// Makes a gradient of the rows that went on one of all rows.
    fn spread(&self, dx: &mut Tensor, rows: Option<SomeRows>, all: Extent) -> Result<()> {
        if rows.is_some() {
            let nothing = self.walk.alloc(Extent::exact(0), dx.cols(), DType::F32)?;
            *dx = self.walk.spread(std::mem::replace(dx, nothing), rows, all)?;
        }
        Ok(())
    }

    fn mlp_backward(
        &self,
        up: Option<Tensor>,
        hidden: Option<Tensor>,
        reduced: &mut Reduced,
        read: View,
        dy: View,
        dn: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let up = up.expect("forward kept the feed-forward's input");
        mlp::backward(self.walk, self.weights, read, up, hidden, reduced, dy, dn.view_mut(), gradients)
    }

    fn norm_backward(
        &self,
        parts: NormParts,
        x: View,
        normed: &Normed,
        dn: View,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        norm_backward(self.walk, self.weights, parts, x, normed, dn, dx.view_mut(), gradients)
    }
}
