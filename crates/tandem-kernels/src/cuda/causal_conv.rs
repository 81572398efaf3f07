//! Causal convolution along each text: blocks of threads over tiles of channels and blocks of rows.

use super::driver::Grid;
use super::{Cuda, args, by_type, driver, source};
use crate::batch::runs::{Runs, readers};
use crate::ops::{CausalConv, CausalConvBackward};
use crate::{Result, Tensor, ViewMut};

pub(super) static SOURCE: driver::Source = source!("causal_conv.cu");

/// Threads of a block, and channels of its tile, as in `columns.cuh`.
const THREADS: u32 = 256;
const TILE_COLUMNS: usize = 128;

/// Rows per block.
const ROWS: usize = 64;

/// Rows whose terms of the weights' gradient a block sums; the sums of blocks are then added in
/// order.
pub(crate) const BLOCK_ROWS: usize = 256;

fn grid((rows, cols): (usize, usize), rows_of_block: usize) -> Grid {
    Grid::with_dims([rows.div_ceil(rows_of_block), cols.div_ceil(TILE_COLUMNS), 1], THREADS)
}

pub(crate) fn forward(cuda: &Cuda, call: CausalConv) -> Result<()> {
    let CausalConv { x, w, runs, history, y } = call;
    let width = w.cols();
    let taps = cuda.table(&runs.taps(width))?;
    let history_stride = history.as_ref().map_or(0, ViewMut::stride);
    let [x_stride, y_stride, history_stride] = [x.stride(), y.stride(), history_stride].map(|n| n as i32);
    let [rows, cols, width_arg, block_rows] = [x.rows(), x.cols(), width, ROWS].map(|n| n as i32);
    let name = by_type!("causal_conv", x.dtype());
    let from = history.as_ref();
    let args =
        args![x, x_stride, w, width_arg, taps, from, history_stride, &y, y_stride, rows, cols, block_rows];
    // SAFETY: the operation has checked shapes and types, that the runs cover the rows, and that
    // the history has the slots that they name.
    unsafe { cuda.launch(&SOURCE, name, grid(x.shape(), ROWS), args)? };
    let Some(history) = history.filter(|_| width > 1) else { return Ok(()) };
    let (starts, kept) = kept_runs(runs);
    // The tables are the latest: the first is still there.
    let (starts_at, kept) = (cuda.table(&starts)?, cuda.table(&kept)?);
    let args = args![x, x_stride, width_arg, taps, starts_at, kept, &history, history_stride, rows, cols];
    let grid = Grid::with_dims([starts.len() - 1, x.cols().div_ceil(THREADS as usize), 1], THREADS);
    // SAFETY: as above; the inputs were read earlier in the stream.
    unsafe { cuda.launch(&SOURCE, by_type!("causal_conv_keep", x.dtype()), grid, args) }
}

/// Lists the runs that keep their last inputs as (last row, slot), by the groups that have any, and
/// where each group starts. Within a group the last comes first: it may read the slot that the first
/// overwrites.
fn kept_runs(runs: &Runs) -> (Vec<u32>, Vec<[u32; 2]>) {
    let (mut starts, mut kept) = (vec![0], Vec::new());
    for group in runs.groups() {
        for run in group.iter().rev().map(|&run| &runs.as_slice()[run]) {
            kept.extend(run.keep.map(|slot| [run.rows.end - 1, slot]));
        }
        if kept.len() as u32 > starts[starts.len() - 1] {
            starts.push(kept.len() as u32);
        }
    }
    (starts, kept)
}

/// Computes the gradients. `partial` has a row of `W·C` sums for each [`BLOCK_ROWS`] rows, if `dw` is
/// wanted.
pub(crate) fn backward(cuda: &Cuda, call: CausalConvBackward, partial: Option<Tensor>) -> Result<()> {
    let CausalConvBackward { x, w, runs, dy, dx, dw } = call;
    let width = w.cols();
    let table = runs.taps(width);
    let (starts, readers) = readers(&table, x.rows(), width);
    let [taps, starts, readers] = [cuda.table(&table)?, cuda.table(&starts)?, cuda.table(&readers)?];
    let [x_stride, dy_stride, dx_stride] = [x.stride(), dy.stride(), dx.stride()].map(|n| n as i32);
    let [rows, cols, width_arg, block_rows] = [x.rows(), x.cols(), width, ROWS].map(|n| n as i32);
    let name = by_type!("causal_conv_backward", x.dtype());
    let args = args![dy, dy_stride, w, width_arg, starts, readers, &dx, dx_stride, rows, cols, block_rows];
    // SAFETY: the operation has checked shapes and types, and that the runs cover the rows.
    unsafe { cuda.launch(&SOURCE, name, grid(x.shape(), ROWS), args)? };
    let (Some(dw), Some(mut partial)) = (dw, partial) else { return Ok(()) };
    let blocks = x.rows().div_ceil(BLOCK_ROWS);
    assert!(partial.rows() >= blocks && partial.cols() == x.cols() * width, "room for {blocks} sums");
    let (name, block_rows) = (by_type!("causal_conv_weights", x.dtype()), BLOCK_ROWS as i32);
    let partial = partial.view_mut();
    let args = args![x, x_stride, dy, dy_stride, width_arg, taps, &partial, rows, cols, block_rows];
    // SAFETY: as above; each block has its row of `partial`.
    unsafe { cuda.launch(&SOURCE, name, grid(x.shape(), BLOCK_ROWS), args)? };
    let args = args![&partial, blocks as i32, &dw, dw.stride() as i32, cols, width_arg];
    let grid = Grid::new((x.cols() * width).div_ceil(THREADS as usize), THREADS);
    // SAFETY: as above; the sums come earlier in the stream.
    unsafe { cuda.launch(&SOURCE, "causal_conv_sum", grid, args) }
}
