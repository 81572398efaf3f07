//! A product of matrices, as every device is asked for it.
//!
//! Everything is `c = a · bᵀ`, both factors with their rows in one dimension of the result and k in the other; a factor
//! that lies the other way round in memory is marked as transposed. Sums are formed in f32.

use std::ops::Range;

use crate::{DType, Extent, View, ViewMut};

/// A factor: rows, and elements along k.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    view: View<'a>,
    transposed: bool,
}

impl<'a> Operand<'a> {
    /// The matrix's rows are the factor's rows, its columns run along k.
    pub(crate) fn rows_of(view: View<'a>) -> Self {
        Self { view, transposed: false }
    }

    /// The matrix's columns are the factor's rows, its rows run along k.
    pub(crate) fn columns_of(view: View<'a>) -> Self {
        Self { view, transposed: true }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.view.dtype()
    }

    pub(crate) fn rows(&self) -> usize {
        if self.transposed { self.view.cols() } else { self.view.rows() }
    }

    /// Elements along k.
    pub(crate) fn depth(&self) -> usize {
        if self.transposed { self.view.rows() } else { self.view.cols() }
    }

    pub(crate) fn is_transposed(&self) -> bool {
        self.transposed
    }

    pub(crate) fn stride(&self) -> usize {
        self.view.stride()
    }

    /// The matrix as it lies in memory.
    pub(crate) fn view(&self) -> View<'a> {
        self.view
    }

    /// The rows, and for how many the matrix has memory.
    pub(crate) fn extent(&self) -> Extent {
        if self.transposed { Extent::exact(self.view.cols()) } else { self.view.extent() }
    }

    /// A range of the rows.
    pub(crate) fn row_range(&self, rows: Range<usize>) -> Self {
        let view = if self.transposed { self.view.col_range(rows) } else { self.view.row_range(rows) };
        Self { view, ..*self }
    }
}

/// Factors with the rows of a product's, and a length along k of their own.
#[derive(Clone, Copy)]
pub(crate) struct Term<'a> {
    /// `[M, R]`.
    pub a: Operand<'a>,
    /// `[N, R]`.
    pub b: Operand<'a>,
}

impl Term<'_> {
    /// R.
    pub(crate) fn depth(&self) -> usize {
        self.a.depth()
    }
}

/// `c = a · bᵀ (+ term) (+ bias) (+ residual)`, or `c += a · bᵀ (+ term)`.
pub(crate) struct Product<'a> {
    /// `[M, K]`, f32 or bf16.
    pub a: Operand<'a>,
    /// `[N, K]`, of the same type.
    pub b: Operand<'a>,
    /// Another pair of factors, of the same type, whose product is added. Where it is a product of its own, what it is added to has
    /// been rounded to the type of `c`.
    pub term: Option<Term<'a>>,
    /// `[M, N]`, f32 or bf16.
    pub c: ViewMut<'a>,
    /// Adds to what `c` holds, rounding a bf16 sum once; not together with a residual.
    pub accumulate: bool,
    /// `[1, N]` f32.
    pub bias: Option<View<'a>>,
    /// `[M, N]` f32.
    pub residual: Option<View<'a>>,
}

impl<'a> Product<'a> {
    /// `c = a · bᵀ`, or `+=` if `accumulate`.
    pub(crate) fn plain(a: Operand<'a>, b: Operand<'a>, c: ViewMut<'a>, accumulate: bool) -> Self {
        Self { a, b, term: None, c, accumulate, bias: None, residual: None }
    }

    /// What a device may rely on.
    ///
    /// # Panics
    /// If shapes or types do not fit; operations check them first.
    pub(crate) fn check(&self) {
        let (m, n) = self.c.shape();
        assert!(
            self.a.rows() == m && self.b.rows() == n && self.a.depth() == self.b.depth(),
            "product of {}x{} and {}x{} into {m}x{n}",
            self.a.rows(),
            self.a.depth(),
            self.b.rows(),
            self.b.depth(),
        );
        assert_eq!(self.a.dtype(), self.b.dtype());
        assert!(self.term.is_none_or(|Term { a, b }| {
            a.rows() == m
                && b.rows() == n
                && a.depth() == b.depth()
                && [a, b].iter().all(|x| x.dtype() == self.a.dtype())
        }));
        assert!(!self.accumulate || self.residual.is_none());
        assert!(
            self.bias.is_none_or(|b| b.shape() == (1, n))
                && self.residual.is_none_or(|r| r.shape() == (m, n))
        );
    }
}
