//! GEMM kernels on AMX tiles: one instruction multiplies 16 rows of 32 bf16 by 16 columns and adds
//! to 16 × 16 f32 sums.
//!
//! bf16 factors are used unchanged. An f32 factor is split into three bf16, `x = h + m + l`, its 24
//! bits cut into eight, eight and eight. Of the nine products of parts, six are summed; the three
//! smallest (`m·l`, `l·m`, `l·l`: together below 2⁻²³ of the whole, 2⁻²⁵ on average) are dropped.
//! An instruction sums its 32 elements before it adds them, so the result is as accurate as a chain
//! of f32 multiply-adds; the conformance tests hold both to the same bound. The CPU flushes parts
//! below 2⁻¹²⁶ to zero, so f32 numbers lose bits below about 10⁻³³. Infinities yield NaN.
//!
//! A packed lane is a pair of elements in `PARTS` words of two bf16: neighbours along k for bf16,
//! elements 16 apart for f32, which saves a shuffle (both factors agree, and the sum does not
//! care). A panel of the first factor consists of tiles in load order, rows of 16 lanes: for each
//! group of 16 lanes and each part, two of 16 rows. A panel of the second factor has rows of 32
//! columns for each lane and part.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::kernel::{Add, Ahead, Kernel, MOST_COLUMNS, Out, Panels, Tile};
use super::lanes::{Lanes, Rows};
use crate::cpu::amx;
use crate::cpu::prefetch::prefetch;
use crate::cpu::vector::{Avx512, Vector};
use crate::{DType, bf16};

/// Rows of a tile, columns of a tile, and lanes in its rows.
pub(super) const SIDE: usize = amx::SIDE;

/// Words in a tile.
pub(super) const WORDS: usize = SIDE * SIDE;

/// Elements along k per row of a tile.
pub(super) const REACH: usize = 2 * SIDE;

/// Kernel of four tiles of sums, for factors split into 1 part (bf16) or 3 parts (f32).
pub(super) struct Tiles<const PARTS: usize>;

impl<const PARTS: usize> Kernel for Tiles<PARTS> {
    const ROWS: usize = 2 * SIDE;
    const COLUMNS: usize = 2 * SIDE;
    const DEPTH: usize = 2;
    const WORDS: usize = PARTS;
    const GROUP: usize = SIDE;
    /// A bf16 panel of columns (32 KiB) stays in the first-level cache while rows pass; f32 prefers
    /// fewer passes over the result.
    const BLOCK: usize = 256;
    /// For bf16, summing two blocks costs more than a panel beyond the cache.
    const WHOLE: usize = if PARTS == 1 { 512 } else { Self::BLOCK };

    type Pending = Pending;

    #[inline(always)]
    unsafe fn pack_rows(panels: Panels) {
        let place =
            Place { group: 2 * PARTS * WORDS, half: WORDS, part: 2 * WORDS, line: SIDE, by_lane: false };
        // SAFETY: the caller's promise.
        unsafe { pack::<PARTS>(panels, place) };
    }

    #[inline(always)]
    unsafe fn pack_columns(panels: Panels) {
        let line = PARTS * Self::COLUMNS;
        let place = Place { group: SIDE * line, half: SIDE, part: Self::COLUMNS, line, by_lane: true };
        // SAFETY: the caller's promise.
        unsafe { pack::<PARTS>(panels, place) };
    }

    #[inline(always)]
    unsafe fn begin() -> Pending {
        // SAFETY: the caller's promise.
        unsafe { amx::begin() };
        Pending { tile: None, values: MaybeUninit::uninit() }
    }

    #[inline(always)]
    unsafe fn end(pending: Pending) {
        // SAFETY: the caller's promise.
        unsafe {
            pending.store(0..Self::ROWS);
            amx::end();
        }
    }

