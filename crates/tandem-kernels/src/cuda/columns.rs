//! Column sums, dot products and factors: blocks of threads over tiles of columns and blocks of
//! rows.

use super::driver::{Arg, Grid};
use super::{Cuda, args, by_type, driver, source};
use crate::{DType, Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("columns.cu");

/// Threads of a block, and columns of its tile, as in `columns.cuh`.
const THREADS: u32 = 256;
const TILE_COLUMNS: usize = 128;

/// Rows per block of element-wise kernels, as in `columns.cu` and `gemm.cu`.
const ROWS: usize = 64;

/// Rows summed at once. More rows give partial sums, which are summed in order.
pub(crate) const BLOCK_ROWS: usize = 128;

/// Returns a grid with one block per tile of columns and block of rows.
fn grid((rows, cols): (usize, usize), rows_of_block: usize) -> Grid {
    Grid::with_dims([rows.div_ceil(rows_of_block), cols.div_ceil(TILE_COLUMNS), 1], THREADS)
}

/// Returns the grid of an element-wise kernel.
pub(super) fn elementwise_grid(shape: (usize, usize)) -> Grid {
    grid(shape, ROWS)
}

pub(crate) fn scale_columns(
    cuda: &Cuda,
    x: Option<View>,
    factors: View,
    bias: Option<View>,
    y: ViewMut,
) -> Result<()> {
    let x = x.unwrap_or_else(|| y.view());
    let name = by_type!("scale_columns", x.dtype(), y.dtype());
    let [x_stride, y_stride, rows, cols] = [x.stride(), y.stride(), y.rows(), y.cols()].map(|n| n as i32);
    let args = args![x, x_stride, factors, bias, &y, y_stride, rows, cols];
    // SAFETY: the operands are those of the kernel, of the shapes that the operation has checked.
    unsafe { cuda.launch(&SOURCE, name, elementwise_grid(y.shape()), args) }
}

/// Computes `out += Σ_t x[t]`. `partial` has one row per block of rows, if there are several.
pub(crate) fn column_sums(cuda: &Cuda, x: View, out: ViewMut, partial: Option<ViewMut>) -> Result<()> {
    let name = by_type!("column_sums", x.dtype());
    sum(cuda, name, &[x], &out, true, partial)
}

/// Computes `out = Σ_t a[t] ⊙ b[t]`, or `+=` if `add`. `partial` as in [`column_sums`].
pub(crate) fn column_dots(
    cuda: &Cuda,
    a: View,
    b: View,
    out: ViewMut,
    add: bool,
    partial: Option<ViewMut>,
) -> Result<()> {
    let name = by_type!("column_dots", a.dtype(), b.dtype());
    sum(cuda, name, &[a, b], &out, add, partial)
}

/// Sums a kernel's results over the rows of one or two matrices.
fn sum(
    cuda: &Cuda,
    name: &'static str,
    of: &[View],
    out: &ViewMut,
    add: bool,
    partial: Option<ViewMut>,
) -> Result<()> {
    let (rows, cols) = of[0].shape();
    let blocks = rows.div_ceil(BLOCK_ROWS);
    let partial = partial.filter(|_| blocks > 1);
    let (to, adds) = partial.as_ref().map_or((out, add), |partial| (partial, false));
    assert!(to.dtype() == DType::F32 && to.rows() >= blocks && to.cols() >= cols, "room for {blocks} sums");
    let mut args: Vec<Arg> = of.iter().flat_map(|x| [Arg::from(x), Arg::from(x.stride() as i32)]).collect();
    let [rows_arg, cols_arg, of_block, stride] = [rows, cols, BLOCK_ROWS, to.stride()].map(|n| n as i32);
    args.extend_from_slice(args![rows_arg, cols_arg, of_block, to, stride, adds]);
    // The sum of no rows is 0.
    let shape = (rows.max(1), cols);
    // SAFETY: the operands are those of the kernel, of the shapes that the operation has checked; a
    // row for each block is there.
    unsafe { cuda.launch(&SOURCE, name, grid(shape, BLOCK_ROWS), &args)? };
    let Some(partial) = partial else { return Ok(()) };
    let [blocks_arg, from_stride, stride] = [blocks, partial.stride(), out.stride()].map(|n| n as i32);
    let args = args![&partial, from_stride, blocks_arg, cols_arg, blocks_arg, out, stride, add];
    // SAFETY: as above; the sums of blocks come earlier in the stream.
    unsafe { cuda.launch(&SOURCE, "column_sums_f32", grid((blocks, cols), blocks), args) }
}
