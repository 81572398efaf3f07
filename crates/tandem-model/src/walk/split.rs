//! What a layer asks of the ranks that hold the other slices of its matrices.
//!
//! A block's halves are split regions: each rank computes its heads, or its channels, from the same input. Forward, what the
//! ranks' last products give is summed where the region ends; backward, the gradients of the region's input are summed where
//! it began. So outside of the regions every rank has the same bits: the residual stream, its gradient, and the gradients of
//! whatever is whole on every rank.

use std::borrow::Cow;

use tandem_kernels::Tensor;
use tandem_kernels::ops::ELSEWHERE;

use super::Walk;
use crate::{ModelError, Result};

/// The ranks that hold the slices of one decoder, as one of them sees them. All call the same in the same order.
pub trait Split {
    /// `x`, f32, becomes the sum of all ranks' `x`: the same bits on each.
    ///
    /// # Errors
    /// If a rank is lost.
    fn sum(&self, x: &mut Tensor) -> Result<()>;

    /// `numbers` are as many of each rank, one's after another's: every rank gets what each has written as its own.
    ///
    /// # Errors
    /// If a rank is lost.
    fn gather(&self, numbers: &mut [f64]) -> Result<()>;
}

impl Walk<'_> {
    /// A slice is of no use without those who hold the others.
    pub(super) fn check_split(&self) -> Result<()> {
        let count = self.decoder.slice().count;
        if (count > 1) == self.split.is_some() {
            return Ok(());
        }
        Err(ModelError::Invalid(match self.split {
            None => format!("one of {count} slices of a decoder cannot be walked alone"),
            Some(_) => "a whole decoder has no ranks to sum over".to_owned(),
        }))
    }

    /// Whether this rank adds to a sum over ranks what must be in it once: bias and residual.
    pub(super) fn leads(&self) -> bool {
        self.decoder.slice().index == 0
    }

    /// The sum of all ranks' `x`; `x` itself where nothing is split.
    pub(super) fn sum(&self, x: &mut Tensor) -> Result<()> {
        self.split.map_or(Ok(()), |split| split.sum(x))
    }

    /// Tokens as rows of this rank's slice of the vocabulary.
    pub(super) fn own_tokens<'t>(&self, tokens: &'t [u32]) -> Result<Cow<'t, [u32]>> {
        let vocabulary = self.decoder.whole().spec().vocab_size;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(ModelError::Invalid(format!(
                "token {token} is outside the vocabulary of {vocabulary}"
            )));
        }
        if self.split.is_none() {
            return Ok(Cow::Borrowed(tokens));
        }
        let own = self.decoder.tokens();
        let place = |&token: &u32| {
            if own.contains(&(token as usize)) { token - own.start as u32 } else { ELSEWHERE }
        };
        Ok(Cow::Owned(tokens.iter().map(place).collect()))
    }
}