    #[inline(always)]
    unsafe fn multiply(
        lanes: usize,
        a: *const f32,
        b: *const f32,
        tile: &Tile,
        ahead: Ahead,
        pending: &mut Pending,
    ) {
        const { assert!(PARTS == 1 || PARTS == 3) };
        let groups = lanes / SIDE;
        let rows_at_once = Self::ROWS.div_ceil(groups.max(1));
        let step = ahead.length.div_ceil(groups.max(1));
        let mut row = 0;
        // SAFETY: the caller's promise: panels hold the groups, tiles are configured. Only this
        // function uses tile registers, so sums stay in them between pieces of assembly.
        unsafe {
            amx::clear();
            for group in 0..groups {
                let rows = row..Self::ROWS.min(row + rows_at_once);
                row = rows.end;
                tile.prefetch(rows.clone());
                ahead.prefetch(group * step..(group + 1) * step);
                let a = a.add(group * 2 * PARTS * WORDS);
                let b = b.add(group * 2 * PARTS * WORDS);
                if PARTS == 1 {
                    // Two tiles of rows in sequence, columns side by side.
                    amx::multiply((a, SIDE), (b, 2 * SIDE));
                } else {
                    multiply_parts(a, b);
                }
                pending.store(rows);
            }
            pending.store(row..Self::ROWS);
            amx::store(pending.values(), MOST_COLUMNS);
            pending.tile = Some(*tile);
        }
    }
}

/// Sums of a tile that are stored while the next tile is computed: the AMX unit runs beside the
/// core and does not wait for memory.
#[repr(C, align(64))]
pub(super) struct Pending {
    values: MaybeUninit<[f32; 2 * SIDE * MOST_COLUMNS]>,
    tile: Option<Tile>,
}

impl Pending {
    /// Creates the sums of a tile, which are not yet [there](Self::values).
    #[inline(always)]
    pub(super) fn of(tile: &Tile) -> Self {
        Self { values: MaybeUninit::uninit(), tile: Some(*tile) }
    }

    /// Returns the sums, rows of 32.
    #[inline(always)]
    pub(super) fn values(&mut self) -> *mut f32 {
        self.values.as_mut_ptr().cast()
    }

    /// Stores some rows of the tile, if there is one. All tiles, whole or partial, use this path,
    /// so the bits do not depend on tile positions: each number is `values + add + bias`, and a row
    /// of 32 is rounded at once as in [`amx::round`].
    #[inline(always)]
    pub(super) unsafe fn store(&self, rows: Range<usize>) {
        const { assert!(MOST_COLUMNS == 2 * SIDE) };
        let Some(tile) = &self.tile else { return };
        let cols = u32::MAX >> (2 * SIDE - tile.cols);
        let [left, right] = [cols as u16, (cols >> SIDE) as u16];
        for row in rows.start..rows.end.min(tile.rows) {
            // SAFETY: the caller's promise; masked lanes are not touched.
            unsafe {
                let values = self.values.as_ptr().cast::<f32>().add(row * MOST_COLUMNS);
                let (mut first, mut second) = (_mm512_load_ps(values), _mm512_load_ps(values.add(SIDE)));
                let at = row * tile.add_stride;
                match tile.add {
                    Add::Nothing => {}
                    Add::F32(add) => {
                        let add = add.wrapping_add(at);
                        first = _mm512_add_ps(first, _mm512_maskz_loadu_ps(left, add));
                        second = _mm512_add_ps(second, _mm512_maskz_loadu_ps(right, add.wrapping_add(SIDE)));
                    }
                    Add::Bf16(add) => {
                        let add = _mm512_maskz_loadu_epi16(cols, add.wrapping_add(at).cast());
                        let [lower, upper] =
                            [_mm512_castsi512_si256(add), _mm512_extracti64x4_epi64::<1>(add)].map(|half| {
                                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
                            });
                        first = _mm512_add_ps(first, lower);
                        second = _mm512_add_ps(second, upper);
                    }
                }
                for add in tile.more.of_row(row) {
                    first = _mm512_add_ps(first, _mm512_maskz_loadu_ps(left, add));
                    second = _mm512_add_ps(second, _mm512_maskz_loadu_ps(right, add.wrapping_add(SIDE)));
                }
                if !tile.bias.is_null() {
                    let bias = tile.bias;
                    first = _mm512_add_ps(first, _mm512_maskz_loadu_ps(left, bias));
                    second = _mm512_add_ps(second, _mm512_maskz_loadu_ps(right, bias.wrapping_add(SIDE)));
                }
                let at = row * tile.out_stride;
                match tile.out {
                    Out::F32(out) => {
                        _mm512_mask_storeu_ps(out.wrapping_add(at), left, first);
                        _mm512_mask_storeu_ps(out.wrapping_add(at + SIDE), right, second);
                    }
                    Out::Bf16(out) => {
                        let rounded = amx::round([first, second]);
                        _mm512_mask_storeu_epi16(out.wrapping_add(at).cast(), cols, rounded);
                    }
                }
            }
        }
    }
}

