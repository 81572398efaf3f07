//! The micro-kernel: one tile of the result, held in registers.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::lanes::Lanes;
use super::outlined::Outlined;
use super::packed::Part;
use super::{Operand, Product, codes, in_place};
use crate::cpu::prefetch::{LINE, prefetch, prefetch_far};
use crate::cpu::vector::Vector;
use crate::ops::PackedWeight;
use crate::ops::gemm::Addends;
use crate::{DType, Element, bf16};

/// Panels to pack: a part of a factor, and its destination.
pub(super) struct Panels<'a> {
    pub source: &'a Operand<'a>,
    pub rows: Range<usize>,
    pub lanes: Range<usize>,
    pub to: *mut f32,
    /// Distance between panels, in words.
    pub stride: usize,
    /// Whether the source is in a cache; else it is prefetched.
    pub is_in_cache: bool,
}

/// A part of a packed factor to pack as a panel, and its destination.
pub(super) struct CodedPanel<'a> {
    pub weight: &'a PackedWeight<'a>,
    pub part: &'a Part,
    /// Addresses to prefetch, one for each row.
    pub ahead: &'a [*const u8; MOST_COLUMNS],
    pub to: *mut f32,
}

/// Lanes of a panel of the second factor that are packed, behind others that are not.
#[derive(Clone, Copy)]
pub(super) struct Tail {
    pub lanes: usize,
    pub columns: *const f32,
}

/// A panel of the second factor that is not packed but for its tail.
pub(super) struct InPlace<'a> {
    pub panel: Panels<'a>,
    pub tail: Tail,
    /// As many rows to prefetch meanwhile.
    pub ahead: *const u8,
}

/// Rows along k where they lie.
#[derive(Clone, Copy)]
pub(super) struct Lines {
    pub first: *const u8,
    /// Bytes between rows.
    pub stride: usize,
    /// Elements of a row.
    pub elements: usize,
    /// Bytes from an element to what is prefetched with it.
    pub ahead: usize,
}

impl InPlace<'_> {
    /// Returns the rows, of lanes of `depth` elements, if they run along k and are `width`.
    #[inline(always)]
    pub(super) fn lines(&self, width: usize, depth: usize) -> Option<Lines> {
        let (source, elements) = (self.panel.source, self.panel.elements(depth));
        if source.is_transposed() || self.panel.rows.len() != width {
            return None;
        }
        let first = source.address(self.panel.rows.start, elements.start);
        let stride = source.stride() * source.dtype().size();
        let ahead = self.ahead.addr().wrapping_sub(first.addr());
        Some(Lines { first, stride, elements: elements.len(), ahead })
    }
}

impl Panels<'_> {
    /// Returns the elements along k of the lanes, of `depth` elements each.
    pub(super) fn elements(&self, depth: usize) -> Range<usize> {
        self.lanes.start * depth..self.source.depth().min(self.lanes.end * depth)
    }
}

/// Packing of factors and computation of a tile. Functions are inlined into the code of a level.
pub(super) trait Kernel {
    const ROWS: usize;
    const COLUMNS: usize;
    const DEPTH: usize;
    const WORDS: usize;
    /// Blocks of k are a multiple of this number of lanes; missing lanes at the end of k are packed
    /// as zeros.
    const GROUP: usize;
    /// Longest block of k, in lanes, if there are several.
    const BLOCK: usize;
    /// Longest k that is one block.
    const WHOLE: usize = Self::BLOCK;

    /// Most tiles of rows that [`Self::multiply_in_place`] computes of a panel of columns.
    const TILES_IN_PLACE: usize = 1;

    /// State of a tile that is stored while the next one is computed.
    type Pending;

    /// Packs panels of the first factor.
    ///
    /// # Safety
    /// The caller is compiled for the kernel's level and runs where it exists; `to` has room for
    /// the panels; the rows lie inside the operand, of which `lanes` covers at least one element.
    unsafe fn pack_rows(panels: Panels);

    /// Packs panels of the second factor.
    ///
    /// # Safety
    /// As [`Self::pack_rows`].
    unsafe fn pack_columns(panels: Panels);

    /// Returns the elements of a part of a packed factor that [`Self::pack_codes`] packs; whole lanes lie before
    /// them.
    fn packed_body(_weight: &PackedWeight, elements: &Range<usize>) -> Range<usize> {
        elements.end..elements.end
    }

    /// Packs a panel of the second factor from codes: a part of which all elements are a
    /// [`Self::packed_body`].
    ///
    /// # Safety
    /// As [`Self::pack_rows`].
    #[inline(always)]
    unsafe fn pack_codes(_panel: &CodedPanel) {
        unreachable!("no elements are packed from codes");
    }

