//! GEMM of large matrices: packed, blocked for the caches, threaded over tiles of the result.
//!
//! For a range of columns and a block of k, all threads pack the second factor, once, into or near
//! the second-level cache. Each task of some rows and columns then packs its part of the first
//! factor and runs over it tile by tile: a panel of the second factor meets all rows of the task.
//!
//! An element is summed along k in one order within a block, and blocks are added in order. The
//! blocks of k depend on the length of k alone, so threads, tasks and tile positions never change
//! the bits. A second pair of factors is packed behind the last block and summed with it, so the
//! result is written once.

use std::ops::Range;

use super::kernel::{Ahead, Kernel, Panels, Place, tile};
use super::level::Level;
use super::{Product, Term};
use crate::DType;
use crate::cpu::{Cpu, scratch};
use crate::numerics::format::NF4_BLOCK;

/// Words of the second factor packed at once, for the last-level cache.
const PACKED_WORDS: usize = 1 << 21;

/// Words of the first factor that a task packs for a block of k, for the second-level cache.
const BLOCK_WORDS: usize = 1 << 17;

/// Fewest columns packed at once, however long k is: each lane of the first factor is packed once
/// per such range.
const FEWEST_COLUMNS: usize = 256;

/// Computes `product` with the instructions of `L`.
pub(super) fn run<L: Level>(cpu: &Cpu, product: &Product) {
    let depth = Depth::of::<L::Kernel>(product);
    // Blocks pass over an f32 result one by one, which holds their sums. A bf16 result is summed by
    // the task, which then needs all blocks.
    let step = if product.c.dtype() == DType::F32 { 1 } else { depth.blocks };
    let words = (depth.lanes(0..step).len() + depth.tail) * L::Kernel::WORDS;
    let most = (PACKED_WORDS / words.max(1)).max(FEWEST_COLUMNS);
    let n = product.b.rows();
    let width = even_part(n, most, L::Kernel::COLUMNS);
    scratch::with_bytes(width * words * size_of::<f32>(), |packed| {
        for start in (0..n).step_by(width) {
            for first in (0..depth.blocks).step_by(step) {
                let part = Part {
                    product,
                    depth,
                    blocks: first..first + step,
                    columns: start..n.min(start + width),
                    packed: Address::new(packed.cast().as_ptr()),
                };
                part.pack::<L>(cpu);
                part.multiply::<L>(cpu);
            }
        }
    });
}

/// The lanes along k in blocks of equal length (the last is shorter, where they do not divide k), a function of the
/// lengths along k alone.
#[derive(Clone, Copy)]
pub(super) struct Depth {
    lanes: usize,
    pub(super) blocks: usize,
    /// Lanes of a block.
    block: usize,
    /// Lanes of the second pair of factors, behind those of the last block.
    tail: usize,
}

impl Depth {
    /// Divides the lengths along k of a product.
    pub(super) fn of<K: Kernel>(product: &Product) -> Self {
        Self::new::<K>(product.a.depth(), product.term.map_or(0, |term| term.depth()))
    }

    /// Divides `elements` elements along k, and `tail` of the second pair.
    pub(super) fn new<K: Kernel>(elements: usize, tail: usize) -> Self {
        let lanes = |elements: usize| elements.div_ceil(K::DEPTH).next_multiple_of(K::GROUP);
        let (lanes, tail) = (lanes(elements), lanes(tail));
        let blocks = if lanes <= K::WHOLE { 1 } else { lanes.div_ceil(K::BLOCK) };
        // Blocks of quantised weights begin with those of k, and so do lines of memory.
        let unit = if blocks == 1 { K::GROUP } else { NF4_BLOCK / K::DEPTH };
        Self { lanes, blocks, block: lanes.div_ceil(blocks).next_multiple_of(unit), tail }
    }

    /// Divides k as [`Depth::new`], into ranges of elements that are one block each.
    pub(super) fn pieces<K: Kernel>(elements: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let depth = Self::new::<K>(elements.len(), 0);
        (0..depth.blocks).map(move |block| {
            let lanes = depth.lanes(block..block + 1);
            let at = |lane: usize| elements.end.min(elements.start + lane * K::DEPTH);
            at(lanes.start)..at(lanes.end)
        })
    }

    pub(super) fn lanes(&self, blocks: Range<usize>) -> Range<usize> {
        (blocks.start * self.block).min(self.lanes)..(blocks.end * self.block).min(self.lanes)
    }

    /// Returns the lanes of both pairs.
    pub(super) fn length(&self) -> usize {
        self.lanes + self.tail
    }

    /// Returns the most lanes of a block.
    pub(super) fn longest(&self) -> usize {
        self.block + self.tail
    }

    /// Returns the lanes of the second pair that are packed with these blocks.
    pub(super) fn tail(&self, blocks: &Range<usize>) -> usize {
        if blocks.end == self.blocks { self.tail } else { 0 }
    }
}