/// Adds the six products of parts of a group of lanes of f32: hh, hm, mm, mh, lh, hl. Neighbours
/// share the tiles of one factor.
#[inline(always)]
unsafe fn multiply_parts(a: *const f32, b: *const f32) {
    // SAFETY: the caller's promise: six tiles of rows at `a`, rows of 3 · 128 bytes at `b`.
    unsafe {
        asm!(
            "tileloadd tmm6, [{b} + {b_row}]",
            "tileloadd tmm4, [{a} + {a_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_row} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {a_row} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm6, [{b} + {b_row} + 128]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_row} + 192]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm4, [{a} + {a_row} + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {a_row} + 3072]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm6, [{b} + {b_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_row} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm4, [{a} + {a_row} + 4096]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {a_row} + 5120]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm4, [{a} + {a_row}]",
            "tileloadd tmm6, [{b} + {b_row} + 256]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_row} + 320]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {a_row} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            a = in(reg) a,
            b = in(reg) b,
            a_row = in(reg) 64usize,
            b_row = in(reg) 384usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(readonly, nostack, preserves_flags),
        );
    }
}

/// Position of a square of 16 rows and 16 lanes of a part, in words from the panel's start.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Distance between groups of 16 lanes.
    pub group: usize,
    /// Distance between the panel's halves of 16 rows.
    pub half: usize,
    /// Distance between parts.
    pub part: usize,
    /// Distance between lines of the square.
    pub line: usize,
    /// True if a line is a lane of 16 rows; else it is a row of 16 lanes.
    pub by_lane: bool,
}

/// Packs square by square. Rows beyond the last are unspecified; elements beyond the end of k are
/// zero.
#[inline(always)]
pub(super) unsafe fn pack<const PARTS: usize>(panels: Panels, place: Place) {
    // SAFETY: the caller's promise.
    unsafe {
        match panels.source.dtype() {
            DType::F32 => pack_squares::<f32, PARTS>(panels, place),
            DType::Bf16 => pack_squares::<bf16, PARTS>(panels, place),
        }
    }
}

/// Element type that squares are packed from.
trait Squares: Copy {
    const ZERO: Self;

    /// Packs 16 rows of 32 elements.
    ///
    /// # Safety
    /// As [`pack`]. All elements are readable: element k of row i is at `i · stride + k`, or at `k
    /// · stride + i` if transposed.
    unsafe fn square(from: *const Self, stride: usize, is_transposed: bool, to: *mut f32, place: Place);
}

#[inline(always)]
unsafe fn pack_squares<E: Squares, const PARTS: usize>(panels: Panels, place: Place) {
    let Panels { source, rows, lanes, to, stride: panel_stride, is_in_cache } = panels;
    let end = source.depth().min(2 * lanes.end);
    let (stride, is_transposed) = (source.stride(), source.is_transposed());
    for (panel, first) in (0..rows.len()).step_by(2 * SIDE).enumerate() {
        for (group, k) in (2 * lanes.start..2 * lanes.end).step_by(REACH).enumerate() {
            for half in 0..2 {
                let row = first + half * SIDE;
                if row >= rows.len() {
                    break;
                }
                let (count, depth) = (SIDE.min(rows.len() - row), REACH.min(end - k));
                let row = rows.start + row;
                // SAFETY: the rows and the elements exist; the caller promises the room.
                unsafe {
                    let to = to.add(panel * panel_stride + group * place.group + half * place.half);
                    let (at, ahead) = if is_transposed {
                        (k * stride + row, REACH * stride)
                    } else {
                        (row * stride + k, REACH)
                    };
                    let from = source.pointer::<E>().add(at);
                    if count == SIDE && depth == REACH {
                        let lines = if is_transposed { REACH } else { SIDE };
                        for line in 0..if is_in_cache { 0 } else { lines } {
                            prefetch(from.wrapping_add(line * stride + ahead).cast());
                        }
                        E::square(from, stride, is_transposed, to, place);
                    } else {
                        let mut whole = [E::ZERO; SIDE * REACH];
                        let (lines, length, width) =
                            if is_transposed { (depth, count, SIDE) } else { (count, depth, REACH) };
                        for line in 0..lines {
                            let copy = whole.as_mut_ptr().add(line * width);
                            std::ptr::copy_nonoverlapping(from.add(line * stride), copy, length);
                        }
                        E::square(whole.as_ptr(), width, is_transposed, to, place);
                    }
                }
            }
        }
    }
}

