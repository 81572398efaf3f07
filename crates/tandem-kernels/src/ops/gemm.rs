//! Operands of a GEMM, the same for every device.
//!
//! Every GEMM is `c = a · bᵀ`: the rows of both factors run along a dimension of the result, their
//! columns along k. A factor that is stored the other way round is marked as transposed. Sums are
//! f32.

use std::ops::Range;

use super::check::Operand as _;
use crate::ops::{DepthTree, PackedWeight, Weight};
use crate::{DType, Extent, View, ViewMut};

/// A factor: its rows, and elements along k.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    matrix: Weight<'a>,
    transposed: bool,
}

impl<'a> Operand<'a> {
    /// Creates a factor from the rows of a matrix.
    pub(crate) fn rows_of(matrix: impl Into<Weight<'a>>) -> Self {
        Self { matrix: matrix.into(), transposed: false }
    }

    /// Creates a factor from the columns of a matrix.
    pub(crate) fn columns_of(matrix: impl Into<Weight<'a>>) -> Self {
        Self { matrix: matrix.into(), transposed: true }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.matrix.describe().2
    }

    pub(crate) fn rows(&self) -> usize {
        let (rows, cols, _) = self.matrix.describe();
        if self.transposed { cols } else { rows }
    }

    /// Returns the elements along k.
    pub(crate) fn depth(&self) -> usize {
        let (rows, cols, _) = self.matrix.describe();
        if self.transposed { rows } else { cols }
    }

    pub(crate) fn is_transposed(&self) -> bool {
        self.transposed
    }

    pub(crate) fn stride(&self) -> usize {
        self.view().stride()
    }

    /// Returns the packed matrix, if it is one.
    pub(crate) fn packed(&self) -> Option<PackedWeight<'a>> {
        match self.matrix {
            Weight::Plain(_) => None,
            Weight::Packed(packed) => Some(packed),
        }
    }

    /// Returns the matrix as stored.
    ///
    /// # Panics
    /// If it is packed.
    pub(crate) fn view(&self) -> View<'a> {
        match self.matrix {
            Weight::Plain(view) => view,
            Weight::Packed(_) => panic!("a packed factor is unpacked part by part"),
        }
    }

    /// Returns the extent of the rows.
    pub(crate) fn extent(&self) -> Extent {
        match self.matrix {
            Weight::Plain(view) if !self.transposed => view.extent(),
            _ => Extent::exact(self.rows()),
        }
    }

    /// Returns a range of the rows.
    pub(crate) fn row_range(&self, rows: Range<usize>) -> Self {
        let matrix = if self.transposed { self.matrix.col_range(rows) } else { self.matrix.row_range(rows) };
        Self { matrix, ..*self }
    }

    /// Returns a range of the elements along k.
    pub(crate) fn depth_range(&self, range: Range<usize>) -> Self {
        let matrix =
            if self.transposed { self.matrix.row_range(range) } else { self.matrix.col_range(range) };
        Self { matrix, ..*self }
    }
}

/// A second pair of factors, with its own length along k.
#[derive(Clone, Copy)]
pub(crate) struct Term<'a> {
    /// `[M, R]`.
    pub a: Operand<'a>,
    /// `[N, R]`.
    pub b: Operand<'a>,
}

impl Term<'_> {
    /// Returns R.
    pub(crate) fn depth(&self) -> usize {
        self.a.depth()
    }
}

/// Most partial sums that a product is added to: those of its block and of a tree of eight blocks, and the
/// residual.
const MOST_ADDENDS: usize = 5;

/// f32 matrices that a product is added to in turn: addresses of their first elements, and row
/// strides.
#[derive(Clone, Copy)]
pub(crate) struct Addends {
    list: [(*const f32, usize); MOST_ADDENDS],
    count: usize,
}

// SAFETY: kernels read their own elements alone.
unsafe impl Send for Addends {}
// SAFETY: as above.
unsafe impl Sync for Addends {}