    /// Prepares the thread for the tiles of a task.
    ///
    /// # Safety
    /// The CPU has the level.
    unsafe fn begin() -> Self::Pending;

    /// Ends what [`Self::begin`] began: all tiles are stored.
    ///
    /// # Safety
    /// As [`Self::multiply`].
    unsafe fn end(pending: Self::Pending);

    /// Computes `out = add + bias + Σ a · b` over `lanes` packed lanes of a panel of each factor, and
    /// prefetches `ahead`. Tiles are stored in order; the last may be stored with the next one.
    ///
    /// # Safety
    /// As [`Self::pack_rows`], between [`Self::begin`] and [`Self::end`]; the panels hold the
    /// lanes; the tile's addresses are valid for its rows and columns until the next tile is
    /// computed, or the end.
    unsafe fn multiply(
        lanes: usize,
        a: *const f32,
        b: *const f32,
        tile: &Tile,
        ahead: Ahead,
        pending: &mut Self::Pending,
    );

    /// Computes a tile with a panel of columns that is not packed, as [`Self::multiply`], if that pays; else does
    /// nothing. Returns whether it did.
    ///
    /// # Safety
    /// As [`Self::multiply`] and [`Self::pack_columns`].
    #[inline(always)]
    unsafe fn multiply_in_place(_columns: &InPlace, _a: *const f32, _tile: &Tile) -> bool {
        false
    }
}

/// Rows of memory to prefetch while a tile is computed, evenly, so that memory and arithmetic do not wait
/// for one another.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    pub first: *const u8,
    /// Bytes between rows.
    pub stride: usize,
    pub rows: usize,
    /// Bytes of a row.
    pub length: usize,
}

impl Ahead {
    pub(super) const NOTHING: Self = Self { first: std::ptr::null(), stride: 0, rows: 0, length: 0 };

    /// Returns the address of a row; of the last one if it is beyond.
    #[inline(always)]
    fn row(&self, row: usize) -> *const u8 {
        self.first.wrapping_add(row.min(self.rows - 1) * self.stride)
    }

    /// Prefetches a piece of each row.
    #[inline(always)]
    pub(super) fn prefetch(&self, bytes: Range<usize>) {
        for row in 0..self.rows {
            for byte in (bytes.start..bytes.end.min(self.length)).step_by(LINE) {
                prefetch_far(self.row(row).wrapping_add(byte));
            }
        }
    }
}

/// Pieces along k of a tile's computation; in each, rows of [`Ahead`] and of the result are prefetched.
const PIECES: usize = 16;

/// Kernel with sums in `MR` rows of `NV` vectors, which are `NR` columns.
pub(super) struct Registers<M, const MR: usize, const NV: usize, const NR: usize>(PhantomData<M>);

impl<M: Multiply, const MR: usize, const NV: usize, const NR: usize> Kernel for Registers<M, MR, NV, NR> {
    const ROWS: usize = MR;
    const COLUMNS: usize = NR;
    const DEPTH: usize = M::DEPTH;
    const WORDS: usize = 1;
    const GROUP: usize = 1;
    /// Longer blocks than fit a panel into the first-level cache are faster (512 against 256 and
    /// 176: 3 and 7 % on Emerald Rapids): the tile prefetches the panel, and there are fewer passes
    /// over the result.
    const BLOCK: usize = 512;

    type Pending = ();

    #[inline(always)]
    unsafe fn pack_rows(panels: Panels) {
        // SAFETY: the caller's promise.
        unsafe { M::Vector::pack::<MR>(panels, M::DEPTH) };
    }

    #[inline(always)]
    unsafe fn pack_columns(panels: Panels) {
        // SAFETY: the caller's promise.
        unsafe { M::Vector::pack::<NR>(panels, M::DEPTH) };
    }

    fn packed_body(weight: &PackedWeight, elements: &Range<usize>) -> Range<usize> {
        codes::body(weight, elements, M::DEPTH)
    }

    #[inline(always)]
    unsafe fn pack_codes(panel: &CodedPanel) {
        // SAFETY: the caller's promise.
        unsafe { M::pack_codes::<NR>(panel) };
    }

    unsafe fn begin() {}

    unsafe fn end((): ()) {}