/// Returns the addresses of the 16 rows of a square, or of 16 elements along k.
#[inline(always)]
unsafe fn starts<E>(from: *const E, stride: usize) -> Rows {
    let mut starts: Rows = [std::ptr::null(); SIDE];
    for i in 0..SIDE {
        // SAFETY: the caller's promise.
        starts[i] = unsafe { from.add(i * stride) }.cast();
    }
    starts
}

impl Squares for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    unsafe fn square(from: *const f32, stride: usize, is_transposed: bool, to: *mut f32, place: Place) {
        // Distance of 16 elements along k.
        let other = if is_transposed { SIDE * stride } else { SIDE };
        // SAFETY: the caller's promise.
        unsafe {
            if is_transposed == place.by_lane {
                for line in 0..SIDE {
                    let from = from.add(line * stride);
                    let first = Avx512::load(from, SIDE);
                    let second = Avx512::load(from.add(other), SIDE);
                    cut(first, second, to.add(line * place.line), place.part);
                }
            } else {
                let (first, second) = (starts(from, stride), starts(from.add(other), stride));
                for line in (0..SIDE).step_by(4) {
                    let first = Avx512::load_columns(&first, line * size_of::<f32>());
                    let second = Avx512::load_columns(&second, line * size_of::<f32>());
                    for j in 0..4 {
                        cut(first[j], second[j], to.add((line + j) * place.line), place.part);
                    }
                }
            }
        }
    }
}

/// Cuts 16 pairs of numbers into three parts of eight bits each, and stores the pairs of parts
/// `part` apart.
#[inline(always)]
unsafe fn cut(first: Avx512, second: Avx512, to: *mut f32, part: usize) {
    const SECOND: __mmask32 = 0xaaaa_aaaa;
    // SAFETY: called where the level exists; the caller promises the room.
    unsafe {
        let upper = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
        let (mut first, mut second) = (first.0, second.0);
        for index in 0..3 {
            let bits = [_mm512_castps_si512(first), _mm512_castps_si512(second)];
            let words = _mm512_mask_blend_epi16(SECOND, _mm512_srli_epi32::<16>(bits[0]), bits[1]);
            _mm512_storeu_epi32(to.add(index * part).cast(), words);
            first = _mm512_sub_ps(first, _mm512_castsi512_ps(_mm512_and_si512(bits[0], upper)));
            second = _mm512_sub_ps(second, _mm512_castsi512_ps(_mm512_and_si512(bits[1], upper)));
        }
    }
}

impl Squares for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    unsafe fn square(from: *const bf16, stride: usize, is_transposed: bool, to: *mut f32, place: Place) {
        // SAFETY: the caller's promise.
        unsafe {
            match (is_transposed, place.by_lane) {
                (false, false) => {
                    for row in 0..SIDE {
                        let pairs = _mm512_loadu_epi32(from.add(row * stride).cast());
                        _mm512_storeu_epi32(to.add(row * place.line).cast(), pairs);
                    }
                }
                (false, true) => {
                    let rows = starts(from, stride);
                    for lane in (0..SIDE).step_by(4) {
                        let lanes = Avx512::load_columns(&rows, lane * size_of::<f32>());
                        for j in 0..4 {
                            lanes[j].store(to.add((lane + j) * place.line), SIDE);
                        }
                    }
                }
                (true, true) => {
                    for lane in 0..SIDE {
                        pair(from.add(2 * lane * stride), stride).store(to.add(lane * place.line), SIDE);
                    }
                }
                (true, false) => {
                    let mut square = [Avx512::splat(0.0); SIDE];
                    for lane in 0..SIDE {
                        square[lane] = pair(from.add(2 * lane * stride), stride);
                    }
                    Avx512::transpose(&mut square);
                    for row in 0..SIDE {
                        square[row].store(to.add(row * place.line), SIDE);
                    }
                }
            }
        }
    }
}

/// Returns a lane of 16 rows: pairs of an element and the one `stride` further.
#[inline(always)]
unsafe fn pair(from: *const bf16, stride: usize) -> Avx512 {
    // SAFETY: the caller's promise.
    unsafe { Avx512::load_bf16(from, SIDE).pair_with(Avx512::load_bf16(from.add(stride), SIDE)) }
}
