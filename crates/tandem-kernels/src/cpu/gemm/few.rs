//! GEMM of few rows, as in generation: the second factor is read from memory once, and packed no further
//! than into a cache.
//!
//! The first factor is packed once and stays in the second-level cache. A task packs a block of a panel of
//! columns and multiplies all rows by it. A packed factor is unpacked into the cache by the same task. Blocks
//! and the order of sums are those of [`blocked`](super::blocked), and so are the bits.

use std::ops::Range;

use super::blocked::{Address, Depth};
use super::kernel::{Ahead, CodedPanel, InPlace, Kernel, MOST_COLUMNS, Panels, Place, Tail, tile};
use super::level::Level;
use super::packed::{Part, address, unpack_part};
use super::{Operand, Product, Term};
use crate::cpu::prefetch::LINE;
use crate::cpu::{Cpu, Isa, scratch};
use crate::ops::PackedWeight;
use crate::{DType, View};

/// Most words of the packed first factor. A second-level cache holds it, or most of it; for each panel twice as much of
/// the second factor is read, or more.
const MOST_WORDS: usize = 1 << 18;

/// Fewest rows whose arithmetic takes as long as reading the second factor.
const ARITHMETIC: usize = 8;

/// Most tiles of a [turned](super::turned) kernel, which reads weights once for each.
pub(super) const TURNED_TILES: usize = 2;

/// Rows for each lane that a turned kernel may leave without a row.
const SPARE: usize = 4;

/// Multiply-adds that one thread does sooner than others wake up.
const ALONE: usize = 1 << 18;

/// Tasks per thread, if there are panels enough.
const TASKS: usize = 2;

/// A product of few rows, in panels of `rows` rows.
pub(super) struct Few<'a> {
    product: &'a Product<'a>,
    isa: Isa,
    depth: Depth,
    rows: usize,
    /// The first factor, a panel after another.
    packed: Address,
}

/// Computes `product` if it has few rows, or a packed factor, and returns whether it did.
pub(super) fn run<L: Level>(cpu: &Cpu, product: &Product) -> bool {
    let (m, n) = product.c.shape();
    let depth = Depth::of::<L::Kernel>(product);
    let panels = n.div_ceil(L::Kernel::COLUMNS);
    let rows = height::<L>(product);
    let words = m.next_multiple_of(rows) * depth.length() * L::Kernel::WORDS;
    // With few panels, tasks divide the rows, too. Columns that are neighbours in memory are packed four
    // panels at a time.
    let is_small = m * n * product.a.depth() <= ALONE;
    let is_large = words > MOST_WORDS || (panels < 2 * cpu.threads() && !is_small);
    if product.b.packed().is_none() && (is_large || product.b.is_transposed()) {
        return false;
    }
    scratch::with_bytes(words * size_of::<f32>(), |packed| {
        let few = Few { product, isa: cpu.isa(), depth, rows, packed: Address::new(packed.cast().as_ptr()) };
        few.pack::<L>(cpu);
        let len = few.buffer_len::<L::Kernel>();
        let step = if is_small { panels } else { (panels / (TASKS * cpu.threads())).max(1) };
        cpu.parallel_ranges(panels, step, |_, panels| {
            scratch::with_bytes(len * size_of::<f32>(), |buffer| {
                // SAFETY: the level was chosen for this CPU; tasks are disjoint columns of the result.
                unsafe { L::few_rows(rows, &few, panels, buffer.cast().as_ptr()) };
            });
        });
    });
    true
}

/// Returns the height of panels of the first factor.
fn height<L: Level>(product: &Product) -> usize {
    let m = product.c.rows();
    let turned = L::TURNED.iter().copied().find(|height| {
        let tiles = m.div_ceil(*height);
        tiles <= TURNED_TILES && SPARE * (tiles * height - m) <= m
    });
    // A panel that is packed anyway takes less time with columns as lanes.
    let turned = turned.filter(|_| product.b.packed().is_none());
    // The smallest height that takes as few panels as the largest.
    let even = m.div_ceil(m.div_ceil(L::Kernel::ROWS));
    let least = || L::HEIGHTS.iter().copied().filter(|height| *height >= even).min();
    turned.or_else(least).unwrap_or(L::Kernel::ROWS)
}

