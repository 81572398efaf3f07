//! AMX tile registers: one instruction multiplies 16 rows of 32 bf16 by 16 columns and adds to 16 ×
//! 16 f32 sums.
//!
//! Four of the eight registers hold sums, a square of 32 × 32; two hold rows of the first factor,
//! two hold columns of the second. A row of the first factor is 32 bf16, neighbours along k, in 16
//! words. A row of the second factor has one word per column: a pair of neighbours along k.
//! Distances between rows are in words.
//!
//! # Safety
//! For all functions: the process was granted tiles ([`super::Isa::Amx`]). Between [`begin`] and
//! [`end`] nothing else uses tile registers, so sums stay in them between pieces of assembly.

use std::arch::asm;
use std::arch::x86_64::*;

/// Rows of a tile, and words per row.
pub(super) const SIDE: usize = 16;

/// Rows, columns and elements along k of four tiles.
pub(super) const SQUARE: usize = 2 * SIDE;

/// Configures eight tiles of 16 rows of 64 bytes.
#[inline(always)]
pub(super) unsafe fn begin() {
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        bytes_per_row: [u16; 16],
        rows: [u8; 16],
    }
    static EIGHT: Configuration = {
        let mut eight = Configuration {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            bytes_per_row: [0; 16],
            rows: [0; 16],
        };
        let mut tile = 0;
        while tile < 8 {
            eight.bytes_per_row[tile] = 64;
            eight.rows[tile] = 16;
            tile += 1;
        }
        eight
    };
    // SAFETY: the caller's promise; the configuration is a valid one of 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const EIGHT, options(nostack, preserves_flags)) };
}

/// Releases the tiles.
#[inline(always)]
pub(super) unsafe fn end() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
}

/// Zeroes the sums.
#[inline(always)]
pub(super) unsafe fn clear() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(nomem, nostack, preserves_flags),
        );
    }
}

/// Loads the sums from 32 rows of 32 numbers.
#[inline(always)]
pub(super) unsafe fn load((from, row): (*const f32, usize)) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm0, [{from} + {row}]",
            "tileloadd tmm1, [{from} + {row} + 64]",
            "tileloadd tmm2, [{below} + {row}]",
            "tileloadd tmm3, [{below} + {row} + 64]",
            from = in(reg) from,
            below = in(reg) from.add(SIDE * row),
            row = in(reg) row * size_of::<f32>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            options(readonly, nostack, preserves_flags),
        );
    }
}

/// Adds the product of 32 rows at `a` and 32 columns at `b`, 32 elements deep. Rows bypass the
/// first-level cache, which is left to the columns: panels of both do not fit.
#[inline(always)]
pub(super) unsafe fn multiply((a, a_row): (*const f32, usize), (b, b_row): (*const f32, usize)) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tileloadd tmm6, [{b} + {b_row}]",
            "tileloaddt1 tmm4, [{a} + {a_row}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b} + {b_row} + 64]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloaddt1 tmm5, [{below} + {a_row}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            a = in(reg) a,
            below = in(reg) a.add(SIDE * a_row),
            b = in(reg) b,
            a_row = in(reg) a_row * size_of::<f32>(),
            b_row = in(reg) b_row * size_of::<f32>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(readonly, nostack, preserves_flags),
        );
    }
}

/// Stores the sums as 32 rows of 32 numbers.
#[inline(always)]
pub(super) unsafe fn store(to: *mut f32, row: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!(
            "tilestored [{to} + {row}], tmm0",
            "tilestored [{to} + {row} + 64], tmm1",
            "tilestored [{below} + {row}], tmm2",
            "tilestored [{below} + {row} + 64], tmm3",
            to = in(reg) to,
            below = in(reg) to.add(SIDE * row),
            row = in(reg) row * size_of::<f32>(),
            options(nostack, preserves_flags),
        );
    }
}

/// Computes `c[m, n] = a[m, k] · b[k, n]`, or `+=` if `accumulate`, for small matrices in the
/// cache. `a` has rows of k / 2 words, `b` and `c` rows of n. All sizes are multiples of
/// [`SQUARE`].
#[inline(always)]
pub(super) unsafe fn product(
    [m, n, k]: [usize; 3],
    (a, a_row): (*const f32, usize),
    (b, b_row): (*const f32, usize),
    (c, c_row): (*mut f32, usize),
    accumulate: bool,
) {
    debug_assert!([m, n, k].iter().all(|size| size.is_multiple_of(SQUARE)));
    for i in (0..m).step_by(SQUARE) {
        for j in (0..n).step_by(SQUARE) {
            // SAFETY: the caller's promise: the squares lie inside the matrices.
            unsafe {
                let to = c.add(i * c_row + j);
                if accumulate {
                    load((to, c_row));
                } else {
                    clear();
                }
                for word in (0..k / 2).step_by(SIDE) {
                    multiply((a.add(i * a_row + word), a_row), (b.add(word * b_row + j), b_row));
                }
                store(to, c_row);
            }
        }
    }
}

/// Interleaves 32 elements of two rows, neighbours along k, into words of the second factor: the
/// first 16 and the others.
#[inline(always)]
pub(super) unsafe fn pairs(first: __m512i, second: __m512i) -> [__m512i; 2] {
    const fn places(start: u16) -> [u16; 32] {
        let mut places = [0; 32];
        let mut i = 0;
        while i < 32 {
            places[i] = start + i as u16 / 2 + 32 * (i as u16 % 2);
            i += 1;
        }
        places
    }
    static PLACES: [[u16; 32]; 2] = [places(0), places(16)];
    // SAFETY: the caller has the level; the tables are 64 bytes each.
    unsafe {
        PLACES.each_ref().map(|places| {
            let places = _mm512_loadu_epi16(places.as_ptr().cast());
            _mm512_permutex2var_epi16(first, places, second)
        })
    }
}

/// Rounds 32 numbers to bf16: to nearest, ties to even; below 2⁻¹²⁶ to zero.
#[inline(always)]
pub(super) unsafe fn round([first, second]: [__m512; 2]) -> __m512i {
    // SAFETY: the caller has the level; both types are 512 plain bits.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first)) }
}
