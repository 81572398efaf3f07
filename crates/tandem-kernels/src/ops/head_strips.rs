//! Strips of the head: chunks of rows by strips of the vocabulary, the GEMMs around each strip's
//! kernels, and the memory of its logits.

use std::ops::Range;

use crate::ops::gemm::{Operand, Product, Term};
use crate::ops::{HeadGradients, HeadWeights, LowRank, Targets};
use crate::{View, ViewMut};

/// Part of the logits: some rows and some tokens.
pub(crate) struct Strip {
    pub rows: Range<usize>,
    pub tokens: Range<usize>,
}

/// Memory for logits.
pub(crate) struct LogitMemory<'a> {
    /// Rows of a chunk.
    pub chunk: usize,
    /// Logits kept for backward: of the chunks that end within its rows.
    pub kept: ViewMut<'a>,
    /// One strip of a chunk, reused by all others.
    pub spare: ViewMut<'a>,
}

/// Lists the strips: chunks of rows, and in each chunk `width` tokens at a time.
pub(crate) fn strips(
    rows: usize,
    chunk: usize,
    vocabulary: usize,
    width: usize,
) -> impl Iterator<Item = Strip> {
    let cut = |len: usize, part: usize| {
        (0..len).step_by(part.max(1)).map(move |start| start..len.min(start + part))
    };
    cut(rows, chunk)
        .flat_map(move |rows| cut(vocabulary, width).map(move |tokens| Strip { rows: rows.clone(), tokens }))
}

impl Targets<'_> {
    /// Returns the indices of the predictions at `rows`.
    pub(crate) fn of_rows(&self, rows: Range<usize>) -> Range<usize> {
        let before = |row: usize| self.rows.partition_point(|&r| (r as usize) < row);
        before(rows.start)..before(rows.end)
    }
}

impl Strip {
    /// Returns the memory of the strip's logits: in `kept` if the whole chunk fits there, else in
    /// `spare`.
    pub(crate) fn place<'a>(&self, memory: &'a mut LogitMemory) -> ViewMut<'a> {
        let Self { rows, tokens } = self;
        let LogitMemory { kept, spare, .. } = memory;
        if rows.end <= kept.rows() {
            kept.reborrow().row_range(rows.clone()).col_range(tokens.clone())
        } else {
            spare.reborrow().row_range(0..rows.len()).col_range(0..tokens.len())
        }
    }

    /// Returns the GEMM `hidden weightᵀ + bias + h bᵀ`, before scale and softcap.
    pub(crate) fn logits<'a>(
        &self,
        hidden: View<'a>,
        weights: &HeadWeights<'a>,
        logits: ViewMut<'a>,
    ) -> Product<'a> {
        let Self { rows, tokens } = self;
        let HeadWeights { weight, bias, low_rank } = *weights;
        let a = Operand::rows_of(hidden.row_range(rows.clone()));
        let b = Operand::rows_of(weight.row_range(tokens.clone()));
        let term = low_rank.map(|LowRank { h, b }| Term {
            a: Operand::rows_of(h.row_range(rows.clone())),
            b: Operand::rows_of(b.row_range(tokens.clone())),
        });
        let bias = bias.map(|bias| bias.col_range(tokens.clone()));
        Product { term, bias, ..Product::plain(a, b, logits, false).sharded() }
    }

    /// Returns the GEMMs of the backward pass, all but the gradient of the bias.
    pub(crate) fn back<'a>(
        &self,
        gradient: View<'a>,
        hidden: View<'a>,
        weights: &HeadWeights<'a>,
        gradients: &'a mut HeadGradients,
    ) -> impl Iterator<Item = Product<'a>> {
        let Self { rows, tokens } = self;
        // The first strip overwrites the rows' gradient, later strips add to it.
        let (is_later, adds) = (tokens.start > 0, gradients.adds_to_weight || rows.start > 0);
        let (of_rows, of_tokens) = (Operand::rows_of(gradient), Operand::columns_of(gradient));
        let weight = Operand::columns_of(weights.weight.row_range(tokens.clone()));
        let dhidden = gradients.hidden.reborrow().row_range(rows.clone());
        let to_hidden = Product::plain(of_rows, weight, dhidden, is_later);
        let to_weight = gradients.weight.as_mut().map(|dweight| {
            let hidden = Operand::columns_of(hidden.row_range(rows.clone()));
            Product::plain(of_tokens, hidden, dweight.reborrow().row_range(tokens.clone()), adds)
        });
        let low_rank = weights.low_rank;
        let to_h = low_rank.zip(gradients.h.as_mut()).map(|(LowRank { b, .. }, dh)| {
            let b = Operand::columns_of(b.row_range(tokens.clone()));
            Product::plain(of_rows, b, dh.reborrow().row_range(rows.clone()), is_later)
        });
        let to_b = low_rank.zip(gradients.b.as_mut()).map(|(LowRank { h, .. }, db)| {
            let h = Operand::columns_of(h.row_range(rows.clone()));
            Product::plain(of_tokens, h, db.reborrow().row_range(tokens.clone()), true)
        });
        [Some(to_hidden), to_weight, to_h, to_b].into_iter().flatten()
    }
}
