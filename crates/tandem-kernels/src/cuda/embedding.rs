//! Table look-up and its scatter.

use super::driver::Grid;
use super::elements::{Elements, are_aligned};
use super::{Cuda, args, by_type, driver, source};
use crate::ops::tokens_by_id;
use crate::{Result, View, ViewMut};

pub(super) static SOURCE: driver::Source = source!("embedding.cu");

pub(crate) fn embedding(
    cuda: &Cuda,
    table: View,
    ids: &[u32],
    scale: f32,
    x: ViewMut,
    accumulate: bool,
) -> Result<()> {
    let way = Elements::by_rows(x.rows(), x.cols(), &[table, x.view()]);
    let (name, ids) = (by_type!("embedding", table.dtype()), cuda.table(ids)?);
    let operands = args![table, table.stride(), ids, scale, &x, x.stride(), accumulate];
    let args = [operands, args![way.rows, way.cols, way.wide]].concat();
    // SAFETY: there are as many ids as rows; the operation has checked that each is a row of the
    // table, or none.
    unsafe { cuda.launch(&SOURCE, name, way.grid(), &args) }
}

/// Adds the gradient of the table. One block per distinct id and range of columns, so one thread
/// adds to each element, in the order of tokens. With a `limit` the gradient is added in fixed point, and a
/// term that is not below it sets the device's flag.
pub(crate) fn embedding_backward(
    cuda: &Cuda,
    ids: &[u32],
    scale: f32,
    dx: View,
    dtable: ViewMut,
    limit: Option<f32>,
) -> Result<()> {
    /// Threads of a block, as in `embedding.cu`.
    const THREADS: usize = 128;
    let (num_runs, runs) = tokens_by_id(ids);
    let wide = are_aligned(4, &[dx, dtable.view()]);
    let columns = if wide { 4 * THREADS } else { THREADS };
    let grid = Grid::with_dims([num_runs, dx.cols().div_ceil(columns), 1], THREADS as u32);
    let operands = args![cuda.table(&runs)?, num_runs as i32, scale, dx, dx.stride(), &dtable];
    let args = [operands, args![dtable.stride(), dx.cols(), wide]].concat();
    // SAFETY: the operation has checked that ids are rows of the table; tokens are rows of `dx`. The word is
    // the device's own.
    unsafe {
        match limit {
            None => cuda.launch(&SOURCE, "embedding_backward_f32", grid, &args),
            Some(limit) => {
                let args = [&args[..], args![limit, cuda.out_of_range()]].concat();
                cuda.launch(&SOURCE, "embedding_backward_exact", grid, &args)
            }
        }
    }
}
