//! Products of matrices.

use super::rows::RowsMut;
use super::{Cpu, scratch};
use crate::dtype::Element;
use crate::{DType, View, ViewMut, with_element};

/// A factor: a matrix read with any strides.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    view: View<'a>,
    transposed: bool,
}

impl<'a> Operand<'a> {
    pub(crate) fn of(view: View<'a>) -> Self {
        Self { view, transposed: false }
    }

    pub(crate) fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.view.dtype()
    }

    fn shape(&self) -> (usize, usize) {
        let (rows, cols) = self.view.shape();
        if self.transposed { (cols, rows) } else { (rows, cols) }
    }
}

/// Where a product goes.
pub(crate) struct Target<'a> {
    view: ViewMut<'a>,
}

impl<'a> Target<'a> {
    pub(crate) fn of(view: ViewMut<'a>) -> Self {
        Self { view }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.view.dtype()
    }
}

/// `c = a · b (+ bias) (+ residual)`, or `c += …`.
pub(crate) struct Product<'a> {
    pub a: Operand<'a>,
    pub b: Operand<'a>,
    pub c: Target<'a>,
    pub accumulate: bool,
    pub bias: Option<View<'a>>,
    pub residual: Option<View<'a>>,
}

/// Rows of the result per block.
const ROWS: usize = 128;

impl Product<'_> {
    /// Computes it on all threads; from inside a block, on the calling thread.
    pub(crate) fn run(self, cpu: &Cpu) {
        let ((m, k), (_, n)) = (self.a.shape(), self.b.shape());
        let (bias, residual, accumulate) = (self.bias, self.residual, self.accumulate);
        with_f32_operand(self.a.view, |a, a_strides| {
            with_f32_operand(self.b.view, |b, b_strides| {
                let (a_row, a_col) = if self.a.transposed { (a_strides.1, a_strides.0) } else { a_strides };
                let (b_row, b_col) = if self.b.transposed { (b_strides.1, b_strides.0) } else { b_strides };
                with_element!(self.c.view.dtype(), E => {
                    let c = RowsMut::<E>::new(self.c.view);
                    let (a, b) = (a.as_ptr().addr(), b.as_ptr().addr());
                    cpu.parallel_for(m.div_ceil(ROWS), |block| {
                        let rows = block * ROWS..m.min((block + 1) * ROWS);
                        scratch::with_f32(rows.len() * n, |out| {
                            // SAFETY: both operands are alive and hold m·k and k·n numbers at these strides.
                            unsafe {
                                gemm::gemm(
                                    rows.len(), n, k,
                                    out.as_mut_ptr(), 1, n as isize, false,
                                    (a as *const f32).offset(rows.start as isize * a_row), a_col, a_row,
                                    b as *const f32, b_col, b_row,
                                    0.0f32, 1.0f32, false, false, false,
                                    gemm::Parallelism::None,
                                );
                            }
                            for (i, row) in rows.clone().enumerate() {
                                // SAFETY: blocks are disjoint ranges of rows.
                                let c = unsafe { c.row(row) };
                                for (j, c) in c.iter_mut().enumerate() {
                                    let mut sum = out[i * n + j];
                                    sum += bias.map_or(0.0, |b| b.row::<f32>(0)[j]);
                                    sum += residual.map_or(0.0, |r| r.row::<f32>(row)[j]);
                                    sum += if accumulate { c.to_f32() } else { 0.0 };
                                    *c = E::from_f32(sum);
                                }
                            }
                        });
                    });
                });
            });
        });
    }
}

fn with_f32_operand<R>(view: View, f: impl FnOnce(&[f32], (isize, isize)) -> R) -> R {
    let mut wide = vec![0.0; view.len()];
    let cols = view.cols();
    with_element!(view.dtype(), E => for row in 0..view.rows() {
        for (w, x) in wide[row * cols..].iter_mut().zip(view.row::<E>(row)) {
            *w = x.to_f32();
        }
    });
    f(&wide, (cols as isize, 1))
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
                for (db, dy) in db.iter_mut().zip(&dy.row::<E>(row)[range.clone()]) {
                    *db += dy.to_f32();
                }
            }
        }));
    }
}
