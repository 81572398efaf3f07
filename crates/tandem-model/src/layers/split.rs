//! What a layer asks of the ranks that hold the other slices of its matrices.
//!
//! A block's halves are split regions: each rank computes its heads, or its channels, from the same input. Between the regions
//! the rows of the residual stream are divided over the ranks ([`Shares`]), and each normalises its own. Where a region begins
//! the normalised rows are gathered; where it ends, what the ranks' last products give is summed, and each rank gets its rows
//! of the sum. Backward it is the other way round: the gradient of what the region gave is gathered, those of what it read are
//! summed. So every rank computes the same gradient of what it holds whole, but for norms: of those it has its rows' terms.

use std::borrow::Cow;

use tandem_kernels::ops::ELSEWHERE;
use tandem_kernels::{DType, Device, Tensor, View, ops};

use super::Walk;
use super::rows::Shares;
use crate::layout::Part;
use crate::weights::LayerGradients;
use crate::{ModelError, Result};

/// The ranks that hold the slices of one decoder, as one of them sees them. All call the same in the same order.
pub trait Split {
    /// `x`, f32, becomes the sum of all ranks' `x`: the same bits on each.
    ///
    /// # Errors
    /// If a rank is lost.
    fn sum(&self, device: &Device, x: &mut Tensor) -> Result<()>;

    /// `x` is divided by rows, `counts[r]` of rank `r`, one's after another's: every rank gets what each has in its own.
    ///
    /// # Errors
    /// If a rank is lost.
    fn gather_rows(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()>;

    /// `x`, f32, is divided as above: this rank's rows become the sum of all ranks' `x` there. The others are unspecified
    /// afterwards.
    ///
    /// # Errors
    /// If a rank is lost.
    fn sum_rows(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()>;

    /// `numbers` are as many of each rank, one's after another's: every rank gets what each has written as its own.
    ///
    /// # Errors
    /// If a rank is lost.
    fn gather(&self, numbers: &mut [f64]) -> Result<()>;
}

impl Walk<'_> {
    /// A slice is of no use without those who hold the others.
    pub(crate) fn check_split(&self) -> Result<()> {
        let count = self.decoder.slice().count;
        if (count > 1) == self.split.is_some() {
            return Ok(());
        }
        Err(ModelError::Invalid(match self.split {
            None => format!("one of {count} slices of a decoder cannot be walked alone"),
            Some(_) => "a whole decoder has no ranks to sum over".to_owned(),
        }))
    }

    /// Whether this rank adds to a sum over ranks what must be in it once: biases, positions.
    pub(super) fn leads(&self) -> bool {
        self.decoder.slice().index == 0
    }

    /// The other ranks' rows into `x`, of which this rank has written its own.
    pub(super) fn gather_rows(&self, x: &mut Tensor, shares: &Shares) -> Result<()> {
        self.split.map_or(Ok(()), |split| split.gather_rows(self.device, x, shares.counts()))
    }

    /// This rank's rows of `x` become those of the sum of all ranks' `x`.
    pub(super) fn sum_rows(&self, x: &mut Tensor, shares: &Shares) -> Result<()> {
        self.split.map_or(Ok(()), |split| split.sum_rows(self.device, x, shares.counts()))
    }

    /// This rank's rows of the sum of all ranks' terms: `term` itself where nothing is split.
    pub(super) fn join(&self, mut term: Tensor, shares: &Shares) -> Result<Tensor> {
        if self.split.is_none() {
            return Ok(term);
        }
        self.sum_rows(&mut term, shares)?;
        let mut own = self.alloc(shares.own_extent(), term.cols(), DType::F32)?;
        ops::cast(self.device, shares.own_of(term.view()), own.view_mut())?;
        Ok(own)
    }

    /// All rows of what `own` are this rank's of, in type `dtype`. Nothing if `own` is that already.
    pub(super) fn whole(&self, own: View, shares: &Shares, dtype: DType) -> Result<Option<Tensor>> {
        if self.split.is_none() && own.dtype() == dtype {
            return Ok(None);
        }
        let mut whole = self.alloc(shares.all(), own.cols(), dtype)?;
        ops::cast(self.device, own, whole.view_mut().row_range(shares.own()))?;
        self.gather_rows(&mut whole, shares)?;
        Ok(Some(whole))
    }

    /// Adds to the gradients of parts that every rank holds the sum of all ranks' terms: a row for each part. They are summed
    /// before they are added to earlier ones, which are on every rank already.
    pub(super) fn add_terms(
        &self,
        mut terms: Tensor,
        parts: &[Part],
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        self.split.map_or(Ok(()), |split| split.sum(self.device, &mut terms))?;
        for (row, &part) in parts.iter().enumerate().take(terms.rows()) {
            if let Some(dw) = gradients.get_mut(part) {
                ops::add(self.device, terms.view().row_range(row..row + 1), dw)?;
            }
        }
        Ok(())
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