    #[inline(always)]
    unsafe fn multiply(lanes: usize, a: *const f32, b: *const f32, tile: &Tile, ahead: Ahead, (): &mut ()) {
        // SAFETY: the caller's promise.
        unsafe {
            match ahead.rows.div_ceil(PIECES) {
                0 => multiply::<M, MR, NV, 0>(lanes, a, b, tile, ahead),
                1 => multiply::<M, MR, NV, 1>(lanes, a, b, tile, ahead),
                _ => multiply::<M, MR, NV, 2>(lanes, a, b, tile, ahead),
            }
        }
    }

    #[inline(always)]
    unsafe fn multiply_in_place(columns: &InPlace, a: *const f32, tile: &Tile) -> bool {
        // More rows take longer than memory, and would wait for it.
        // SAFETY: the caller's promise.
        MR <= 6 && unsafe { in_place::multiply::<M, MR, NV>(columns, a, tile) }
    }
}

/// Sums of a tile in registers.
pub(super) struct Sums<V, const MR: usize, const NV: usize>(pub [[V; NV]; MR]);

impl<V: Outlined, const MR: usize, const NV: usize> Sums<V, MR, NV> {
    /// Stores the tile. The sums pass through memory, so that only the loops before touch their array and
    /// it stays in registers.
    ///
    /// # Safety
    /// As [`multiply`].
    #[inline(always)]
    pub(super) unsafe fn store(self, tile: &Tile) {
        let mut values = [const { MaybeUninit::<[f32; MOST_COLUMNS]>::uninit() }; MR];
        // SAFETY: the caller's promise; a row of values is as wide as NV registers or wider.
        unsafe {
            for i in 0..MR {
                for j in 0..NV {
                    self.0[i][j].store(values[i].as_mut_ptr().cast::<f32>().add(j * V::LANES), V::LANES);
                }
            }
            V::store_tile(tile, values.as_ptr().cast());
        }
    }
}

/// Multiplication of packed lanes. A lane is 32 bits: one f32, or a pair of bf16.
pub(super) trait Multiply {
    type Vector: Outlined;
    /// Elements along k in one lane.
    const DEPTH: usize;

    /// Computes `c + a · b` lane by lane.
    ///
    /// # Safety
    /// The CPU must have the vector's level.
    unsafe fn multiply_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;

    /// Calls [`codes::pack`].
    ///
    /// # Safety
    /// As [`Self::multiply_add`], and as there.
    unsafe fn pack_codes<const W: usize>(panel: &CodedPanel);

    /// Rounds numbers to bf16, a pair to a lane of two. Those below 2⁻¹²⁶ may become zeros.
    ///
    /// # Safety
    /// As [`Self::multiply_add`].
    #[inline(always)]
    unsafe fn pair(first: Self::Vector, second: Self::Vector) -> Self::Vector {
        first.round_to_bf16().pair_with(second.round_to_bf16())
    }
}

/// One f32 per lane.
pub(super) struct Singles<V>(PhantomData<V>);

impl<V: Outlined> Multiply for Singles<V> {
    type Vector = V;
    const DEPTH: usize = 1;

    #[inline(always)]
    unsafe fn multiply_add(a: V, b: V, c: V) -> V {
        a.mul_add(b, c)
    }

    #[inline(always)]
    unsafe fn pack_codes<const W: usize>(panel: &CodedPanel) {
        // SAFETY: the caller's promise.
        unsafe { V::pack_codes::<W>(panel) };
    }
}

/// A pair of bf16 per lane.
#[cfg(target_arch = "x86_64")]
pub(super) struct Pairs;

#[cfg(target_arch = "x86_64")]
impl Multiply for Pairs {
    type Vector = crate::cpu::vector::Avx512;
    const DEPTH: usize = 2;

    #[inline(always)]
    unsafe fn multiply_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        // SAFETY: the caller's promise.
        unsafe { super::lanes::multiply_add_pairs(a, b, c) }
    }

    #[inline(always)]
    unsafe fn pack_codes<const W: usize>(panel: &CodedPanel) {
        // SAFETY: the caller's promise.
        unsafe { super::outlined::pack_pairs_of_codes::<W>(panel) };
    }

    #[inline(always)]
    unsafe fn pair(first: Self::Vector, second: Self::Vector) -> Self::Vector {
        // SAFETY: the caller's promise.
        unsafe { super::lanes::round_pairs(first, second) }
    }
}

/// Addend and destination of a tile. Addresses are those of its first element.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Rows and columns to write; the tile in registers may be larger.
    pub rows: usize,
    pub cols: usize,
    /// Added to the tile: the old result or the residual. Rows are `add_stride` apart.
    pub add: Add,
    pub add_stride: usize,
    /// Partial sums added in turn after `add`.
    pub more: Addends,
    /// One number per column, added to every row, if not null.
    pub bias: *const f32,
    pub out: Out,
    pub out_stride: usize,
}

