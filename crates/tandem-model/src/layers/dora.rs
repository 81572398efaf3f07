//! DoRA (<https://arxiv.org/abs/2402.09353>, section 4.3): the sum `z` of a matrix and its low-rank
//! terms is scaled by column, `y = g ⊙ z` with `g = m / ‖W + s B A‖` by row of the matrix. The norm is a
//! constant in backward, as in `peft`.
//!
//! A rank has whole rows of a matrix that is divided by rows, and their magnitudes. Where it is divided by
//! columns, squares are summed over blocks of columns and ranks, and the gradient of the magnitudes over
//! blocks of tokens and ranks.

use std::ops::Range;

use tandem_kernels::ops::Weight;
use tandem_kernels::{DType, Device, Tensor, View, ViewMut, ops};

use super::rows::SequenceParallelRows;
use super::{LayerExecutor, RankOrder};
use crate::Result;
use crate::layout::ParamKind;
use crate::weights::{LayerWeights, LowRank};

impl LayerExecutor<'_> {
    /// Computes `‖W + s B A‖` by row of the modules `[1, Σ rows]`.
    pub(crate) fn norms(&self, weight: ParamKind, term: &LowRank, w: View) -> Result<Tensor> {
        let tree = self.decoder.sum_blocks().tree(weight);
        let is_divided = weight.is_divided_by_columns() && (tree.is_some() || self.split.is_some());
        if !is_divided {
            let mut norms = self.alloc_row(term.b.rows())?;
            self.by_row(ops::low_rank_row_norms, term, w, term.a, norms.view_mut())?;
            return Ok(norms);
        }
        let mut squares = self.terms(1, term.b.rows())?;
        let mut square = |(block, columns): (usize, Range<usize>)| {
            let (w, a) = (w.col_range(columns.clone()), term.a.col_range(columns));
            let of_block = squares.view_mut().row_range(block..block + 1);
            self.by_row(ops::low_rank_row_squares, term, w, a, of_block)
        };
        match tree {
            Some(tree) => tree.columns().enumerate().try_for_each(square)?,
            None => square((0, 0..w.cols()))?,
        }
        let mut norms = self.sum_terms(squares, RankOrder::Ranks)?;
        ops::square_root(self.device, norms.view_mut())?;
        Ok(norms)
    }

    /// Computes a number for each row of the modules from these columns of `W` and `A`.
    fn by_row(
        &self,
        op: fn(&Device, View, View, View, f32, ViewMut) -> tandem_kernels::Result<()>,
        term: &LowRank,
        w: View,
        a: View,
        mut out: ViewMut,
    ) -> Result<()> {
        for (index, site) in term.sites.iter().enumerate() {
            let a = a.row_range(index * term.rank..(index + 1) * term.rank);
            let (w, b) = (w.row_range(site.rows.clone()), term.b.row_range(site.b_rows.clone()));
            let out = out.reborrow().col_range(site.b_rows.clone());
            op(self.device, w, a, b, term.scale, out)?;
        }
        Ok(())
    }

    /// Computes the factors of the columns of `y` `[1, num_columns]`: 1 where no module has a term.
    pub(super) fn factors(&self, term: &LowRank, norms: View, num_columns: usize) -> Result<Tensor> {
        let magnitude = term.magnitude.expect("asked for with DoRA");
        let mut factors = self.alloc_row(num_columns)?;
        ops::fill(self.device, factors.view_mut(), 1.0)?;
        for site in term.sites {
            let (magnitude, norms) =
                (magnitude.col_range(site.b_rows.clone()), norms.col_range(site.b_rows.clone()));
            let out = factors.view_mut().col_range(site.rows.clone());
            ops::divide(self.device, magnitude, norms, out, false)?;
        }
        Ok(factors)
    }

    /// Adds the gradient of the magnitudes, and returns that of `z`, which is computed again for it.
    /// `hidden` is `s · x̃ Aᵀ` of all rows.
    pub(super) fn magnitude_backward(
        &self,
        weights: &LayerWeights,
        weight: ParamKind,
        term: &LowRank,
        (x, hidden, dy): (View, View, View),
        shares: &SequenceParallelRows,
        d_magnitude: Option<ViewMut>,
    ) -> Result<Tensor> {
        let w = weights.weight(weight)?;
        let norms = self.norms(weight, term, weights.require(weight)?)?;
        if let Some(mut d_magnitude) = d_magnitude {
            let dots = if weight.is_divided_by_columns() {
                self.dots_of_own_rows(weight, term, w, (x, hidden, dy), shares)?
            } else {
                let mut z = self.alloc(x.extent(), w.rows(), self.dtype)?;
                self.with_terms(term, x, w, hidden, None, z.view_mut())?;
                let mut dots = self.alloc_row(w.rows())?;
                ops::column_dots(self.device, dy, z.view(), dots.view_mut(), false)?;
                dots
            };
            for site in term.sites {
                let (rows, place) = (site.rows.clone(), site.b_rows.clone());
                let (dots, norms) = (dots.view().col_range(rows), norms.view().col_range(place.clone()));
                ops::divide(self.device, dots, norms, d_magnitude.reborrow().col_range(place), true)?;
            }
        }
        let factors = self.factors(term, norms.view(), w.rows())?;
        let mut dz = self.alloc(dy.extent(), dy.cols(), self.dtype)?;
        ops::scaled_columns(self.device, dy, factors.view(), None, dz.view_mut())?;
        Ok(dz)
    }

    /// Computes `Σ_t dy ⊙ z` `[1, N]` of a matrix that ranks divide by columns, as the sum of what each
    /// rank's own rows give: it has `z` of no others.
    fn dots_of_own_rows(
        &self,
        weight: ParamKind,
        term: &LowRank,
        w: Weight,
        (x, hidden, dy): (View, View, View),
        shares: &SequenceParallelRows,
    ) -> Result<Tensor> {
        let mut z = self.alloc(x.extent(), w.rows(), DType::F32)?;
        let tree = self.decoder.sum_blocks().tree(weight);
        ops::sharded_linear(self.device, x, w, tree, None, None, z.view_mut())?;
        let mut z = self.join(z, shares)?;
        self.add_own_terms(term, hidden, shares, &mut z)?;
        let dy = shares.own_of(dy);
        let mut dots = self.terms(1, w.rows())?;
        for (block, rows) in shares.blocks().iter().enumerate() {
            let (dy, z) = (dy.row_range(rows.clone()), z.view().row_range(rows.clone()));
            let of_block = dots.view_mut().row_range(block..block + 1);
            ops::column_dots(self.device, dy, z, of_block, false)?;
        }
        drop(z);
        self.sum_terms(dots, RankOrder::TokenParts)
    }
}
