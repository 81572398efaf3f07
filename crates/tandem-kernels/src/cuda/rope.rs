//! Rotary position embedding.

use super::driver::Grid;
use super::elements::are_aligned;
use super::{Cuda, args, by_type, driver, source};
use crate::ops::{RopePairs, RopeTable};
use crate::{DType, Result, ViewMut};

pub(super) static SOURCE: driver::Source = source!("rope.cu");

/// Threads of a block, as in `rope.cu`.
const THREADS: u32 = 256;

pub(crate) fn rope(
    cuda: &Cuda,
    x: ViewMut,
    head_dim: usize,
    table_rows: &[u32],
    table: &RopeTable,
    inverse: bool,
) -> Result<()> {
    let (rows, heads, half) = (x.rows(), x.cols() / head_dim, table.rotary() / 2);
    let Some(&last) = table_rows.iter().max().filter(|_| heads * half > 0) else { return Ok(()) };
    let at_once = if x.dtype() == DType::Bf16 { 8 } else { 4 };
    let parts = [head_dim, half].iter().all(|n| n.is_multiple_of(at_once));
    let halves = table.pairs() == RopePairs::Halves;
    let wide = halves && parts && are_aligned(at_once, &[x.view()]);
    // From one pair to the next, and from a pair's first element to its second.
    let (step, gap) = if halves { (1i32, half as i32) } else { (2, 1) };
    // Heads per thread, and vectors per head.
    let (heads_at_once, vectors) = if wide { (16 / at_once, half / at_once) } else { (4, half) };
    let threads = rows * heads.div_ceil(heads_at_once) * vectors;
    let (angles, num_rows) = angles(cuda, table, last as usize)?;
    let table_rows = cuda.table(table_rows)?;
    let operands = args![&x, x.stride(), table_rows, angles, num_rows, rows];
    let sign = if inverse { -1.0f32 } else { 1.0 };
    let shape = args![heads as i32, head_dim as i32, half as i32, step, gap, sign, wide];
    let grid = Grid::new(threads.div_ceil(THREADS as usize), THREADS);
    let name = by_type!("rope", x.dtype());
    // SAFETY: the operation has checked that heads are as wide as the view, and rows in the table;
    // it has as many rows as the last of them needs.
    unsafe { cuda.launch(&SOURCE, name, grid, &[operands, shape].concat()) }
}

/// Returns the device address of a table of cosines, then as many sines, and its number of rows.
///
/// A table covers a model's longest context, too long to compare or send at each use. It never
/// changes, so its name identifies it. It is sent up to the next power of two of the needed
/// rows: few lengths occur.
fn angles(cuda: &Cuda, table: &RopeTable, last: usize) -> Result<(u64, usize)> {
    let rows = (last + 1).next_power_of_two().min(table.rows());
    let len = rows * (table.rotary() / 2);
    let angles = || [&table.cos()[..len], &table.sin()[..len]].concat();
    Ok((cuda.named_table((table.name(), rows), angles)?, rows))
}
