//! Products of matrices.
//!
//! Everything is `c = a · bᵀ`, both factors with their rows in one dimension of the result and k in the other; a factor
//! that lies the other way round in memory is marked as transposed. The kernels accumulate in f32.
//!
//! A few rows against a matrix (decoding) are limited by reading the matrix: [`few`]. So are products with a dimension as
//! short as an adapter's rank: [`thin`]. The rest is limited by arithmetic: [`blocked`].

#[cfg(target_arch = "x86_64")]
mod amx;
mod blocked;
mod few;
mod kernel;
mod lanes;
mod level;
mod pack;
mod thin;
#[cfg(target_arch = "x86_64")]
mod thin_tiles;

use super::convert::accumulate;
use super::rows::RowsMut;
use super::{Cpu, Isa};
use crate::{DType, View, ViewMut, bf16, with_element};
use kernel::Add;

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

    fn rows(&self) -> usize {
        if self.transposed { self.view.cols() } else { self.view.rows() }
    }

    /// Elements along k.
    fn depth(&self) -> usize {
        if self.transposed { self.view.rows() } else { self.view.cols() }
    }

    fn is_transposed(&self) -> bool {
        self.transposed
    }

    fn stride(&self) -> usize {
        self.view.stride()
    }

    /// The first element. The type is the caller's choice: bf16 factors are read as pairs, too.
    fn pointer<E>(&self) -> *const E {
        match self.dtype() {
            DType::F32 => self.view.pointer_of::<f32>().cast(),
            DType::Bf16 => self.view.pointer_of::<bf16>().cast(),
        }
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
    /// Another pair of factors, of the same type, whose product is added: where the whole is [`blocked`], before it is rounded.
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

impl Product<'_> {
    /// Computes it on all threads; from inside a block of [`Cpu::parallel_for`], on the calling thread alone.
    ///
    /// # Panics
    /// If shapes or types do not fit; operations check them first.
    pub(crate) fn run(mut self, cpu: &Cpu) {
        let (m, n) = self.c.shape();
        assert!(
            self.a.rows() == m && self.b.rows() == n && self.a.depth() == self.b.depth(),
            "product of {}x{} and {}x{} into {m}x{n}",
            self.a.rows(),
            self.a.depth(),
            self.b.depth(),
            self.b.rows(),
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
        if m == 0 || n == 0 {
            return;
        }
        if !few::takes(&self) && thin::run(cpu, &mut self) {
            return;
        }
        match (cpu.isa(), self.a.dtype()) {
            (Isa::Portable, _) => self.run_on::<level::Baseline>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, _) => self.run_on::<level::Avx2Level>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512Bf16, DType::Bf16) => self.run_on::<level::Avx512Bf16Level>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx, DType::Bf16) => self.run_on::<level::AmxLevel>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx, DType::F32) => self.run_on::<level::AmxSplitLevel>(cpu),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx512Bf16, _) => self.run_on::<level::Avx512Level>(cpu),
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("only x86-64 has these levels"),
        }
    }

    fn run_on<L: level::Level>(&self, cpu: &Cpu) {
        if few::takes(self) {
            few::run::<L>(cpu, self);
        } else {
            blocked::run::<L>(cpu, self);
        }
    }

    /// What the result is added to, from an element on, and the distance between rows.
    fn start_at(&self, row: usize, col: usize) -> (Add, usize) {
        let (view, is_wanted) = match self.residual {
            Some(residual) => (residual, true),
            None => (self.c.view(), self.accumulate),
        };
        let offset = row * view.stride() + col;
        match view.dtype() {
            _ if !is_wanted => (Add::Nothing, 0),
            DType::F32 => (Add::F32(view.pointer_of::<f32>().wrapping_add(offset)), view.stride()),
            DType::Bf16 => (Add::Bf16(view.pointer_of::<bf16>().wrapping_add(offset)), view.stride()),
        }
    }

    /// The bias from a column on; null if there is none.
    fn bias_at(&self, col: usize) -> *const f32 {
        self.bias.map_or(std::ptr::null(), |b| b.pointer_of::<f32>().wrapping_add(col))
    }
}

impl Cpu {
    /// `db += Σ_t dy[t]`, each column summed in row order.
    pub(crate) fn bias_backward(&self, dy: View, db: ViewMut) {
        let (rows, cols) = dy.shape();
        let db = RowsMut::<f32>::new(db);
        with_element!(dy.dtype(), E => self.parallel_ranges(cols, 256, |_, range| {
            // SAFETY: ranges are disjoint.
            let db = unsafe { db.part(0, range.start, range.len()) };
            for row in 0..rows {
                accumulate(self.isa(), &dy.row::<E>(row)[range.clone()], db);
            }
        }));
    }
}