impl Addends {
    pub(crate) const NONE: Self = Self { list: [(std::ptr::null(), 0); MOST_ADDENDS], count: 0 };

    /// Appends a matrix.
    ///
    /// # Panics
    /// If there are too many.
    pub(crate) fn push(&mut self, address: *const f32, stride: usize) {
        self.list[self.count] = (address, stride);
        self.count += 1;
    }

    /// Returns the addends from an element on.
    #[inline(always)]
    pub(crate) fn at(&self, row: usize, col: usize) -> Self {
        let mut at = *self;
        for (address, stride) in &mut at.list[..self.count] {
            *address = address.wrapping_add(row * *stride + col);
        }
        at
    }

    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Lists the addresses of the first elements of row `row`.
    #[inline(always)]
    pub(crate) fn of_row(&self, row: usize) -> impl Iterator<Item = *const f32> {
        self.list[..self.count].iter().map(move |(address, stride)| address.wrapping_add(row * stride))
    }
}

/// Dimensions of a product that tensor parallelism may shard: the bits of an element do not depend on their lengths.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharded {
    No,
    /// Rows of the result.
    Rows,
    /// Columns of the result.
    Columns,
    /// Any dimension of a factor; the bits depend on the length of k.
    Any,
}

/// `c = a · bᵀ (+ term) (+ bias) (+ residual)`, or `c += a · bᵀ (+ term)`.
pub(crate) struct Product<'a> {
    /// `[M, K]`, f32 or bf16.
    pub a: Operand<'a>,
    /// `[N, K]`, of the same type; it may be packed.
    pub b: Operand<'a>,
    /// A second pair of factors of the same type, whose product is added. If it runs as a GEMM of
    /// its own, the sum so far has been rounded to the type of `c`.
    pub term: Option<Term<'a>>,
    /// `[M, N]`, f32 or bf16.
    pub c: ViewMut<'a>,
    /// Adds to `c`, rounding a bf16 sum once; excludes a residual.
    pub accumulate: bool,
    /// `[1, N]` f32.
    pub bias: Option<View<'a>>,
    /// `[M, N]` f32.
    pub residual: Option<View<'a>>,
    /// Order of the sum along k, if that is divided into blocks; for an f32 result that is
    /// overwritten.
    pub tree: Option<&'a DepthTree>,
    pub sharded: Sharded,
    /// On the CPU: matrices of the result's shape, added in turn before the bias; beside them nothing is
    /// accumulated, and k is one block.
    pub addends: Addends,
}

impl<'a> Product<'a> {
    /// Computes `c = a · bᵀ`, or `+=` if `accumulate`.
    pub(crate) fn plain(a: Operand<'a>, b: Operand<'a>, c: ViewMut<'a>, accumulate: bool) -> Self {
        let (tree, sharded, addends) = (None, Sharded::No, Addends::NONE);
        Self { a, b, term: None, c, accumulate, bias: None, residual: None, tree, sharded, addends }
    }

    /// Marks a product of factors that tensor parallelism may shard.
    pub(crate) fn sharded(self) -> Self {
        Self { sharded: Sharded::Any, ..self }
    }

    /// Returns the order of the sum along k, unless it is one block of neighbours.
    pub(crate) fn divided(&self) -> Option<&'a DepthTree> {
        self.tree.filter(|tree| tree.is_divided())
    }

    /// Checks what kernels rely on.
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
            self.divided().is_none_or(|tree| {
                tree.depth() == self.a.depth()
                    && self.term.is_none()
                    && !self.accumulate
                    && self.c.dtype() == DType::F32
            }),
            "a sum in blocks is f32, of the whole depth, and overwrites"
        );
        assert!(
            self.bias.is_none_or(|b| b.shape() == (1, n))
                && self.residual.is_none_or(|r| r.shape() == (m, n))
        );
    }
}
