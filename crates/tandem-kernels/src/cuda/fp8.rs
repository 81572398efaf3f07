//! Products of activations and packed FP8 weights: cuBLASLt sums codes, kernels round and scale.

use super::columns::elementwise_grid;
use super::driver::{Arg, Factor, FactorType, Grid, Matmul};
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
/// Rows and columns of the weights that a block of `transpose_codes` takes, as in `fp8.cu`.
const TRANSPOSED: [usize; 2] = [16 * 8, 16 * 32];

/// Returns how many of `rows` rows and `cols` columns of a result are summed in f32 at a time. Blocks are
/// large enough to fill a GPU, and for weights to be read again by few of them.
pub(crate) fn sums_shape(rows: usize, cols: usize) -> (usize, usize) {
    let cols = cols.min(COLUMNS);
    // A multiple of the library's tiles.
    let fitting = SUMS / cols.max(1) / 128 * 128;
    (rows.min(fitting), cols)
}

/// Scratch memory of an FP8 product, `[M, K]` by `[K, N]`.
pub(crate) struct Scratch<'a> {
    /// `[M, K/4]`: a byte per element of the first factor.
    pub codes: ViewMut<'a>,
    /// `[M, 1]`: scales of its rows.
    pub scales: ViewMut<'a>,
    /// Sums of a block of the result, whose shape is [`sums_shape`].
    pub sums: ViewMut<'a>,
    /// The weights along k, for the gradient of an input.
    pub transposed: Option<Transposed<'a>>,
}

/// Weights `[K, N]` the other way round.
pub(crate) struct Transposed<'a> {
    /// `[N, K/4]`: a byte per element.
    pub codes: ViewMut<'a>,
    /// `[1, K]`: scales of the weights' rows.
    pub scales: ViewMut<'a>,
}

/// Codes that the library multiplies by.
struct Codes<'a> {
    /// Address of the first row, whose elements along k lie side by side.
    address: u64,
    /// Bytes from row to row.
    stride: usize,
    /// Scale of the first row, if rows have scales. Those of the others lie `stride` bytes apart.
    scales: Option<BytesView<'a>>,
}

/// Computes `c = a · bᵀ (+ term) (+ bias) (+ residual)`, or `c += a · bᵀ (+ term) (+ bias)`, where `b` is the matrix
/// `w` in [`Format::Fp8`]: `[N, K]`, or with `transposed` `[K, N]`. Sums are f32; a term is rounded to the type of `c`
/// before they are added.
///
/// Scales of rows along k cannot be applied to the sums: those of a transposed matrix multiply the columns of `a`
/// before that is rounded.
pub(crate) fn run(cuda: &Cuda, product: Product, w: BytesView, scratch: Scratch) -> Result<()> {
    product.check();
    let Product { a, term, mut c, accumulate, bias, residual, .. } = product;
    let Scratch { codes, scales, mut sums, transposed } = scratch;
    let (x, (m, n), k) = (a.view(), c.shape(), a.depth());
    let of_columns = transposed.as_ref().map(|transposed| transposed.scales.view());
    let b = match &transposed {
        None => {
            let unit_len = Format::Fp8.unit_len(k);
            Codes { address: w.address(), stride: unit_len, scales: Some(w) }
        }
        Some(Transposed { codes, scales }) => {
            let args = args![w, Format::Fp8.unit_len(n), codes, scales, k as i32, n as i32];
            let [across, down] = [k.div_ceil(TRANSPOSED[0]), n.div_ceil(TRANSPOSED[1])];
            let grid = Grid::with_dims([across, down, 1], THREADS);
            // SAFETY: the operands are those of the kernel, of whole blocks of 16 × 16 codes.
            unsafe { cuda.launch(&SOURCE, "transpose_codes", grid, args)? };
            Codes { address: codes.address(), stride: k, scales: None }
        }
    };
    let args = args![x, x.stride() as i32, of_columns, &codes, &scales, m as i32, k as i32];
    let grid = Grid::new(m.div_ceil(QUANTISED_ROWS), THREADS);
    // SAFETY: the operands are those of the kernel, with a code for each element, a scale for each row and a factor for
    // each column.
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
            let sums = sums.reborrow().row_range(0..rows.len()).col_range(0..cols.len());
            let address = b.address + (col * b.stride) as u64;
            let matmul = Matmul {
                size: [rows.len(), cols.len(), k],
                dtype: FactorType::E4m3,
                a: Factor { address: codes.address(), stride: k, along_depth: true },
                b: Factor { address, stride: b.stride, along_depth: true },
                c: None,
                d: (sums.address(), sums.stride()),
                d_type: DType::F32,
                tf32: false,
            };
            // SAFETY: views vouch for factors and result, whose shapes fit.
            unsafe { cuda.put(Work::Matmul(matmul))? };
            let column_scales = b.scales.map_or(0, |w| w.address() + (col * b.stride + k) as u64);
            let residual = residual.map(|residual| residual.row_range(rows.clone()).col_range(cols.clone()));
            let residual_stride = residual.map_or(0, |residual| residual.stride() as i32);
            let bias = bias.map(|bias| bias.col_range(cols.clone()));
            let c = c.reborrow().row_range(rows.clone()).col_range(cols.clone());
            let (of_sums, of_c) = (sums.stride() as i32, c.stride() as i32);
            let args = args![
                &sums,
                of_sums,
                scales,
                Arg::address(column_scales),
                b.stride,
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
            // scale, if there are any, and a number of the bias for each column.
            unsafe {
                cuda.launch(&SOURCE, by_type!("scale_sums", c.dtype()), elementwise_grid(c.shape()), args)?;
            }
        }
    }
    Ok(())
}
