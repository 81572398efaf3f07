//! Tiles of few rows on AMX: the second factor takes the place of the first. Its rows are a tile's rows where they lie
//! in memory, and nothing of a bf16 weight is packed; the first factor, of few rows, is ordered as columns.
//!
//! The products of an element are those of [`Tiles`] in the same order, and so are the bits. The result comes out with
//! rows and columns exchanged, and is transposed in registers.

use std::arch::asm;
use std::mem::MaybeUninit;

use super::amx::{Pending, Place, REACH, SIDE, Tiles, WORDS, pack};
use super::few::TURNED_TILES;
use super::kernel::{Ahead, InPlace, Kernel, Lines, MOST_COLUMNS, Panels, Tile};
use crate::cpu::amx;
use crate::cpu::prefetch::prefetch_far;
use crate::cpu::vector::{Avx512, Vector};

/// Kernel of `HALVES` times 16 rows and of 32 columns, for factors split into `PARTS` as for [`Tiles`].
pub(super) struct TurnedTiles<const PARTS: usize, const HALVES: usize>;

impl<const PARTS: usize, const HALVES: usize> Kernel for TurnedTiles<PARTS, HALVES> {
    const ROWS: usize = HALVES * SIDE;
    const COLUMNS: usize = 2 * SIDE;
    const DEPTH: usize = Tiles::<PARTS>::DEPTH;
    const WORDS: usize = PARTS;
    const GROUP: usize = SIDE;
    const BLOCK: usize = Tiles::<PARTS>::BLOCK;
    const WHOLE: usize = Tiles::<PARTS>::WHOLE;
    const TILES_IN_PLACE: usize = TURNED_TILES;

    type Pending = ();

    #[inline(always)]
    unsafe fn pack_rows(panels: Panels) {
        let line = PARTS * Self::ROWS;
        let place = Place { group: SIDE * line, half: SIDE, part: Self::ROWS, line, by_lane: true };
        debug_assert!(HALVES == 2 || panels.rows.len() <= SIDE);
        // SAFETY: the caller's promise.
        unsafe { pack::<PARTS>(panels, place) };
    }

    #[inline(always)]
    unsafe fn pack_columns(panels: Panels) {
        // SAFETY: the caller's promise.
        unsafe { Tiles::<PARTS>::pack_rows(panels) };
    }

    #[inline(always)]
    unsafe fn begin() {
        // SAFETY: the caller's promise.
        unsafe { amx::begin() };
    }

    #[inline(always)]
    unsafe fn end((): ()) {
        // SAFETY: the caller's promise.
        unsafe { amx::end() };
    }

    #[inline(always)]
    unsafe fn multiply(lanes: usize, a: *const f32, b: *const f32, tile: &Tile, ahead: Ahead, (): &mut ()) {
        let groups = lanes / SIDE;
        let step = ahead.length.div_ceil(groups.max(1));
        // SAFETY: the caller's promise: panels hold the groups, tiles are configured.
        unsafe {
            amx::clear();
            for group in 0..groups {
                ahead.prefetch(group * step..(group + 1) * step);
                Self::add(Self::group_of_columns(b, group), SIDE, Self::group_of_rows(a, group));
            }
            Self::store(tile);
        }
    }

    #[inline(always)]
    unsafe fn multiply_in_place(columns: &InPlace, a: *const f32, tile: &Tile) -> bool {
        let lines = columns.lines(Self::COLUMNS, Self::DEPTH);
        // Parts of f32 are packed; distances are whole words.
        let lines = lines.filter(|lines| PARTS == 1 && lines.stride.is_multiple_of(size_of::<f32>()));
        let Some(Lines { first, stride, elements, ahead }) = lines else { return false };
        let (tail, whole, rest) = (columns.tail, elements / REACH, elements % REACH);
        // SAFETY: all rows and elements lie inside the operand; the panels hold the groups, tiles are configured.
        unsafe {
            amx::clear();
            for group in 0..whole {
                let from = first.add(group * REACH * size_of::<u16>());
                for row in 0..Self::COLUMNS {
                    prefetch_far(from.wrapping_add(row * stride + ahead));
                }
                Self::add(from.cast(), stride / size_of::<f32>(), Self::group_of_rows(a, group));
            }
            if rest > 0 {
                // Zeros behind the last element, where memory has others.
                let mut words = [0.0f32; 2 * WORDS];
                for row in 0..Self::COLUMNS {
                    let from = first.add(row * stride + whole * REACH * size_of::<u16>());
                    let to = words.as_mut_ptr().add(row * SIDE).cast();
                    std::ptr::copy_nonoverlapping(from, to, rest * size_of::<u16>());
                }
                Self::add(words.as_ptr(), SIDE, Self::group_of_rows(a, whole));
            }
            let behind = Self::group_of_rows(a, whole + usize::from(rest > 0));
            for group in 0..tail.lanes / SIDE {
                let b = Self::group_of_columns(tail.columns, group);
                Self::add(b, SIDE, Self::group_of_rows(behind, group));
            }
            Self::store(tile);
        }
        true
    }
}

impl<const PARTS: usize, const HALVES: usize> TurnedTiles<PARTS, HALVES> {
    /// Returns a group of 16 lanes of packed rows.
    fn group_of_rows(a: *const f32, group: usize) -> *const f32 {
        a.wrapping_add(group * SIDE * PARTS * Self::ROWS)
    }

    /// Returns a group of 16 lanes of packed columns.
    fn group_of_columns(b: *const f32, group: usize) -> *const f32 {
        b.wrapping_add(group * 2 * PARTS * WORDS)
    }