/// Part of a result that a tile and a block of k make.
pub(super) struct Place {
    pub row: usize,
    pub rows: usize,
    pub column: usize,
    pub columns: usize,
    /// Whether the block of k is the first, and the last.
    pub is_first: bool,
    pub is_last: bool,
    /// Sums of this tile until the last block, of a bf16 result; never used for others.
    pub sums: *mut f32,
    pub sums_stride: usize,
}

/// Returns addend and destination of a tile.
#[inline(always)]
pub(super) fn tile(product: &Product, place: &Place) -> Tile {
    let Place { row, rows, column, columns: cols, is_first, is_last, sums, sums_stride } = *place;
    let c = &product.c;
    let offset = row * c.stride() + column;
    let (out, out_stride) = match c.dtype() {
        DType::F32 => (Out::F32(c.pointer_of::<f32>().wrapping_add(offset)), c.stride()),
        DType::Bf16 if is_last => (Out::Bf16(c.pointer_of::<bf16>().wrapping_add(offset)), c.stride()),
        DType::Bf16 => (Out::F32(sums), sums_stride),
    };
    let (add, add_stride) = match out {
        _ if is_first => product.start_at(row, column),
        Out::F32(out) => (Add::F32(out), out_stride),
        Out::Bf16(_) => (Add::F32(sums), sums_stride),
    };
    let bias = if is_first { product.bias_at(column) } else { std::ptr::null() };
    let more = if is_first { product.addends.at(row, column) } else { Addends::NONE };
    Tile { rows, cols, add, add_stride, more, bias, out, out_stride }
}

/// Address of the result, by type.
#[derive(Clone, Copy)]
pub(super) enum Out {
    F32(*mut f32),
    Bf16(*mut bf16),
}

/// Address of the addend, by type.
#[derive(Clone, Copy)]
pub(super) enum Add {
    Nothing,
    F32(*const f32),
    Bf16(*const bf16),
}

/// Computes `out = add + bias + Σ a · b` over `lanes` packed lanes: `MR` rows from `a`, `NV`
/// vectors of columns from `b`. `AHEAD` rows are prefetched per piece.
///
/// # Safety
/// The caller is compiled for the vector's level and runs where it exists; `a` and `b` hold `lanes`
/// groups of `MR` and of `NV` vectors; the tile's addresses are valid for its rows and columns.
#[inline(always)]
unsafe fn multiply<M: Multiply, const MR: usize, const NV: usize, const AHEAD: usize>(
    lanes: usize,
    mut a: *const f32,
    mut b: *const f32,
    tile: &Tile,
    ahead: Ahead,
) {
    const { assert!(MR <= PIECES) };
    let width = M::Vector::LANES;
    let part = lanes.div_ceil(PIECES).max(1);
    let step = ahead.length.div_ceil(part);
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[M::Vector::splat(0.0); NV]; MR];
        let (mut left, mut piece) = (lanes, 0);
        while left > 0 {
            if piece < MR {
                tile.prefetch(piece..piece + 1);
            }
            let mut next = [std::ptr::null::<u8>(); AHEAD];
            for i in 0..AHEAD {
                next[i] = ahead.row(AHEAD * piece + i);
            }
            piece += 1;
            let now = part.min(left);
            left -= now;
            for _ in 0..now {
                let mut columns = [M::Vector::splat(0.0); NV];
                for j in 0..NV {
                    columns[j] = M::Vector::load(b.add(j * width), width);
                    prefetch(b.wrapping_add(PREFETCH_LANES * NV * width + j * width).cast());
                }
                for i in 0..AHEAD {
                    prefetch_far(next[i]);
                    next[i] = next[i].wrapping_add(step);
                }
                for i in 0..MR {
                    let row = M::Vector::splat(*a.add(i));
                    for j in 0..NV {
                        sums[i][j] = M::multiply_add(row, columns[j], sums[i][j]);
                    }
                }
                a = a.add(MR);
                b = b.add(NV * width);
            }
        }
        Sums(sums).store(tile);
    }
}

/// Lanes by which the second factor is prefetched.
const PREFETCH_LANES: usize = 24;

/// Columns of the widest tile.
pub(super) const MOST_COLUMNS: usize = 32;

