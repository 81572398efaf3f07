//! Table look-up and its scatter.

use super::driver::Grid;
use super::elements::{Elements, are_aligned};
use super::{Cuda, args, by_type, driver, source};
use crate::ops::ELSEWHERE;
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
/// adds to each element, in the order of tokens.
pub(crate) fn embedding_backward(
    cuda: &Cuda,
    ids: &[u32],
    scale: f32,
    dx: View,
    dtable: ViewMut,
) -> Result<()> {
    /// Threads of a block, as in `embedding.cu`.
    const THREADS: usize = 128;
    let (num_runs, runs) = runs(ids);
    let wide = are_aligned(4, &[dx, dtable.view()]);
    let columns = if wide { 4 * THREADS } else { THREADS };
    let grid = Grid::with_dims([num_runs, dx.cols().div_ceil(columns), 1], THREADS as u32);
    let operands = args![cuda.table(&runs)?, num_runs as i32, scale, dx, dx.stride(), &dtable];
    let args = [operands, args![dtable.stride(), dx.cols(), wide]].concat();
    // SAFETY: the operation has checked that ids are rows of the table; tokens are rows of `dx`.
    unsafe { cuda.launch(&SOURCE, "embedding_backward_f32", grid, &args) }
}

/// Groups the tokens by id, in order. Returns the number of distinct ids, and a table of the
/// groups' offsets, the ids and the tokens.
fn runs(ids: &[u32]) -> (usize, Vec<u32>) {
    let here = ids.iter().enumerate().filter(|(_, id)| **id != ELSEWHERE);
    let mut pairs: Vec<(u32, u32)> = here.map(|(token, &id)| (id, token as u32)).collect();
    // All pairs differ, so the order is unique.
    pairs.sort_unstable();
    let begins = |&i: &usize| i == 0 || pairs[i].0 != pairs[i - 1].0;
    let starts: Vec<usize> = (0..pairs.len()).filter(begins).collect();
    let bounds = starts.iter().copied().chain([pairs.len()]).map(|i| i as u32);
    let of_runs = starts.iter().map(|&i| pairs[i].0);
    (starts.len(), bounds.chain(of_runs).chain(pairs.iter().map(|pair| pair.1)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_one_id_stand_together_in_order() {
        assert_eq!(runs(&[7, 3, ELSEWHERE, 7, 3, 3, 9]), (3, vec![0, 3, 5, 6, 3, 7, 9, 1, 4, 5, 0, 3, 6]));
        assert_eq!(runs(&[ELSEWHERE]), (0, vec![0]));
    }
}
