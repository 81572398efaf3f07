//! The product of large matrices: packed, blocked for the caches, threaded over tiles of the result.
//!
//! For a range of columns of the result, the second factor is packed as a whole (by all threads), so that it is packed
//! once. Then tasks of some rows and columns of the result each pack their part of the first factor, one block of k
//! after another, and run over it tile by tile: a panel of the second factor meets all rows of the task, which stay in
//! the second-level cache.
//!
//! Each element of the result is summed along k in one order within a block, and blocks are added in order. The blocks
//! of k depend on the length of k alone, so nothing else — threads, tasks, where a tile begins — changes the bits.

use std::ops::Range;

use super::Product;
use super::kernel::{Multiply, Out, Tile, multiply};
use super::level::Level;
use super::pack::pack;
use crate::cpu::{Cpu, scratch};
use crate::{DType, bf16};

/// The longest block of k, in lanes. Longer ones than the first-level cache holds a panel of are faster (512 against 256
/// and 176: 3 and 7 % on Emerald Rapids), since the tile fetches the panel ahead and passes over the result are spared.
const BLOCK_LANES: usize = 512;

/// The packed second factor, in lanes: it lies in the last-level cache.
const PACKED_LANES: usize = 1 << 21;

/// The fewest columns that are packed at once, however long k is: each lane of the first factor is packed once for
/// every such range.
const FEWEST_COLUMNS: usize = 256;

/// Panels of the first factor per task, at most.
const TASK_PANELS: usize = 12;

/// Tasks per thread that suffice for an even share.
const TASKS_PER_THREAD: usize = 12;

/// Computes `product` with the instructions of `L`.
pub(super) fn run<L: Level>(cpu: &Cpu, product: &Product) {
    let (m, n) = (product.a.rows(), product.b.rows());
    let lanes = product.a.depth().div_ceil(L::DEPTH);
    let columns = even_part(n, (PACKED_LANES / lanes.max(1)).max(FEWEST_COLUMNS), L::COLUMNS);
    for start in (0..n).step_by(columns) {
        let range = start..n.min(start + columns);
        scratch::with_bytes(columns * lanes * size_of::<f32>(), |packed| {
            let packed = Address(packed.cast::<f32>().as_ptr());
            pack_columns::<L>(cpu, product, lanes, range.clone(), packed);
            let (panels, splits) = task_shape::<L>(m, range.len(), cpu.threads());
            let task_rows = panels * L::ROWS;
            let task_columns = even_part(range.len(), range.len().div_ceil(splits), L::COLUMNS);
            let splits = range.len().div_ceil(task_columns);
            cpu.parallel_for(m.div_ceil(task_rows) * splits, |task| {
                let (rows, columns) = (task / splits * task_rows, task % splits * task_columns);
                let task = Task {
                    product,
                    lanes,
                    rows: rows..m.min(rows + task_rows),
                    first_column: range.start,
                    columns: columns..range.len().min(columns + task_columns),
                    packed,
                };
                scratch::with_bytes(task.buffer_len::<L>() * size_of::<f32>(), |buffer| {
                    // SAFETY: the level was chosen for this processor; tasks are disjoint parts of the result.
                    unsafe { L::run(&task, buffer.cast().as_ptr()) };
                });
            });
        });
    }
}

/// The length of equal parts of `len`, each at most `most` (or `unit`), and a multiple of `unit`.
fn even_part(len: usize, most: usize, unit: usize) -> usize {
    let parts = len.div_ceil((most / unit * unit).max(unit)).max(1);
    len.div_ceil(parts).next_multiple_of(unit)
}

/// Panels of rows per task, and how many tasks share the columns: enough tasks for an even share among threads, by
/// fewer rows first, since more columns per task mean that fewer tasks pack the same rows.
fn task_shape<L: Level>(m: usize, n: usize, threads: usize) -> (usize, usize) {
    let wanted = if threads == 1 { 1 } else { threads * TASKS_PER_THREAD };
    let panels = m.div_ceil(L::ROWS);
    let per_task = (panels / wanted).clamp(2, TASK_PANELS).min(panels);
    let splits = wanted.div_ceil(panels.div_ceil(per_task)).min(n.div_ceil(8 * L::COLUMNS));
    (per_task, splits.max(1))
}

/// Packs columns `columns` of the result's second factor, all lanes.
fn pack_columns<L: Level>(
    cpu: &Cpu,
    product: &Product,
    lanes: usize,
    columns: Range<usize>,
    packed: Address,
) {
    /// Panels per block: side by side they read whole cache lines where columns are neighbours in memory.
    const PANELS: usize = 4;
    /// Lanes per block, so that small factors, too, are packed by several threads.
    const LANES: usize = 128;
    let width = PANELS * L::COLUMNS;
    let (blocks, pieces) = (columns.len().div_ceil(width), lanes.div_ceil(LANES));
    cpu.parallel_for(blocks * pieces, |block| {
        let (block, piece) = (block / pieces, block % pieces);
        let start = columns.start + block * width;
        let rows = start..columns.end.min(start + width);
        let piece = piece * LANES..lanes.min((piece + 1) * LANES);
        // SAFETY: the level was chosen for this processor; the buffer holds `lanes` lanes of all panels, and blocks write
        // disjoint parts of it.
        unsafe {
            let to = packed.get().add(block * width * lanes + piece.start * L::COLUMNS);
            L::pack_columns(&product.b, rows, piece, to, L::COLUMNS * lanes);
        }
    });
}