/// Returns the length of equal parts of `len`: at most `most` (or `unit`), and a multiple of
/// `unit`.
fn even_part(len: usize, most: usize, unit: usize) -> usize {
    let parts = len.div_ceil((most / unit * unit).max(unit)).max(1);
    len.div_ceil(parts).next_multiple_of(unit)
}

/// Memory that blocks share.
#[derive(Clone, Copy)]
pub(super) struct Address(*mut f32);

// SAFETY: blocks write disjoint parts of it, or only read it.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    pub(super) fn new(address: *mut f32) -> Self {
        Self(address)
    }

    // A method, so that closures capture the shareable struct and not the pointer in it.
    pub(super) fn get(self) -> *mut f32 {
        self.0
    }
}

/// Columns of the result and blocks of k for which the second factor is packed together.
struct Part<'a> {
    product: &'a Product<'a>,
    depth: Depth,
    blocks: Range<usize>,
    columns: Range<usize>,
    packed: Address,
}

impl Part<'_> {
    /// Returns the packed lanes, without those of the second pair.
    fn lanes(&self) -> Range<usize> {
        self.depth.lanes(self.blocks.clone())
    }

    /// Returns the lanes of a packed panel.
    fn length(&self) -> usize {
        self.lanes().len() + self.depth.tail(&self.blocks)
    }

    /// Packs the second factor.
    fn pack<L: Level>(&self, cpu: &Cpu) {
        /// Panels per block: side by side they read whole cache lines where columns are neighbours
        /// in memory.
        const PANELS: usize = 4;
        /// Lanes per block, so that small factors, too, are packed by several threads.
        const LANES: usize = 128;
        let panel = L::Kernel::COLUMNS;
        let (lanes, columns, width) = (self.lanes(), &self.columns, PANELS * panel);
        // The lanes of the second pair are one more piece.
        let term = self.product.term.filter(|_| self.depth.tail(&self.blocks) > 0);
        let whole = lanes.len().div_ceil(LANES);
        let (blocks, pieces) = (columns.len().div_ceil(width), whole + usize::from(term.is_some()));
        let length = self.length();
        cpu.parallel_for(blocks * pieces, |block| {
            let (column, piece) = (block / pieces * width, block % pieces);
            let rows = columns.start + column..columns.end.min(columns.start + column + width);
            let (source, lane, lanes) = match &term {
                Some(term) if piece == whole => (&term.b, lanes.len(), 0..self.depth.tail),
                _ => {
                    let start = lanes.start + piece * LANES;
                    (&self.product.b, piece * LANES, start..lanes.end.min(start + LANES))
                }
            };
            // SAFETY: the level was chosen for this CPU; the buffer holds the lanes of all panels,
            // and blocks write disjoint parts of it.
            unsafe {
                let to = self.packed.get().add((column * length + lane * panel) * L::Kernel::WORDS);
                let stride = panel * length * L::Kernel::WORDS;
                L::pack_columns(Panels { source, rows, lanes, to, stride, is_in_cache: false });
            }
        });
    }

    /// Computes these columns of the result, or adds to them.
    fn multiply<L: Level>(&self, cpu: &Cpu) {
        let m = self.product.a.rows();
        let (height, width) = (L::Kernel::ROWS, L::Kernel::COLUMNS);
        let (panels, columns) = (m.div_ceil(height), self.columns.len().div_ceil(width));
        // Panels of rows whose block of k stays in the second-level cache beside streamed data.
        let most = (BLOCK_WORDS / (height * self.depth.block * L::Kernel::WORDS).max(1)).max(2);
        let deal = WorkQueue { panels, columns, most, threads: cpu.threads() };
        cpu.parallel_for(deal.map(|hand| deal.tasks(hand)).sum(), |task| {
            let (panels, columns) = deal.task(task);
            let task = Task {
                part: self,
                rows: panels.start * height..m.min(panels.end * height),
                columns: columns.start * width..self.columns.len().min(columns.end * width),
            };
            scratch::with_bytes(task.buffer_len::<L::Kernel>() * size_of::<f32>(), |buffer| {
                // SAFETY: the level was chosen for this CPU; tasks are disjoint parts of the
                // result.
                unsafe { L::run(&task, buffer.cast().as_ptr()) };
            });
        });
    }
}

/// Distribution of tiles to threads: large tasks first, since a panel of the second factor then
/// meets many rows, and smaller ones towards the end, to balance the threads.
#[derive(Clone, Copy)]
struct WorkQueue {
    /// Panels of rows not yet distributed.
    panels: usize,
    /// Panels of columns.
    columns: usize,
    /// Most panels of rows per task.
    most: usize,
    threads: usize,
}

/// Consecutive panels of rows, distributed with this many panels of columns per task (the last may
/// have fewer).
#[derive(Clone, Copy)]
struct WorkItem {
    panels: usize,
    columns: usize,
}

impl Iterator for WorkQueue {
    type Item = WorkItem;