impl Few<'_> {
    /// Packs the first factor.
    fn pack<L: Level>(&self, cpu: &Cpu) {
        /// Elements that one thread packs sooner than others wake up.
        const ALONE: usize = 1 << 14;
        let Self { product, depth, rows, packed, .. } = *self;
        let (m, lanes) = (product.a.rows(), depth.lanes(0..depth.blocks));
        let step = if m * lanes.len() <= ALONE { lanes.len() } else { lanes.len().div_ceil(cpu.threads()) };
        let step = step.max(1).next_multiple_of(4 * L::Kernel::GROUP);
        let panel = rows * depth.length() * L::Kernel::WORDS;
        let pack = |source: &Operand, lanes: Range<usize>, lane: usize| {
            let to = packed.get().wrapping_add(lane * rows * L::Kernel::WORDS);
            // SAFETY: the level was chosen for this CPU; the buffer holds the lanes of all panels.
            unsafe {
                L::pack_few(
                    rows,
                    Panels { source, rows: 0..m, lanes, to, stride: panel, is_in_cache: false },
                );
            }
        };
        cpu.parallel_ranges(lanes.len(), step, |_, range| pack(&product.a, range.clone(), range.start));
        if let Some(Term { a, .. }) = &product.term {
            pack(a, 0..depth.length() - lanes.len(), lanes.len());
        }
    }

    /// Returns the words that [`Self::run`] needs: a block of a panel of columns, the sums of a bf16 result of
    /// several blocks, and the block of a packed factor before it is ordered for the kernel.
    fn buffer_len<K: Kernel>(&self) -> usize {
        let unpacked = self.product.b.packed().map_or(0, |weight| {
            K::COLUMNS * self.unpacked_stride::<K>(&weight) * weight.dtype().size() / size_of::<f32>()
        });
        self.ordered_len::<K>() + unpacked
    }

    /// Returns the words of [`Self::buffer_len`] but for the unpacked block.
    fn ordered_len<K: Kernel>(&self) -> usize {
        let is_summed_apart = self.product.c.dtype() == DType::Bf16 && self.depth.blocks > 1;
        let sums = if is_summed_apart { self.product.a.rows() } else { 0 };
        K::COLUMNS * (self.depth.longest() * K::WORDS + sums)
    }

    /// Returns the elements between unpacked rows: whole cache lines, an odd number of them, so that rows share
    /// no places of the cache.
    fn unpacked_stride<K: Kernel>(&self, weight: &PackedWeight) -> usize {
        let size = weight.dtype().size();
        let lines = (self.depth.longest() * K::DEPTH * size).div_ceil(LINE);
        (lines | 1) * LINE / size
    }

    /// Computes panels of columns.
    ///
    /// # Safety
    /// The caller is compiled for the kernel's level and runs where it exists; panels of the first factor
    /// have the kernel's rows; no other task writes these columns; `buffer` has room for
    /// [`Self::buffer_len`] words.
    #[inline(always)]
    pub(super) unsafe fn run<K: Kernel>(&self, panels: Range<usize>, buffer: *mut f32) {
        let Self { product, depth, .. } = *self;
        let (m, n) = product.c.shape();
        let sums = buffer.wrapping_add(K::COLUMNS * depth.longest() * K::WORDS);
        let weight = product.b.packed();
        let unpacked = buffer.wrapping_add(self.ordered_len::<K>());
        let tiles = m.div_ceil(K::ROWS);
        // Few rows leave no time to prefetch while they are multiplied.
        let is_in_cache = m >= ARITHMETIC;
        // SAFETY: the caller's promise.
        let mut pending = unsafe { K::begin() };
        for panel in panels {
            let column = panel * K::COLUMNS;
            let columns = column..n.min(column + K::COLUMNS);
            for index in 0..depth.blocks {
                let (lanes, tail) = (depth.lanes(index..index + 1), depth.tail(&(index..index + 1)));
                let count = lanes.len();
                let next = if index + 1 < depth.blocks { (panel, index + 1) } else { (panel + 1, 0) };
                let tile_of = |row: usize| {
                    let (is_first, is_last) = (index == 0, index + 1 == depth.blocks);
                    let (rows, sums) = (K::ROWS.min(m - row), sums.wrapping_add(row * K::COLUMNS));
                    let (columns, sums_stride) = (columns.len(), K::COLUMNS);
                    tile(product, &Place { row, rows, column, columns, is_first, is_last, sums, sums_stride })
                };
                let rows_from = |row: usize| {
                    let words = (row * depth.length() + lanes.start * K::ROWS) * K::WORDS;
                    self.packed.get().wrapping_add(words)
                };
                let panel_of = |source, lanes, to| {
                    let rows = columns.clone();
                    Panels { source, rows, lanes, to, stride: 0, is_in_cache }
                };
                let tail = Tail { lanes: tail, columns: buffer.wrapping_add(count * K::COLUMNS * K::WORDS) };
                // SAFETY: the caller's promise.
                unsafe {
                    if let Some(Term { b, .. }) = product.term.as_ref().filter(|_| tail.lanes > 0) {
                        K::pack_columns(panel_of(b, 0..tail.lanes, tail.columns.cast_mut()));
                    }
                    match &weight {
                        Some(weight) => self.order::<K>(weight, (panel, index), next, buffer, unpacked),
                        None => {
                            let panel = panel_of(&product.b, lanes.clone(), buffer);
                            let (row, lane) = (next.0 * K::COLUMNS, depth.lanes(next.1..depth.blocks).start);
                            let ahead = product.b.address(row, lane * K::DEPTH);
                            let columns = InPlace { panel, tail, ahead };
                            // Loops, for a closure would be compiled without the level's instructions.
                            let mut done = 0;
                            while done < m
                                && tiles <= K::TILES_IN_PLACE
                                && K::multiply_in_place(&columns, rows_from(done), &tile_of(done))
                            {
                                done += K::ROWS;
                            }
                            if done >= m {
                                continue;
                            }
                            K::pack_columns(columns.panel);
                        }
                    }
                    for (number, row) in (0..m).step_by(K::ROWS).enumerate() {
                        let ahead = self.ahead::<K>(next, number, tiles);
                        let lanes = count + tail.lanes;
                        K::multiply(lanes, rows_from(row), buffer, &tile_of(row), ahead, &mut pending);
                    }
                }
            }
        }
        // SAFETY: as above.
        unsafe { K::end(pending) };
    }

    /// Orders a block of a panel of a packed factor for the kernel, and prefetches the next: what can be, straight
    /// from its codes.
    ///
    /// # Safety
    /// As [`Self::run`]; `to` has room for the block, and `unpacked` for [`Self::unpacked_stride`] elements of
    /// each column.
    #[inline(always)]
    unsafe fn order<K: Kernel>(
        &self,
        weight: &PackedWeight,
        at: (usize, usize),
        next: (usize, usize),
        to: *mut f32,
        unpacked: *mut f32,
    ) {
        let part = |(panel, block): (usize, usize)| {
            let lanes = self.depth.lanes(block..block + 1);
            let end = weight.rows().min((panel + 1) * K::COLUMNS);
            let rows = end.min(panel * K::COLUMNS)..end;
            Part { rows, elements: lanes.start * K::DEPTH..weight.cols().min(lanes.end * K::DEPTH) }
        };
        let (Part { rows, elements }, next) = (part(at), part(next));
        let body = K::packed_body(weight, &elements);
        let pieces = [elements.start..body.start, body.clone(), body.end..elements.end];
        for (index, piece) in pieces.into_iter().enumerate().filter(|(_, piece)| !piece.is_empty()) {
            let (lane, part) =
                ((piece.start - elements.start) / K::DEPTH, Part { rows: rows.clone(), elements: piece });
            let to = to.wrapping_add(lane * K::COLUMNS * K::WORDS);
            // SAFETY: the caller's promise.
            unsafe {
                if index == 1 {
                    let first = next.elements.start + (body.start - elements.start);
                    let mut ahead = [std::ptr::null(); MOST_COLUMNS];
                    for (ahead, place) in ahead.iter_mut().zip(weight.places(next.rows.clone())) {
                        *ahead = address(weight.format(), &place, first);
                    }
                    K::pack_codes(&CodedPanel { weight, part: &part, ahead: &ahead, to });
                    continue;
                }
                let (stride, count) = (self.unpacked_stride::<K>(weight), part.elements.len());
                unpack_part(self.isa, weight, &part, unpacked.cast(), stride);
                let view =
                    View::from_pointer(unpacked.cast_const().cast(), rows.len(), stride, weight.dtype());
                let source = &Operand::rows_of(view.col_range(0..count));
                let lanes = 0..count.div_ceil(K::DEPTH).next_multiple_of(K::GROUP);
                K::pack_columns(Panels {
                    source,
                    rows: 0..rows.len(),
                    lanes,
                    to,
                    stride: 0,
                    is_in_cache: true,
                });
            }
        }
    }

    /// Returns what tile `number` of `tiles` prefetches of the next panel and block: the first two share it.
    #[inline(always)]
    fn ahead<K: Kernel>(&self, (panel, block): (usize, usize), number: usize, tiles: usize) -> Ahead {
        let (m, b) = (self.product.a.rows(), &self.product.b);
        if b.packed().is_some() {
            return Ahead::NOTHING;
        }
        let share = K::COLUMNS.div_ceil(tiles.min(2));
        let first = panel * K::COLUMNS + number * share;
        let end = b.rows().min((panel + 1) * K::COLUMNS).min(first + share);
        if m < ARITHMETIC || number >= 2 || first >= end {
            return Ahead::NOTHING;
        }
        let (size, lanes) = (b.dtype().size(), self.depth.lanes(block..block + 1));
        let (start, stop) = (lanes.start * K::DEPTH, b.depth().min(lanes.end * K::DEPTH));
        Ahead {
            first: b.address(first, start),
            stride: b.stride() * size,
            rows: end - first,
            length: (stop - start) * size,
        }
    }
}
