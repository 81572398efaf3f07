//! One transformer block, forward and backward, for every arrangement of its two halves.

use tandem_kernels::{DType, Forest, Tensor, View};

use super::attention::{self, Attend, Attended, ForestAttention};
use super::norm::{NORM1, NORM2, NormParts, Normed, norm, norm_backward, restore};
use super::{Walk, mlp};
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
    /// Everything backward reads.
    All,
}

/// What a block's forward left behind.
pub(crate) struct SavedBlock {
    /// `[T,D]` f32.
    input: Option<Tensor>,
    inner: Option<Inner>,
}

/// What happens between a block's input and its last product.
struct Inner {
    norm1: Normed,
    attended: Attended,
    /// `x + attention` `[T,D]` f32: what the feed-forward adds to, and in a sequential block what it reads.
    middle: Option<Tensor>,
    /// Absent if one norm serves both halves.
    norm2: Option<Normed>,
    /// `[T,F]`, or `[T,2F]` gate and up.
    up: Option<Tensor>,
    /// `[T,F]`.
    hidden: Option<Tensor>,
}

/// One block with its weights.
pub(crate) struct Block<'a> {
    pub(crate) walk: &'a Walk<'a>,
    pub(crate) weights: &'a LayerWeights<'a>,
    pub(crate) index: usize,
}