    /// Adds the products of a group. Columns, of `stride` words, are parts of 32; lines of `rows` hold a lane of all
    /// parts.
    #[inline(always)]
    unsafe fn add(columns: *const f32, stride: usize, rows: *const f32) {
        const { assert!((PARTS == 1 || PARTS == 3) && (HALVES == 1 || HALVES == 2)) };
        // SAFETY: the caller's promise.
        unsafe {
            match (PARTS, HALVES) {
                (1, 1) => multiply_half((columns, stride), rows),
                (1, _) => amx::multiply((columns, stride), (rows, 2 * SIDE)),
                (_, 1) => multiply_parts_half(columns, rows),
                _ => multiply_parts(columns, rows),
            }
        }
    }

    /// Stores the sums, whose rows are the tile's columns.
    #[inline(always)]
    unsafe fn store(tile: &Tile) {
        let mut sums = [const { MaybeUninit::<[f32; 2 * SIDE]>::uninit() }; 2 * SIDE];
        let mut pending = Pending::of(tile);
        // SAFETY: the caller's promise; sums and values are 32 rows of 32.
        unsafe {
            let sums = sums.as_mut_ptr().cast::<f32>();
            amx::store(sums, 2 * SIDE);
            for row in (0..Self::ROWS.min(tile.rows)).step_by(SIDE) {
                for column in (0..2 * SIDE).step_by(SIDE) {
                    let mut square = [Avx512::splat(0.0); SIDE];
                    for i in 0..SIDE {
                        square[i] = Avx512::load(sums.add((column + i) * 2 * SIDE + row), SIDE);
                    }
                    Avx512::transpose(&mut square);
                    for i in 0..SIDE {
                        square[i].store(pending.values().add((row + i) * MOST_COLUMNS + column), SIDE);
                    }
                }
            }
            pending.store(0..Self::ROWS);
        }
    }
}

/// Adds the products of 32 columns in place and of 16 packed rows to the first and the third tile of sums.
#[inline(always)]
unsafe fn multiply_half((columns, stride): (*const f32, usize), rows: *const f32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm6, [{rows} + {line}]",
            "tileloaddt1 tmm4, [{columns} + {stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloaddt1 tmm5, [{below} + {stride}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            columns = in(reg) columns,
            below = in(reg) columns.wrapping_add(SIDE * stride),
            stride = in(reg) stride * size_of::<f32>(),
            rows = in(reg) rows,
            line = in(reg) SIDE * size_of::<f32>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _,
            options(readonly, nostack, preserves_flags),
        );
    }
}

/// Adds the six products of parts of a group of lanes of f32, in the order of [`Tiles`]: by rows and columns hh, hm, mm,
/// mh, lh, hl. Neighbours share the tiles of one factor.
#[inline(always)]
unsafe fn multiply_parts(columns: *const f32, rows: *const f32) {
    // SAFETY: the caller's promise: six tiles of columns, lines of 3 · 128 bytes at `rows`.
    unsafe {
        asm!(
            "tileloadd tmm6, [{rows} + {line}]",
            "tileloadd tmm4, [{columns} + {stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{rows} + {line} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{columns} + {stride} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm4, [{columns} + {stride} + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{columns} + {stride} + 3072]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm6, [{rows} + {line} + 128]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloadd tmm7, [{rows} + {line} + 192]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm4, [{columns} + {stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{columns} + {stride} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm6, [{rows} + {line} + 256]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloadd tmm7, [{rows} + {line} + 320]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tileloadd tmm6, [{rows} + {line}]",
            "tileloadd tmm4, [{columns} + {stride} + 4096]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{rows} + {line} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{columns} + {stride} + 5120]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            columns = in(reg) columns,
            stride = in(reg) 64usize,
            rows = in(reg) rows,
            line = in(reg) 384usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(readonly, nostack, preserves_flags),
        );
    }
}

/// Adds the six products of [`multiply_parts`] for 16 rows, to the first and the third tile of sums.
#[inline(always)]
unsafe fn multiply_parts_half(columns: *const f32, rows: *const f32) {
    // SAFETY: the caller's promise: six tiles of columns, lines of 3 · 64 bytes at `rows`.
    unsafe {
        asm!(
            "tileloadd tmm6, [{rows} + {line}]",
            "tileloadd tmm4, [{columns} + {stride}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm5, [{columns} + {stride} + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tileloadd tmm1, [{columns} + {stride} + 2048]",
            "tdpbf16ps tmm0, tmm1, tmm6",
            "tileloadd tmm3, [{columns} + {stride} + 3072]",
            "tdpbf16ps tmm2, tmm3, tmm6",
            "tileloadd tmm7, [{rows} + {line} + 64]",
            "tdpbf16ps tmm0, tmm1, tmm7",
            "tdpbf16ps tmm2, tmm3, tmm7",
            "tdpbf16ps tmm0, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm7",
            "tileloadd tmm7, [{rows} + {line} + 128]",
            "tdpbf16ps tmm0, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm7",
            "tileloadd tmm1, [{columns} + {stride} + 4096]",
            "tdpbf16ps tmm0, tmm1, tmm6",
            "tileloadd tmm3, [{columns} + {stride} + 5120]",
            "tdpbf16ps tmm2, tmm3, tmm6",
            columns = in(reg) columns,
            stride = in(reg) 64usize,
            rows = in(reg) rows,
            line = in(reg) 192usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(readonly, nostack, preserves_flags),
        );
    }
}
