//! Products of tiles: AMX multiplies 16 rows of 32 bf16 by as many columns in one instruction and adds to 16 × 16 sums
//! in f32.
//!
//! bf16 factors are taken as they are. An f32 factor is the sum of three bf16, `x = h + m + l`, its 24 bits cut into
//! eight, eight and eight. Of the nine products of parts the three smallest (`m·l`, `l·m`, `l·l`: together below 2⁻²³ of the
//! whole, 2⁻²⁵ on average) are left out; six are added up. An instruction sums its 32 elements apart before it adds them, so the
//! result is as close to the exact one as a chain of f32 multiply-adds: the conformance tests hold both to the same bound.
//! Parts below 2⁻¹²⁶ are taken as zero by the processor, so f32 numbers lose bits below about 10⁻³³. Infinities yield NaN.
//!
//! Packed, a lane is a pair of elements, `PARTS` words of two bf16: neighbours along k if the factor is bf16, elements 16 apart if it
//! is f32, which spares a shuffle (both factors agree on it, and the sum does not care). A panel of the first factor consists of
//! tiles as the processor loads them, rows of 16 lanes: for each group of 16 lanes and each part, two of 16 rows. A panel of
//! the second one has rows of 32 columns: for each lane, and each part.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::Operand;
use super::kernel::{Add, Kernel, MOST_COLUMNS, Out, Tile, prefetch};
use super::lanes::{Lanes, Rows};
use crate::cpu::amx;
use crate::cpu::vector::{Avx512, Vector};
use crate::{DType, bf16};

/// Rows of a tile, columns of a tile, and lanes in its rows.
const SIDE: usize = amx::SIDE;

/// Words in a tile.
const WORDS: usize = SIDE * SIDE;

/// Elements along k that a tile's row holds.
const REACH: usize = 2 * SIDE;

/// Four tiles of sums, of factors cut into so many parts: 1 for bf16, 3 for f32.
pub(super) struct Tiles<const PARTS: usize>;

impl<const PARTS: usize> Kernel for Tiles<PARTS> {
    const ROWS: usize = 2 * SIDE;
    const COLUMNS: usize = 2 * SIDE;
    const DEPTH: usize = 2;
    const WORDS: usize = PARTS;
    const GROUP: usize = SIDE;
    /// Of bf16, a panel of columns (32 KiB) stays in the first-level cache while rows pass it by; f32 does without passes over
    /// the result instead.
    const BLOCK: usize = 256;
    /// Of bf16, sums of two blocks cost more than a panel that does not stay there.
    const WHOLE: usize = if PARTS == 1 { 512 } else { Self::BLOCK };

    type Pending = Pending;

    #[inline(always)]
    unsafe fn pack_rows(
        source: &Operand,
        rows: Range<usize>,
        lanes: Range<usize>,
        to: *mut f32,
        panel_stride: usize,
    ) {
        let place =
            Place { group: 2 * PARTS * WORDS, half: WORDS, part: 2 * WORDS, line: SIDE, by_lane: false };
        // SAFETY: the caller's promise.
        unsafe { pack::<PARTS>(source, rows, lanes, to, panel_stride, place) };
    }