impl Block<'_> {
    /// From the residual stream before the block to the one after it, `[T,D]` f32.
    pub(crate) fn forward(
        &self,
        x: Tensor,
        attend: &mut dyn Attend,
        keep: Keep,
    ) -> Result<(Tensor, SavedBlock)> {
        let mut input = Some(x);
        let mut inner = self.inner(&mut input, attend, keep)?;
        let (hidden, middle) = inner.hidden.as_ref().zip(inner.middle.as_ref()).expect("inner() leaves both");
        let residual = Some(middle.view());
        let y = self.walk.linear(
            self.weights,
            Part::DownWeight,
            Part::DownBias,
            hidden.view(),
            residual,
            DType::F32,
        )?;
        if keep < Keep::All {
            inner.hidden = None;
        }
        if self.residual() != Residual::Sequential {
            inner.middle = None;
        }
        Ok((y, SavedBlock { input, inner: (keep >= Keep::Selective).then_some(inner) }))
    }

    fn residual(&self) -> Residual {
        self.walk.decoder.spec().residual
    }

    /// All but the last product. Returns memory as soon as nothing reads it any more; `hidden` and `middle` stay.
    fn inner(&self, input: &mut Option<Tensor>, attend: &mut dyn Attend, keep: Keep) -> Result<Inner> {
        let (walk, weights, residual) = (self.walk, self.weights, self.residual());
        let x = input.as_ref().expect("a block starts with its input").view();
        let mut norm1 = norm(walk, weights, NORM1, x)?;
        let mut attended = attention::forward(walk, weights, self.index, norm1.output(), attend)?;
        if keep < Keep::Selective {
            attended.drop_operands();
        }
        if keep < Keep::All && residual != (Residual::Parallel { shared_norm: true }) {
            norm1.drop_output();
        }
        let middle =
            walk.linear(weights, Part::OutWeight, Part::OutBias, attended.output(), Some(x), DType::F32)?;
        if keep < Keep::Selective {
            attended.drop_output();
        }
        let mut norm2 = match residual {
            Residual::Sequential => Some(norm(walk, weights, NORM2, middle.view())?),
            Residual::Parallel { shared_norm: false } => Some(norm(walk, weights, NORM2, x)?),
            Residual::Parallel { shared_norm: true } => None,
        };
        if keep == Keep::Nothing {
            *input = None;
        }
        let read = norm2.as_ref().unwrap_or(&norm1).output();
        let up = walk.linear(weights, Part::UpWeight, Part::UpBias, read, None, walk.dtype)?;
        if keep < Keep::All {
            norm1.drop_output();
            norm2.iter_mut().for_each(Normed::drop_output);
        }
        let hidden = mlp::activate(walk, up.view())?;
        let up = (keep >= Keep::Selective).then_some(up);
        Ok(Inner { norm1, attended, middle: Some(middle), norm2, up, hidden: Some(hidden) })
    }

    /// Turns `dx`, the gradient of the residual stream after the block, into the one before it, in place.
    pub(super) fn backward(
        &self,
        saved: SavedBlock,
        forest: &Forest,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let SavedBlock { mut input, inner } = saved;
        let mut inner = match inner {
            Some(inner) => inner,
            None => {
                let mut attend = ForestAttention { device: self.walk.device, forest };
                self.inner(&mut input, &mut attend, Keep::All)?
            }
        };
        let x = input.expect("forward kept the block's input");
        match self.residual() {
            Residual::Sequential => {
                let middle = inner.middle.take().expect("forward kept the middle");
                self.mlp_half(&mut inner, middle.view(), dx, gradients)?;
                drop(middle);
                self.attention_half(inner, x.view(), forest, dx, gradients)
            }
            Residual::Parallel { shared_norm } => {
                self.parallel(inner, x.view(), shared_norm, forest, dx, gradients)
            }
        }
    }

    /// `dx += ∂ mlp(norm2(middle))`.
    fn mlp_half(
        &self,
        inner: &mut Inner,
        middle: View,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let (walk, weights) = (self.walk, self.weights);
        let mut norm2 = inner.norm2.take().expect("a sequential block has a second norm");
        restore(walk, weights, NORM2, middle, &mut norm2)?;
        let mut dn = walk.alloc(dx.rows(), dx.cols(), DType::F32)?;
        {
            let copy = walk.in_compute_type(dx.view())?;
            let dy = copy.as_ref().map_or_else(|| dx.view(), Tensor::view);
            self.mlp_backward(inner, norm2.output(), dy, &mut dn, false, gradients)?;
        }
        norm2.drop_output();
        self.norm_backward(NORM2, middle, &norm2, &dn, dx, gradients)
    }

    /// `dx += ∂ attention(norm1(x))`.
    fn attention_half(
        &self,
        inner: Inner,
        x: View,
        forest: &Forest,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let (walk, weights) = (self.walk, self.weights);
        let Inner { mut norm1, attended, .. } = inner;
        restore(walk, weights, NORM1, x, &mut norm1)?;
        let mut dn = walk.alloc(dx.rows(), dx.cols(), DType::F32)?;
        {
            let copy = walk.in_compute_type(dx.view())?;
            let dy = copy.as_ref().map_or_else(|| dx.view(), Tensor::view);
            let (n, dn) = (norm1.output(), dn.view_mut());
            attention::backward(walk, weights, self.index, n, attended, forest, dy, dn, gradients)?;
        }
        norm1.drop_output();
        self.norm_backward(NORM1, x, &norm1, &dn, dx, gradients)
    }

    /// `dx += ∂ (attention(norm1(x)) + mlp(norm2(x)))`; both halves see the same `dx`, so it changes at the end.
    fn parallel(
        &self,
        mut inner: Inner,
        x: View,
        shared_norm: bool,
        forest: &Forest,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let (walk, weights) = (self.walk, self.weights);
        let copy = walk.in_compute_type(dx.view())?;
        let dy = copy.as_ref().map_or_else(|| dx.view(), Tensor::view);
        let mut dn1 = walk.alloc(dx.rows(), dx.cols(), DType::F32)?;
        restore(walk, weights, NORM1, x, &mut inner.norm1)?;
        let mut dn2 = None;
        if !shared_norm {
            let mut norm2 = inner.norm2.take().expect("a block without a shared norm has a second one");
            restore(walk, weights, NORM2, x, &mut norm2)?;
            let mut dn = walk.alloc(dx.rows(), dx.cols(), DType::F32)?;
            self.mlp_backward(&mut inner, norm2.output(), dy, &mut dn, false, gradients)?;
            norm2.drop_output();
            dn2 = Some((norm2, dn));
        }
        // The feed-forward of a shared norm needs the norm's output after attention took its parts.
        let (up, hidden) = (inner.up.take(), inner.hidden.take());
        let Inner { mut norm1, attended, .. } = inner;
        let n = norm1.output();
        attention::backward(walk, weights, self.index, n, attended, forest, dy, dn1.view_mut(), gradients)?;
        if shared_norm {
            let up = up.expect("forward kept the feed-forward's input");
            mlp::backward(walk, weights, n, up, hidden, dy, dn1.view_mut(), true, gradients)?;
        }
        norm1.drop_output();
        drop(copy);
        self.norm_backward(NORM1, x, &norm1, &dn1, dx, gradients)?;
        drop(dn1);
        match dn2 {
            Some((norm2, dn2)) => self.norm_backward(NORM2, x, &norm2, &dn2, dx, gradients),
            None => Ok(()),
        }
    }

    fn mlp_backward(
        &self,
        inner: &mut Inner,
        read: View,
        dy: View,
        dn: &mut Tensor,
        accumulate: bool,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let up = inner.up.take().expect("forward kept the feed-forward's input");
        let (hidden, dn) = (inner.hidden.take(), dn.view_mut());
        mlp::backward(self.walk, self.weights, read, up, hidden, dy, dn, accumulate, gradients)
    }

    fn norm_backward(
        &self,
        parts: NormParts,
        x: View,
        normed: &Normed,
        dn: &Tensor,
        dx: &mut Tensor,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        norm_backward(self.walk, self.weights, parts, x, normed, dn.view(), dx.view_mut(), gradients)
    }
}