impl Tile {
    /// Prefetches the addend and destination of these rows of the tile.
    #[inline(always)]
    pub(super) fn prefetch(&self, rows: Range<usize>) {
        let (out, size) = match self.out {
            Out::F32(out) => (out.cast::<u8>().cast_const(), size_of::<f32>()),
            Out::Bf16(out) => (out.cast::<u8>().cast_const(), size_of::<bf16>()),
        };
        let rows = rows.start..rows.end.min(self.rows);
        for i in rows.clone() {
            prefetch(out.wrapping_add(i * self.out_stride * size));
            prefetch(out.wrapping_add((i * self.out_stride + self.cols - 1) * size));
        }
        // A bf16 addend is the result itself.
        if let Add::F32(add) = self.add
            && !std::ptr::addr_eq(add, out)
        {
            for i in rows.clone() {
                prefetch(add.wrapping_add(i * self.add_stride).cast());
                prefetch(add.wrapping_add(i * self.add_stride + self.cols - 1).cast());
            }
        }
        for i in rows {
            for add in self.more.of_row(i) {
                prefetch(add.cast());
                prefetch(add.wrapping_add(self.cols - 1).cast());
            }
        }
    }

    /// Computes `out = add + bias + values`; rows of `values` are [`MOST_COLUMNS`] apart.
    ///
    /// # Safety
    /// As [`multiply`].
    #[inline(always)]
    pub(super) unsafe fn store<V: Lanes>(&self, values: *const f32) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.out {
                Out::F32(out) => self.store_as::<V, f32>(values, out),
                Out::Bf16(out) => self.store_as::<V, bf16>(values, out),
            }
        }
    }

    #[inline(always)]
    unsafe fn store_as<V: Lanes, E: Element>(&self, values: *const f32, out: *mut E) {
        // SAFETY: the caller's promise.
        unsafe {
            // Never read if nothing is added.
            let none = std::ptr::null::<f32>();
            if !self.more.is_empty() {
                return self.write_sums::<V, E>(values, out);
            }
            match (self.add, !self.bias.is_null()) {
                (Add::Nothing, false) => self.write::<V, E, f32, false, false>(values, none, out),
                (Add::Nothing, true) => self.write::<V, E, f32, false, true>(values, none, out),
                (Add::F32(add), false) => self.write::<V, E, f32, true, false>(values, add, out),
                (Add::F32(add), true) => self.write::<V, E, f32, true, true>(values, add, out),
                (Add::Bf16(add), false) => self.write::<V, E, bf16, true, false>(values, add, out),
                (Add::Bf16(add), true) => self.write::<V, E, bf16, true, true>(values, add, out),
            }
        }
    }

    /// Computes `out = values + more … + bias`.
    #[inline(always)]
    unsafe fn write_sums<V: Lanes, E: Element>(&self, values: *const f32, out: *mut E) {
        debug_assert!(matches!(self.add, Add::Nothing), "partial sums are all addends");
        for i in 0..self.rows {
            for first in (0..self.cols).step_by(V::LANES) {
                let count = V::LANES.min(self.cols - first);
                // SAFETY: the caller's promise.
                unsafe {
                    let mut sum = V::load(values.add(i * MOST_COLUMNS + first), V::LANES);
                    for add in self.more.of_row(i) {
                        sum = sum.add(V::load(add.add(first), count));
                    }
                    if !self.bias.is_null() {
                        sum = sum.add(V::load(self.bias.add(first), count));
                    }
                    sum.put(out.add(i * self.out_stride + first), count);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn write<V: Lanes, E: Element, A: Element, const ADD: bool, const BIAS: bool>(
        &self,
        values: *const f32,
        add: *const A,
        out: *mut E,
    ) {
        let whole = self.cols - self.cols % V::LANES;
        for i in 0..self.rows {
            // SAFETY: the caller's promise.
            unsafe {
                let (values, out) = (values.add(i * MOST_COLUMNS), out.add(i * self.out_stride));
                let add = add.wrapping_add(i * self.add_stride);
                for first in (0..whole).step_by(V::LANES) {
                    self.write_part::<V, E, A, ADD, BIAS>(values, add, out, first, V::LANES);
                }
                if whole < self.cols {
                    self.write_part::<V, E, A, ADD, BIAS>(values, add, out, whole, self.cols - whole);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn write_part<V: Lanes, E: Element, A: Element, const ADD: bool, const BIAS: bool>(
        &self,
        values: *const f32,
        add: *const A,
        out: *mut E,
        first: usize,
        count: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut sum = V::load(values.add(first), V::LANES);
            if ADD {
                sum = sum.add(V::get(add.add(first), count));
            }
            if BIAS {
                sum = sum.add(V::load(self.bias.add(first), count));
            }
            sum.put(out.add(first), count);
        }
    }
}