    fn next(&mut self) -> Option<WorkItem> {
        /// Fewest panels of rows per task: fewer would fetch a panel of columns for too little
        /// work.
        const PANELS: usize = 2;
        /// Fewest tiles per task.
        const TILES: usize = 16;
        /// Fewest panels of columns per task: every task packs its rows.
        const COLUMNS: usize = 4;
        if self.panels == 0 {
            return None;
        }
        let left = self.panels * self.columns;
        // Half of an even share of the rest.
        let tiles = if self.threads == 1 { left } else { (left / (2 * self.threads)).max(TILES) };
        let panels = (tiles / self.columns).clamp(PANELS, self.most).min(self.panels);
        let splits = (panels * self.columns / tiles).clamp(1, self.columns.div_ceil(COLUMNS));
        self.panels -= panels;
        Some(WorkItem { panels, columns: self.columns.div_ceil(splits) })
    }
}

impl WorkQueue {
    fn tasks(&self, hand: WorkItem) -> usize {
        self.columns.div_ceil(hand.columns)
    }

    /// Returns the panels of rows and of columns of a task.
    fn task(self, number: usize) -> (Range<usize>, Range<usize>) {
        let (mut first, mut row) = (0, 0);
        for hand in self {
            let next = first + self.tasks(hand);
            if number < next {
                let column = (number - first) * hand.columns;
                return (row..row + hand.panels, column..self.columns.min(column + hand.columns));
            }
            (first, row) = (next, row + hand.panels);
        }
        unreachable!("the hands' tasks add up to the number of tasks")
    }
}

/// A task's rows and columns of a part.
pub(super) struct Task<'a> {
    part: &'a Part<'a>,
    rows: Range<usize>,
    /// Counted from the part's first column.
    columns: Range<usize>,
}

impl Task<'_> {
    /// Returns the words that [`Self::run`] needs: a block of the first factor, and the sums of a
    /// bf16 result of several blocks.
    fn buffer_len<K: Kernel>(&self) -> usize {
        let depth = &self.part.depth;
        let is_summed_apart = self.part.product.c.dtype() == DType::Bf16 && depth.blocks > 1;
        let sums = if is_summed_apart { self.columns.len() } else { 0 };
        self.rows.len().next_multiple_of(K::ROWS) * (depth.longest() * K::WORDS + sums)
    }

    /// Computes this task's elements of the result.
    ///
    /// # Safety
    /// The caller is compiled for the kernel's level and runs where it exists; no other task writes
    /// these elements; `buffer` has room for [`Self::buffer_len`] words.
    #[inline(always)]
    pub(super) unsafe fn run<K: Kernel>(&self, buffer: *mut f32) {
        let Part { product, depth, ref blocks, packed, .. } = *self.part;
        let (all, panel) = (self.part.lanes(), self.part.length());
        // Words of a row in the packed block.
        let length = depth.longest() * K::WORDS;
        let sums = buffer.wrapping_add(self.rows.len().next_multiple_of(K::ROWS) * length);
        // SAFETY: the caller's promise.
        let mut pending = unsafe { K::begin() };
        for index in blocks.clone() {
            let lanes = depth.lanes(index..index + 1);
            let tail = depth.tail(&(index..index + 1));
            // SAFETY: the caller's promise.
            unsafe {
                let (rows, lanes, stride) = (self.rows.clone(), lanes.clone(), K::ROWS * length);
                let tail_to = buffer.add(lanes.len() * K::ROWS * K::WORDS);
                let panels = |source, lanes, to| Panels {
                    source,
                    rows: rows.clone(),
                    lanes,
                    to,
                    stride,
                    is_in_cache: false,
                };
                K::pack_rows(panels(&product.a, lanes, buffer));
                if let Some(Term { a, .. }) = product.term.as_ref().filter(|_| tail > 0) {
                    K::pack_rows(panels(a, 0..tail, tail_to));
                }
            }
            for column in self.columns.clone().step_by(K::COLUMNS) {
                for row in (0..self.rows.len()).step_by(K::ROWS) {
                    let width = self.columns.len();
                    let tile = tile(
                        product,
                        &Place {
                            row: self.rows.start + row,
                            rows: K::ROWS.min(self.rows.len() - row),
                            column: self.part.columns.start + column,
                            columns: K::COLUMNS.min(self.columns.end - column),
                            is_first: index == 0,
                            is_last: index + 1 == depth.blocks,
                            sums: sums.wrapping_add(row * width + column - self.columns.start),
                            sums_stride: width,
                        },
                    );
                    // SAFETY: `column` and `row` are multiples of the panels' widths, so each panel
                    // is at its width times the words before it; the tile is among this task's
                    // elements.
                    unsafe {
                        let a = buffer.add(row * length);
                        let before = column * panel + (lanes.start - all.start) * K::COLUMNS;
                        let b = packed.get().add(before * K::WORDS);
                        K::multiply(lanes.len() + tail, a, b, &tile, Ahead::NOTHING, &mut pending);
                    }
                }
            }
        }
        // SAFETY: as above.
        unsafe { K::end(pending) };
    }
}