/// Memory that blocks share.
#[derive(Clone, Copy)]
struct Address(*mut f32);

// SAFETY: blocks write disjoint parts of it, or only read it.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    // A method, so that closures capture the whole, which may be shared, and not the pointer in it.
    fn get(self) -> *mut f32 {
        self.0
    }
}

/// A part of the result.
pub(super) struct Task<'a> {
    product: &'a Product<'a>,
    lanes: usize,
    rows: Range<usize>,
    /// The first packed column.
    first_column: usize,
    /// Columns of this task, counted from the first packed one.
    columns: Range<usize>,
    packed: Address,
}

impl Task<'_> {
    /// Blocks of k, and the lanes of one (the last may have fewer). Of the length of k alone.
    fn blocks(&self) -> (usize, usize) {
        let num_blocks = self.lanes.div_ceil(BLOCK_LANES).max(1);
        (num_blocks, self.lanes.div_ceil(num_blocks))
    }

    /// Numbers that [`Self::run`] needs: a block of the first factor, and the sums of a bf16 result of several blocks.
    fn buffer_len<L: Level>(&self) -> usize {
        let (num_blocks, block) = self.blocks();
        let is_summed_apart = self.product.c.dtype() == DType::Bf16 && num_blocks > 1;
        let sums = if is_summed_apart { self.columns.len() } else { 0 };
        self.rows.len().next_multiple_of(L::ROWS) * (block + sums)
    }

    /// Computes this part of the result.
    ///
    /// # Safety
    /// The caller is compiled for the vector's level and runs where it exists; nobody else writes this part; `buffer`
    /// has room for [`Self::buffer_len`] numbers.
    #[inline(always)]
    pub(super) unsafe fn run<M: Multiply, const MR: usize, const NV: usize, const NR: usize>(
        &self,
        buffer: *mut f32,
    ) {
        let (num_blocks, block) = self.blocks();
        let sums = buffer.wrapping_add(self.rows.len().next_multiple_of(MR) * block);
        for index in 0..num_blocks {
            let lanes = (index * block).min(self.lanes)..self.lanes.min((index + 1) * block);
            let (a, rows) = (&self.product.a, self.rows.clone());
            // SAFETY: the caller's promise.
            unsafe { pack::<M::Vector, MR>(a, M::DEPTH, rows, lanes.clone(), buffer, MR * block) };
            for column in self.columns.clone().step_by(NR) {
                for row in (0..self.rows.len()).step_by(MR) {
                    let tile = self.tile::<MR, NR>(row, column, index == 0, index + 1 == num_blocks, sums);
                    // SAFETY: `column` and `row` are multiples of the panels' widths, so each panel is at its width times
                    // the lanes before it; the tile is inside this task's part.
                    unsafe {
                        let a = buffer.add(row * block);
                        let b = self.packed.get().add(column * self.lanes + lanes.start * NR);
                        multiply::<M, MR, NV>(lanes.len(), a, b, &tile);
                    }
                }
            }
        }
    }

    /// What the tile at `row` (of the task) and `column` (of the packed ones) is added to, and where it goes.
    #[inline(always)]
    fn tile<const MR: usize, const NR: usize>(
        &self,
        row: usize,
        column: usize,
        is_first: bool,
        is_last: bool,
        sums: *mut f32,
    ) -> Tile {
        let (result_row, result_column) = (self.rows.start + row, self.first_column + column);
        let width = self.columns.len();
        let sums = sums.wrapping_add(row * width + column - self.columns.start);
        let c = &self.product.c;
        let offset = result_row * c.stride() + result_column;
        let (out, out_stride) = match c.dtype() {
            DType::F32 => (Out::F32(c.pointer_of::<f32>().wrapping_add(offset)), c.stride()),
            DType::Bf16 if is_last => (Out::Bf16(c.pointer_of::<bf16>().wrapping_add(offset)), c.stride()),
            DType::Bf16 => (Out::F32(sums), width),
        };
        let (add, add_stride) = if is_first {
            self.product.start_at(result_row, result_column)
        } else {
            match out {
                Out::F32(out) => (out.cast_const(), out_stride),
                Out::Bf16(_) => (sums.cast_const(), width),
            }
        };
        let bias = if is_first { self.product.bias_at(result_column) } else { std::ptr::null() };
        Tile {
            rows: MR.min(self.rows.len() - row),
            cols: NR.min(self.columns.end - column),
            add,
            add_stride,
            bias,
            out,
            out_stride,
        }
    }
}