    #[inline(always)]
    unsafe fn pack_columns(
        source: &Operand,
        rows: Range<usize>,
        lanes: Range<usize>,
        to: *mut f32,
        panel_stride: usize,
    ) {
        let line = PARTS * Self::COLUMNS;
        let place = Place { group: SIDE * line, half: SIDE, part: Self::COLUMNS, line, by_lane: true };
        // SAFETY: the caller's promise.
        unsafe { pack::<PARTS>(source, rows, lanes, to, panel_stride, place) };
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
    unsafe fn multiply(lanes: usize, a: *const f32, b: *const f32, tile: &Tile, pending: &mut Pending) {
        const { assert!(PARTS == 1 || PARTS == 3) };
        let groups = lanes / SIDE;
        let rows_at_once = Self::ROWS.div_ceil(groups.max(1));
        let mut row = 0;
        // SAFETY: the caller's promise: panels hold the groups, tiles are configured. Nothing but this function touches tile
        // registers, so the sums stay in them from one piece of assembly to the next.
        unsafe {
            amx::clear();
            for group in 0..groups {
                let rows = row..Self::ROWS.min(row + rows_at_once);
                row = rows.end;
                tile.prefetch(rows.clone());
                let a = a.add(group * 2 * PARTS * WORDS);
                let b = b.add(group * 2 * PARTS * WORDS);
                if PARTS == 1 {
                    // Two tiles of rows one after the other, columns side by side.
                    amx::multiply((a, SIDE), (b, 2 * SIDE));
                } else {
                    multiply_parts(a, b);
                }
                pending.store(rows);
            }
            pending.store(row..Self::ROWS);
            amx::store(pending.values.as_mut_ptr().cast(), MOST_COLUMNS);
            pending.tile = Some(*tile);
        }
    }
}

/// The sums of a tile that are stored while the next ones are computed: the processor multiplies tiles beside, and does not wait for
/// memory.
#[repr(C, align(64))]
pub(super) struct Pending {
    values: MaybeUninit<[f32; 2 * SIDE * MOST_COLUMNS]>,
    tile: Option<Tile>,
}

impl Pending {
    /// Stores some rows of the tile, if there is one. Every tile comes this way, whole or not, so that where tiles begin does not
    /// show in the bits: each number is `values + add + bias`; a row of 32 is rounded at once, as [`amx::round`] does.
    #[inline(always)]
    unsafe fn store(&self, rows: Range<usize>) {
        const { assert!(MOST_COLUMNS == 2 * SIDE) };
        let Some(tile) = &self.tile else { return };
        let cols = u32::MAX >> (2 * SIDE - tile.cols);
        let [left, right] = [cols as u16, (cols >> SIDE) as u16];
        for row in rows.start..rows.end.min(tile.rows) {
            // SAFETY: the caller's promise: what is masked out is not touched.
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

/// Adds the six products of parts of a group of lanes of f32: hh, hm, mm, mh, lh, hl. Neighbours share the tiles of one factor.
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

/// Where a square of 16 rows and 16 lanes of a part goes, in words from the panel's start.
#[derive(Clone, Copy)]
struct Place {
    /// From one group of 16 lanes to the next.
    group: usize,
    /// From the panel's first 16 rows to the others.
    half: usize,
    /// From one part to the next.
    part: usize,
    /// From one line of the square to the next.
    line: usize,
    /// Whether a line is a lane of 16 rows, or a row of 16 lanes.
    by_lane: bool,
}

/// Packs, square by square. Rows beyond the last one are unspecified; elements beyond k's end are zero.
#[inline(always)]
unsafe fn pack<const PARTS: usize>(
    source: &Operand,
    rows: Range<usize>,
    lanes: Range<usize>,
    to: *mut f32,
    panel_stride: usize,
    place: Place,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match source.dtype() {
            DType::F32 => pack_squares::<f32, PARTS>(source, rows, lanes, to, panel_stride, place),
            DType::Bf16 => pack_squares::<bf16, PARTS>(source, rows, lanes, to, panel_stride, place),
        }
    }
}

/// A factor's element as squares are made of it.
trait Squares: Copy {
    const ZERO: Self;

    /// Packs 16 rows of 32 elements.
    ///
    /// # Safety
    /// As [`pack`]; all of them can be read: element k of row i is at `i · stride + k`, or at `k · stride + i` if transposed.
    unsafe fn square(from: *const Self, stride: usize, is_transposed: bool, to: *mut f32, place: Place);
}

#[inline(always)]
unsafe fn pack_squares<E: Squares, const PARTS: usize>(
    source: &Operand,
    rows: Range<usize>,
    lanes: Range<usize>,
    to: *mut f32,
    panel_stride: usize,
    place: Place,
) {
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
                        for line in 0..lines {
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

/// Where the 16 rows of a square begin, or 16 of its elements along k.
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
        // From one element of a line to the one 16 further along k.
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

/// Cuts 16 pairs of numbers into three parts of eight bits each, and stores the pairs of parts `part` apart.
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

/// A lane of 16 rows: pairs of an element and the one `stride` further.
#[inline(always)]
unsafe fn pair(from: *const bf16, stride: usize) -> Avx512 {
    // SAFETY: the caller's promise.
    unsafe { Avx512::load_bf16(from, SIDE).pair_with(Avx512::load_bf16(from.add(stride), SIDE)) }
}
