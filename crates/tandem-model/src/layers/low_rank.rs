//! Low-rank terms of a matrix: `y += s · (x̃ Aᵀ) Bᵀ` for each adapted module, where `x̃` is `x`
//! after dropout.
//! [DoRA](super::dora) scales the sum of matrix and terms.

use std::ops::Range;

use tandem_kernels::ops::{LowRankFactor, Weight};
use tandem_kernels::{Backend, DType, MemoryKind, Tensor, View, ViewMut, ops};

use super::LayerExecutor;
use super::rows::SequenceParallelRows;
use crate::Result;
use crate::layout::ParamKind;
use crate::weights::{LayerGradients, LayerWeights, LowRank};

/// Hidden columns `s · x̃ Aᵀ` `[T, S·r]` of a block's matrices with low-rank terms, kept for
/// backward; missing ones are computed again.
#[derive(Default)]
pub(super) struct LoraIntermediate {
    pub(super) qkv: Option<Tensor>,
    pub(super) out: Option<Tensor>,
    pub(super) up: Option<Tensor>,
    pub(super) down: Option<Tensor>,
}

/// Results of [`LayerExecutor::linear_gradients`] that the gradient of the input needs.
#[derive(Default)]
pub(super) struct LowRankBackward {
    /// Gradient of `z`, if it differs from that of `y`.
    dz: Option<Tensor>,
    /// Gradient of `x̃ Aᵀ` `[T, S·r]` in the compute type, if there are terms.
    dh: Option<Tensor>,
}

/// Rank from which modules of one matrix have products of their own on a CPU.
const SEPARATE_RANK: usize = 64;

impl LowRank<'_> {
    /// Lists, for each module, its columns of `x̃ Aᵀ`, its `B`, and its columns of `y`.
    fn each(&self) -> impl Iterator<Item = (std::ops::Range<usize>, View<'_>, std::ops::Range<usize>)> {
        self.sites.iter().enumerate().map(|(index, site)| {
            let hidden = index * self.rank..(index + 1) * self.rank;
            (hidden, self.b.row_range(site.b_rows.clone()), site.rows.clone())
        })
    }
}

