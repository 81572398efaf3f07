//! Products of activations and packed FP8 weights: cuBLASLt sums codes, kernels round and scale.

use super::columns::elementwise_grid;
use super::driver::{Factor, FactorType, Grid, Matmul};
use super::graph::Work;
use super::{Cuda, args, by_type, driver, gemm, source};
use crate::memory::bytes::BytesView;
use crate::ops::gemm::{Product, Term};
use crate::{DType, Format, Result, ViewMut};

pub(super) static SOURCE: driver::Source = source!("fp8.cu", not fused);

/// Columns of the result that are summed at a time.
const COLUMNS: usize = 4096;
/// f32 sums before they are scaled: 16 MiB, to stay in a GPU's cache.
const SUMS: usize = 1 << 22;
/// Rows per block of `quantise_rows`, as in `fp8.cu`, and its threads.
const QUANTISED_ROWS: usize = 8;
const THREADS: u32 = 256;

/// Returns how many of `rows` rows and `cols` columns of a result are summed in f32 at a time. Blocks are
/// large enough to fill a GPU, and for weights to be read again by few of them.
pub(crate) fn sums_shape(rows: usize, cols: usize) -> (usize, usize) {
    let cols = cols.min(COLUMNS);
    // A multiple of the library's tiles.
    let fitting = SUMS / cols.max(1) / 128 * 128;
    (rows.min(fitting), cols)
}

/// Scratch memory of an FP8 product.
pub(crate) struct Scratch<'a> {
    /// `[M, K/4]`: a byte per element of the activation.
    pub codes: ViewMut<'a>,
    /// `[M, 1]`: scales of the activation's rows.
    pub scales: ViewMut<'a>,
    /// Sums of a block of the result, whose shape is [`sums_shape`].
    pub sums: ViewMut<'a>,
}

/// Computes `c = x · wᵀ (+ term) (+ bias) (+ residual)`, or `c += x · wᵀ (+ term) (+ bias)`, where `w` `[N, K]`
/// is the product's second factor in [`Format::Fp8`]. Sums are f32; a term is rounded to the type of `c` before
/// they are added.
pub(crate) fn run(cuda: &Cuda, product: Product, w: BytesView, scratch: Scratch) -> Result<()> {
    product.check();
    let Product { a, term, mut c, accumulate, bias, residual, .. } = product;
    let Scratch { codes, scales, mut sums } = scratch;
    let (x, (m, n), k) = (a.view(), c.shape(), a.depth());
    let unit_len = Format::Fp8.unit_len(k);
    let args = args![x, x.stride() as i32, &codes, &scales, m as i32, k as i32];
    let grid = Grid::new(m.div_ceil(QUANTISED_ROWS), THREADS);
    // SAFETY: the operands are those of the kernel, with a code for each element and a scale for each row.
    unsafe { cuda.launch(&SOURCE, by_type!("quantise_rows", x.dtype()), grid, args)? };
    if let Some(Term { a, b }) = term {
        let itself = accumulate.then(|| (c.address(), c.stride()));
        gemm::multiply(cuda, a, b, itself, &mut c)?;
    }
    let accumulate = accumulate || term.is_some_and(|term| term.depth() > 0);
    let (codes, scales) = (codes.view(), scales.view());
    let (height, width) = sums.shape();
    for row in (0..m).step_by(height.max(1)) {
        let rows = row..m.min(row + height);
        let (codes, scales) = (codes.row_range(rows.clone()), scales.row_range(rows.clone()));
        for col in (0..n).step_by(width.max(1)) {
            let cols = col..n.min(col + width);
            let w = w.range(col * unit_len..cols.end * unit_len);
            let sums = sums.reborrow().row_range(0..rows.len()).col_range(0..cols.len());
            let matmul = Matmul {
                size: [rows.len(), cols.len(), k],
                dtype: FactorType::E4m3,
                a: Factor { address: codes.address(), stride: k, along_depth: true },
                b: Factor { address: w.address(), stride: unit_len, along_depth: true },
                c: None,
                d: (sums.address(), sums.stride()),
                d_type: DType::F32,
                tf32: false,
            };
            // SAFETY: views vouch for factors and result, whose shapes fit.
            unsafe { cuda.put(Work::Matmul(matmul))? };
            let residual = residual.map(|residual| residual.row_range(rows.clone()).col_range(cols.clone()));
            let residual_stride = residual.map_or(0, |residual| residual.stride() as i32);
            let bias = bias.map(|bias| bias.col_range(cols.clone()));
            let c = c.reborrow().row_range(rows.clone()).col_range(cols.clone());
            let (of_sums, of_c) = (sums.stride() as i32, c.stride() as i32);
            let args = args![
                &sums,
                of_sums,
                scales,
                w,
                unit_len,
                k as i32,
                residual,
                residual_stride,
                bias,
                accumulate,
                &c,
                of_c,
                rows.len() as i32,
                cols.len() as i32
            ];
            // SAFETY: the operands are those of the kernel: of the shape of `c`, with a scale for each row, a
            // unit and a number of the bias for each column.
            unsafe {
                cuda.launch(&SOURCE, by_type!("scale_sums", c.dtype()), elementwise_grid(c.shape()), args)?;
            }
        }
    }
    Ok(())
}
