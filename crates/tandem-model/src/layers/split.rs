//! Tensor parallelism: collectives of a layer over the ranks that hold its other shards.
//!
//! Each rank computes its heads, or its channels, from the same input: a sharded region. Between
//! regions the rows of the residual stream are divided over the ranks ([`SequenceParallelRows`]), and each
//! normalises its own (sequence parallelism). A region begins with an all-gather of the normalised
//! rows, and ends with a reduce-scatter of the ranks' products. Backward is the reverse: the
//! gradient of the region's output is gathered, that of its input reduced. So every rank computes
//! the same gradient of parameters that it holds whole, except norms, where it has the terms of its
//! rows.

use std::borrow::Cow;

use tandem_kernels::ops::ELSEWHERE;
use tandem_kernels::{DType, Device, MemoryKind, Tensor, View, ops};

use super::LayerExecutor;
use super::rows::SequenceParallelRows;
use crate::layout::ParamKind;
use crate::weights::LayerGradients;
use crate::{ModelError, Result};

/// Collectives over the tensor-parallel ranks of a decoder. All ranks make the same calls in the
/// same order.
///
/// In a group that [keeps bits](crate::TensorParallelShard::keeps_bits), sums have the order of a binary
/// tree, neighbours first.
pub trait TensorParallelOps {
    /// All-reduces `x`, f32, where neighbours are as `order` says: the same bits on each rank.
    fn sum(&self, device: &Device, x: &mut Tensor, order: RankOrder) -> Result<()>;

    /// All-gathers the rows of `x`, of which rank `r` has written its `counts[r]`, in the order of
    /// ranks.
    fn gather_rows(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()>;

    /// All-gathers the rows of `x` in the order of the ranks'
    /// [parts of the tokens](crate::TensorParallelShard::token_part): `counts[p]` are of part `p`.
    fn gather_tokens(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()>;

    /// Reduce-scatters `x`, f32, whose rows are divided as in [`TensorParallelOps::gather_tokens`]: this
    /// rank's rows become the sum over ranks, neighbours first. The other rows are unspecified
    /// afterwards.
    fn sum_tokens(&self, device: &Device, x: &mut Tensor, counts: &[usize]) -> Result<()>;

    /// All-gathers `numbers`, an equal part of each rank.
    fn gather(&self, numbers: &mut [f64]) -> Result<()>;
}

/// Order of ranks in a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankOrder {
    /// By rank: sums over heads, channels and tokens of the vocabulary.
    Ranks,
    /// By part of the tokens: sums over rows.
    TokenParts,
}

impl LayerExecutor<'_> {
    /// Checks that a shard has its collectives, and a whole decoder none.
    pub(crate) fn check_split(&self) -> Result<()> {
        let count = self.decoder.slice().count;
        if (count > 1) == self.split.is_some() {
            return Ok(());
        }
        Err(ModelError::Invalid(match self.split {
            None => format!("one of {count} tensor-parallel shards of a decoder cannot run alone"),
            Some(_) => "a whole decoder has no tensor-parallel group".to_owned(),
        }))
    }

    /// Returns whether this rank adds terms that a sum over ranks must contain once: biases,
    /// positions.
    pub(super) fn leads(&self) -> bool {
        self.decoder.slice().index == 0
    }

    /// Gathers the other ranks' rows into `x`, of which this rank has written its own.
    pub(super) fn gather_rows(&self, x: &mut Tensor, shares: &SequenceParallelRows) -> Result<()> {
        self.split.map_or(Ok(()), |split| split.gather_tokens(self.device, x, shares.counts()))
    }

    /// Replaces this rank's rows of `x` by the sum of all ranks'.
    pub(super) fn sum_rows(&self, x: &mut Tensor, shares: &SequenceParallelRows) -> Result<()> {
        self.split.map_or(Ok(()), |split| split.sum_tokens(self.device, x, shares.counts()))
    }

    /// Returns this rank's rows of the sum of all ranks' terms: `term` itself without tensor
    /// parallelism.
    pub(super) fn join(&self, mut term: Tensor, shares: &SequenceParallelRows) -> Result<Tensor> {
        if self.split.is_none() {
            return Ok(term);
        }
        self.sum_rows(&mut term, shares)?;
        let mut own = self.alloc(shares.own_extent(), term.cols(), DType::F32)?;
        ops::cast(self.device, shares.own_of(term.view()), own.view_mut())?;
        Ok(own)
    }

    /// Gathers all rows of a matrix of which `own` are this rank's, in type `dtype`. `None` if
    /// `own` is that matrix.
    pub(super) fn whole(
        &self,
        own: View,
        shares: &SequenceParallelRows,
        dtype: DType,
    ) -> Result<Option<Tensor>> {
        if self.split.is_none() && own.dtype() == dtype {
            return Ok(None);
        }
        let mut whole = self.alloc(shares.all(), own.cols(), dtype)?;
        ops::cast(self.device, own, whole.view_mut().row_range(shares.own()))?;
        self.gather_rows(&mut whole, shares)?;
        Ok(Some(whole))
    }

    /// Returns whether gradients of `parts` that every rank holds whole are summed over blocks or ranks.
    pub(super) fn sums_terms(&self) -> bool {
        self.split.is_some() || self.decoder.sum_blocks().num_own() > 1
    }

    /// Allocates terms for [`LayerExecutor::add_terms`]: for each block a row of zeros for each part.
    pub(super) fn terms(&self, num_parts: usize, cols: usize) -> Result<Tensor> {
        let rows = self.decoder.sum_blocks().num_own() * num_parts;
        Ok(self.device.zeros(MemoryKind::Activations, rows, cols, DType::F32)?)
    }

    /// Adds the sum of all blocks' terms to the gradients of parts that every rank holds: `terms` has, for
    /// each block of this rank, a row for each part. Terms are summed before they are added, since
    /// earlier gradients are complete on every rank.
    pub(super) fn add_terms(
        &self,
        terms: Tensor,
        parts: &[ParamKind],
        order: RankOrder,
        gradients: &mut LayerGradients,
    ) -> Result<()> {
        let sums = self.sum_terms(terms, order)?;
        for (row, &part) in parts.iter().enumerate().take(sums.rows()) {
            if let Some(dw) = gradients.get_mut(part) {
                ops::add(self.device, sums.view().row_range(row..row + 1), dw)?;
            }
        }
        Ok(())
    }

    /// Sums the terms of all blocks of all ranks: of [`LayerExecutor::terms`] a row for each part is left.
    pub(super) fn sum_terms(&self, mut terms: Tensor, order: RankOrder) -> Result<Tensor> {
        let num_blocks = self.decoder.sum_blocks().num_own();
        let num_parts = terms.rows() / num_blocks;
        let mut step = 1;
        while step < num_blocks {
            for left in (0..num_blocks).step_by(2 * step) {
                let [left_rows, right] = terms.view_mut().split_rows((left + step) * num_parts);
                let right = right.row_range(0..num_parts);
                let left_rows = left_rows.row_range(left * num_parts..(left + 1) * num_parts);
                ops::add(self.device, right.view(), left_rows)?;
            }
            step *= 2;
        }
        terms.truncate_rows(num_parts);
        self.split.map_or(Ok(()), |split| split.sum(self.device, &mut terms, order))?;
        Ok(terms)
    }

    /// Returns tokens as rows of this rank's shard of the vocabulary.
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