impl LayerExecutor<'_> {
    /// Computes `y = x · wᵀ` with terms and bias, scaled for DoRA, of a matrix that ranks divide by rows.
    /// Returns `s · x̃ Aᵀ`, if there are terms.
    pub(super) fn linear_into(
        &self,
        weights: &LayerWeights,
        (weight, bias): (ParamKind, Option<View>),
        x: View,
        y: &mut Tensor,
    ) -> Result<Option<Tensor>> {
        let w = weights.weight(weight)?;
        let Some(term) = weights.low_rank(weight) else {
            ops::sharded_linear(self.device, x, w, None, bias, None, y.view_mut())?;
            return Ok(None);
        };
        let hidden = {
            let dropped = self.dropped(&term, x)?;
            self.low_rank_hidden(&term, dropped.as_ref().map_or(x, Tensor::view))?
        };
        if term.magnitude.is_none() {
            self.with_terms(&term, x, w, hidden.view(), bias, y.view_mut())?;
            return Ok(Some(hidden));
        }
        let norms = self.norms(weight, &term, weights.require(weight)?)?;
        let factors = self.factors(&term, norms.view(), w.rows())?;
        self.with_terms(&term, x, w, hidden.view(), None, y.view_mut())?;
        ops::scale_columns(self.device, y.view_mut(), factors.view(), bias)?;
        Ok(Some(hidden))
    }

    /// Computes this rank's rows of `x · wᵀ + terms (+ residual) (+ bias)`, scaled for DoRA, of a matrix that
    /// ranks divide by columns: in the type of `residual`, this rank's rows of the stream, else in f32. Also
    /// returns `s · x̃ Aᵀ` of all rows, if there are terms.
    pub(super) fn linear_term(
        &self,
        weights: &LayerWeights,
        weight: ParamKind,
        bias: ParamKind,
        x: View,
        residual: Option<View>,
        shares: &SequenceParallelRows,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (w, bias) = (weights.weight(weight)?, weights.get(bias));
        let tree = self.decoder.sum_blocks().tree(weight);
        let term = weights.low_rank(weight);
        let dtype = residual.map_or(DType::F32, |residual| residual.dtype());
        // One pass over the result for all of its terms; what ranks or blocks sum is f32 until it is the sum.
        let is_whole = match &term {
            None => tree.is_none() || dtype == DType::F32,
            Some(term) => tree.is_none() && term.magnitude.is_none(),
        };
        let in_one_pass = is_whole && self.split.is_none();
        let mut y = self.alloc(x.extent(), w.rows(), if in_one_pass { dtype } else { DType::F32 })?;
        if in_one_pass {
            let Some(term) = &term else {
                ops::sharded_linear(self.device, x, w, tree, bias, residual, y.view_mut())?;
                return Ok((y, None));
            };
            let hidden = self.divided_hidden(term, weight, x, shares)?;
            let spread = self.spread_b(term, w.rows())?;
            let low_rank = ops::LowRank { h: hidden.view(), b: spread.as_ref().map_or(term.b, Tensor::view) };
            ops::linear_low_rank(self.device, x, w, low_rank, bias, residual, y.view_mut())?;
            return Ok((y, Some(hidden)));
        }
        ops::sharded_linear(self.device, x, w, tree, None, None, y.view_mut())?;
        let mut y = self.join(y, shares)?;
        let hidden = match &term {
            Some(term) => {
                let hidden = self.divided_hidden(term, weight, x, shares)?;
                self.add_own_terms(term, hidden.view(), shares, &mut y)?;
                Some(hidden)
            }
            None => None,
        };
        let factors = match &term {
            Some(term) if term.magnitude.is_some() => {
                let norms = self.norms(weight, term, weights.require(weight)?)?;
                Some(self.factors(term, norms.view(), w.rows())?)
            }
            _ => None,
        };
        if let Some(factors) = &factors {
            ops::scale_columns(self.device, y.view_mut(), factors.view(), bias)?;
        }
        if let Some(residual) = residual {
            ops::add(self.device, residual, y.view_mut())?;
        }
        if let Some(bias) = bias.filter(|_| factors.is_none()) {
            let mut ones = self.alloc_row(y.cols())?;
            ops::fill(self.device, ones.view_mut(), 1.0)?;
            ops::scale_columns(self.device, y.view_mut(), ones.view(), Some(bias))?;
        }
        Ok((self.in_type(y, dtype)?, hidden))
    }

    /// Adds the terms from `hidden = s · x̃ Aᵀ` of all rows to this rank's rows `y`, f32.
    pub(super) fn add_own_terms(
        &self,
        term: &LowRank,
        hidden: View,
        shares: &SequenceParallelRows,
        y: &mut Tensor,
    ) -> Result<()> {
        let spread = self.spread_b(term, y.cols())?;
        let b = spread.as_ref().map_or(term.b, Tensor::view);
        Ok(ops::linear_add(self.device, shares.own_of(hidden), b, y.view_mut())?)
    }

    /// Computes `s · x̃ Aᵀ` `[T, S·r]` of all rows from this rank's columns of `x` and `A`.
    fn divided_hidden(
        &self,
        term: &LowRank,
        weight: ParamKind,
        x: View,
        shares: &SequenceParallelRows,
    ) -> Result<Tensor> {
        let dropped = self.dropped(term, x)?;
        let x = dropped.as_ref().map_or(x, Tensor::view);
        let tree = self.decoder.sum_blocks().tree(weight);
        if tree.is_none() && self.split.is_none() {
            return self.low_rank_hidden(term, x);
        }
        let mut sums = self.alloc(x.extent(), term.a.rows(), DType::F32)?;
        ops::sharded_linear(self.device, x, term.a, tree, None, None, sums.view_mut())?;
        self.whole_hidden(term, sums, shares)
    }

    /// Sums this rank's f32 `[T, S·r]` over ranks, for all rows on each, scaled and in the compute type.
    pub(super) fn whole_hidden(
        &self,
        term: &LowRank,
        mut sums: Tensor,
        shares: &SequenceParallelRows,
    ) -> Result<Tensor> {
        self.sum_rows(&mut sums, shares)?;
        self.gather_rows(&mut sums, shares)?;
        ops::scale(self.device, sums.view_mut(), term.scale)?;
        self.in_compute_type(sums)
    }

    /// Computes `y = x · wᵀ + terms (+ bias)`, the terms from `hidden = s · x̃ Aᵀ`.
    pub(super) fn with_terms<'w>(
        &self,
        term: &LowRank,
        x: View,
        w: impl Into<Weight<'w>>,
        hidden: View,
        bias: Option<View>,
        y: ViewMut,
    ) -> Result<()> {
        let w = w.into();
        if let Weight::Plain(w) = w
            && self.device.backend() == Backend::Cpu
            && term.sites.len() > 1
            && term.rank >= SEPARATE_RANK
        {
            return self.with_separate_terms(term, x, w, hidden, bias, y);
        }
        let spread = self.spread_b(term, w.rows())?;
        let b = spread.as_ref().map_or(term.b, Tensor::view);
        let low_rank = ops::LowRank { h: hidden, b };
        Ok(ops::sharded_linear_low_rank(self.device, x, w, low_rank, bias, y)?)
    }

    /// Computes the same by a product for each module, and for the outputs between them: there are no zeros
    /// that [`Self::spread_b`] would have between modules.
    fn with_separate_terms(
        &self,
        term: &LowRank,
        x: View,
        w: View,
        hidden: View,
        bias: Option<View>,
        mut y: ViewMut,
    ) -> Result<()> {
        let mut of_rows = |rows: Range<usize>, low_rank: Option<ops::LowRank>| {
            let (w, bias) = (w.row_range(rows.clone()), bias.map(|bias| bias.col_range(rows.clone())));
            let y = y.reborrow().col_range(rows);
            match low_rank {
                Some(low_rank) => ops::sharded_linear_low_rank(self.device, x, w, low_rank, bias, y),
                None => ops::sharded_linear(self.device, x, w, None, bias, None, y),
            }
        };
        let mut end = 0;
        for (columns, b, rows) in term.each() {
            debug_assert!(end <= rows.start, "modules come in the order of their rows");
            if end < rows.start {
                of_rows(end..rows.start, None)?;
            }
            end = rows.end;
            of_rows(rows, Some(ops::LowRank { h: hidden.col_range(columns), b }))?;
        }
        if end < w.rows() {
            of_rows(end..w.rows(), None)?;
        }
        Ok(())
    }

    /// Returns the matrix `[N, S·r]` from hidden columns to all `rows` outputs, unless it is `B`
    /// itself: each module's `B` at its rows and hidden columns, zeros elsewhere. It is small, and
    /// one product then writes the output once.
    fn spread_b(&self, term: &LowRank, rows: usize) -> Result<Option<Tensor>> {
        if let [site] = term.sites
            && site.rows == (0..rows)
        {
            return Ok(None);
        }
        let mut spread = self.device.zeros(MemoryKind::Activations, rows, term.a.rows(), term.b.dtype())?;
        for (columns, b, out) in term.each() {
            ops::cast(self.device, b, spread.view_mut().row_range(out).col_range(columns))?;
        }
        Ok(Some(spread))
    }

    /// Computes `x̃`, unless there is no dropout.
    pub(super) fn dropped(&self, term: &LowRank, x: View) -> Result<Option<Tensor>> {
        let Some(key) = self.drops(term) else { return Ok(None) };
        let mut dropped = self.alloc(x.extent(), x.cols(), x.dtype())?;
        let Some((columns, num_columns)) = term.columns else {
            ops::dropout(self.device, x, dropped.view_mut(), key ^ term.place, term.dropout)?;
            return Ok(Some(dropped));
        };
        // A mask follows an element's place in the whole activation.
        let mut whole = self.alloc(x.extent(), *num_columns, x.dtype())?;
        ops::fill_zero(self.device, whole.view_mut())?;
        ops::cast(self.device, x, whole.view_mut().col_range(columns.clone()))?;
        let mut of_whole = self.alloc(x.extent(), *num_columns, x.dtype())?;
        ops::dropout(self.device, whole.view(), of_whole.view_mut(), key ^ term.place, term.dropout)?;
        ops::cast(self.device, of_whole.view().col_range(columns.clone()), dropped.view_mut())?;
        Ok(Some(dropped))
    }

    /// Computes `s · x̃ Aᵀ` `[T, S·r]`.
    pub(super) fn low_rank_hidden(&self, term: &LowRank, x: View) -> Result<Tensor> {
        let mut hidden = self.alloc(x.extent(), term.a.rows(), self.dtype)?;
        ops::linear(self.device, x, term.a, None, None, hidden.view_mut())?;
        ops::scale(self.device, hidden.view_mut(), term.scale)?;
        Ok(hidden)
    }

    /// Adds the gradients of a matrix, its terms and its bias, where they train. `dy` is in the
    /// compute type; `reduced` is forward's `s · x̃ Aᵀ`, if it was kept.
    pub(super) fn linear_gradients(
        &self,
        weights: &LayerWeights,
        gradients: &mut LayerGradients,
        weight: ParamKind,
        bias: ParamKind,
        x: View,
        reduced: Option<Tensor>,
        dy: View,
        shares: &SequenceParallelRows,
    ) -> Result<LowRankBackward> {
        if let Some((dw, adds)) = gradients.product_mut(weight) {
            ops::sharded_linear_backward_weight(self.device, dy, x, dw, adds)?;
        }
        if let Some(db) = gradients.get_mut(bias) {
            ops::bias_backward(self.device, dy, db)?;
        }
        let Some(term) = weights.low_rank(weight) else { return Ok(LowRankBackward::default()) };
        let parts = weight.low_rank().expect("it has terms");
        let dropped = self.dropped(&term, x)?;
        let hidden = match reduced {
            Some(hidden) => hidden,
            None if weight.is_divided_by_columns() => self.divided_hidden(&term, weight, x, shares)?,
            None => self.low_rank_hidden(&term, dropped.as_ref().map_or(x, Tensor::view))?,
        };
        let dz = match parts.magnitude.filter(|_| term.magnitude.is_some()) {
            Some(part) => {
                let d_magnitude = gradients.get_mut(part);
                let operands = (x, hidden.view(), dy);
                Some(self.magnitude_backward(weights, weight, &term, operands, shares, d_magnitude)?)
            }
            None => None,
        };
        let dz_view = dz.as_ref().map_or(dy, Tensor::view);
        let x = dropped.as_ref().map_or(x, Tensor::view);
        let is_summed = self.sums_input(weight);
        let dtype = if is_summed { DType::F32 } else { self.dtype };
        let mut dh = self.alloc(x.extent(), term.a.rows(), dtype)?;
        let tree = self.decoder.sum_blocks().tree(weight).filter(|_| is_summed);
        let mut db = gradients.get_mut(parts.b);
        for ((columns, b, out), site) in term.each().zip(term.sites) {
            let dy = dz_view.col_range(out);
            if let Some(db) = &mut db {
                let db = db.reborrow().row_range(site.b_rows.clone());
                let hidden = hidden.view().col_range(columns.clone());
                ops::low_rank_backward_weight(self.device, LowRankFactor::B, dy, hidden, db)?;
            }
            let dh = dh.view_mut().col_range(columns);
            if is_summed {
                let tree = tree.map(|tree| tree.within(&site.rows));
                ops::sharded_linear_backward_input(self.device, dy, b, None, tree.as_ref(), dh)?;
            } else {
                ops::linear_backward_input(self.device, dy, b, dh, false)?;
            }
        }
        if is_summed {
            dh = self.whole_hidden(&term, dh, shares)?;
        } else {
            ops::scale(self.device, dh.view_mut(), term.scale)?;
        }
        if let Some(da) = gradients.get_mut(parts.a) {
            ops::low_rank_backward_weight(self.device, LowRankFactor::A, dh.view(), x, da)?;
        }
        Ok(LowRankBackward { dz, dh: Some(dh) })
    }

    /// Computes the gradient of a product's input, `dy · w` and that of its terms, into `dx`. Where it is
    /// summed over blocks and ranks, the terms' is returned: [`LayerExecutor::add_low_rank_input`] adds it
    /// to the sum.
    pub(super) fn linear_input(
        &self,
        weights: &LayerWeights,
        weight: ParamKind,
        dy: View,
        low_rank: LowRankBackward,
        mut dx: ViewMut,
    ) -> Result<LowRankBackward> {
        let LowRankBackward { dz, dh } = low_rank;
        let (dy, w) = (dz.as_ref().map_or(dy, Tensor::view), weights.backward_weight(weight)?);
        if self.sums_input(weight) {
            let tree = self.decoder.sum_blocks().tree(weight);
            ops::sharded_linear_backward_input(self.device, dy, w, None, tree, dx)?;
            return Ok(LowRankBackward { dz: None, dh });
        }
        let Some((term, dh)) = weights.low_rank(weight).zip(dh) else {
            ops::sharded_linear_backward_input(self.device, dy, w, None, None, dx)?;
            return Ok(LowRankBackward::default());
        };
        if self.drops(&term).is_none() {
            let low_rank = Some((dh.view(), term.a));
            ops::sharded_linear_backward_input(self.device, dy, w, low_rank, None, dx)?;
        } else {
            ops::sharded_linear_backward_input(self.device, dy, w, None, None, dx.reborrow())?;
            self.low_rank_input(&term, dh.view(), dx)?;
        }
        Ok(LowRankBackward::default())
    }

    /// Returns whether the gradient of a matrix's input is summed over blocks or ranks.
    fn sums_input(&self, weight: ParamKind) -> bool {
        !weight.is_divided_by_columns()
            && (self.split.is_some() || self.decoder.sum_blocks().tree(weight).is_some())
    }

    /// Adds the terms' gradient of a product's input to this rank's rows of `dx`, which are the sum over
    /// ranks.
    pub(super) fn add_low_rank_input(
        &self,
        weights: &LayerWeights,
        weight: ParamKind,
        low_rank: LowRankBackward,
        shares: &SequenceParallelRows,
        dx: &mut Tensor,
    ) -> Result<()> {
        let Some((term, dh)) = weights.low_rank(weight).zip(low_rank.dh) else { return Ok(()) };
        self.add_own_input(&term, dh.view(), shares, dx)
    }

    /// Adds one term's gradient of a product's input to this rank's rows of `dx`; `dh` has all rows.
    pub(super) fn add_own_input(
        &self,
        term: &LowRank,
        dh: View,
        shares: &SequenceParallelRows,
        dx: &mut Tensor,
    ) -> Result<()> {
        if self.drops(term).is_some() && self.split.is_some() {
            return self.dropped_input(term, dh, shares.own(), dx.view_mut());
        }
        self.low_rank_input(term, shares.own_of(dh), dx.view_mut().row_range(shares.own()))
    }

    /// Adds the terms' gradient to rows `own` of `dx`, of which this rank holds the sum; `dh` has all rows.
    /// All rows are computed, since a mask follows an element's place among them.
    fn dropped_input(&self, term: &LowRank, dh: View, own: Range<usize>, mut dx: ViewMut) -> Result<()> {
        let key = self.drops(term).expect("asked for with dropout") ^ term.place;
        let mut dropped = self.alloc(dh.extent(), dx.cols(), self.dtype)?;
        ops::fill_zero(self.device, dropped.view_mut())?;
        let of_own = dropped.view_mut().row_range(own.clone());
        ops::linear_backward_input(self.device, dh.row_range(own), term.a, of_own, false)?;
        Ok(ops::dropout_backward_add(self.device, dropped.view(), dx.reborrow(), key, term.dropout)?)
    }

    /// Returns the dropout key, if the terms have dropout.
    fn drops(&self, term: &LowRank) -> Option<u64> {
        self.dropout.filter(|_| term.dropout > 0.0)
    }

    /// Adds the terms' gradient to `dx`, from `dh` in the compute type.
    fn low_rank_input(&self, term: &LowRank, dh: View, dx: ViewMut) -> Result<()> {
        let Some(key) = self.drops(term) else {
            return Ok(ops::linear_backward_input(self.device, dh, term.a, dx, true)?);
        };
        let mut dropped = self.alloc(dh.extent(), dx.cols(), self.dtype)?;
        ops::linear_backward_input(self.device, dh, term.a, dropped.view_mut(), false)?;
        if let Some((columns, num_columns)) = term.columns {
            // A mask follows an element's place in the whole activation.
            let mut whole = self.alloc(dh.extent(), *num_columns, self.dtype)?;
            ops::fill_zero(self.device, whole.view_mut())?;
            ops::cast(self.device, dropped.view(), whole.view_mut().col_range(columns.clone()))?;
            let mut sums = self.alloc(dh.extent(), *num_columns, dx.dtype())?;
            ops::fill_zero(self.device, sums.view_mut())?;
            let mut dx = dx;
            ops::cast(self.device, dx.view(), sums.view_mut().col_range(columns.clone()))?;
            let key = key ^ term.place;
            ops::dropout_backward_add(self.device, whole.view(), sums.view_mut(), key, term.dropout)?;
            return Ok(ops::cast(self.device, sums.view().col_range(columns.clone()), dx.reborrow())?);
        }
        Ok(ops::dropout_backward_add(self.device, dropped.view(), dx, key ^ term.place, term.dropout)?)
    }
}
