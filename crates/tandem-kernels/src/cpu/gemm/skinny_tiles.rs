//! bf16 GEMMs with one short dimension on tile registers. The large factor is read in place, or two
//! of its rows are interleaved at a time; the short one is packed once.

use std::arch::x86_64::*;

use super::amx::Tiles;
use super::blocked::Depth;
use super::kernel::{Kernel, Panels};
use super::{Operand, Product};
use crate::bf16;
use crate::cpu::amx::{self, SIDE, SQUARE};
use crate::cpu::prefetch::prefetch;
use crate::cpu::rows::RowsMut;
use crate::cpu::{Cpu, scratch};
use crate::{Element, View};

/// Words of a packed group of 16 lanes of 32 rows.
const GROUP: usize = SIDE * SQUARE;

/// Returns the lanes along k, in whole groups.
fn lanes(depth: usize) -> usize {
    depth.div_ceil(2).next_multiple_of(SIDE)
}

/// Returns the words of a packed short factor.
pub(super) fn packed_len(rows: usize, depth: usize) -> usize {
    rows.next_multiple_of(SQUARE) * lanes(depth)
}

/// Packs a short factor, as first or second factor. Padding rows are unspecified.
pub(super) fn pack(cpu: &Cpu, operand: &Operand, is_first: bool, to: &mut [f32]) {
    /// Lanes of a block.
    const LANES: usize = 256;
    let (rows, lanes) = (operand.rows(), lanes(operand.depth()));
    let to = RowsMut::from_slice(&mut to[..packed_len(operand.rows(), operand.depth())]);
    cpu.parallel_ranges(lanes, LANES, |_, block| {
        let (to, _) = to.address(0, block.start * SQUARE);
        let panels = Panels {
            source: operand,
            rows: 0..rows,
            lanes: block,
            to,
            stride: lanes * SQUARE,
            is_in_cache: false,
        };
        // SAFETY: blocks are disjoint groups of each panel; the caller runs where tiles are.
        unsafe { compiled(panels, is_first) };
    });
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn compiled(panels: Panels, is_first: bool) {
        // SAFETY: the caller's promise.
        unsafe {
            if is_first {
                Tiles::<1>::pack_rows(panels);
            } else {
                Tiles::<1>::pack_columns(panels);
            }
        }
    }
}

/// Elements along k interleaved at once; with the sums they stay in the first-level cache.
const DEPTH: usize = 128;

/// Returns the words that [`reduce_columns`] needs beside the sums.
pub(super) const fn pairs_len(columns: usize) -> usize {
    DEPTH / 2 * columns
}

/// Writes the sums over `k` rows of `from` to the front of `buffer`: `r` rows, padded to whole
/// squares, `distance` apart, followed by [`pairs_len`] words of work space.
///
/// # Safety
/// The CPU has tiles; `a` is packed as a first factor; the columns exist; `distance` is a multiple
/// of [`SQUARE`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn reduce_columns(
    r: usize,
    k: usize,
    a: *const f32,
    (from, stride): (*const bf16, usize),
    columns: usize,
    distance: usize,
    buffer: &mut [f32],
) {
    let rows = r.next_multiple_of(SQUARE);
    let (sums, pairs) = buffer.split_at_mut(rows * distance);
    let (sums, pairs) = (sums.as_mut_ptr(), pairs.as_mut_ptr());
    // SAFETY: the caller's promise; the buffer holds both.
    unsafe {
        amx::begin();
        for start in (0..k).step_by(DEPTH) {
            let depth = DEPTH.min(k - start);
            let groups = depth.div_ceil(SQUARE);
            for pair in 0..groups * SIDE {
                let row = start + 2 * pair;
                let next = from.wrapping_add((row + DEPTH) * stride);
                for column in (0..columns).step_by(SQUARE) {
                    prefetch(next.wrapping_add(column).cast());
                    prefetch(next.wrapping_add(stride + column).cast());
                    let mask = u32::MAX >> (SQUARE - SQUARE.min(columns - column));
                    let load = |row: usize| {
                        if row < k {
                            _mm512_maskz_loadu_epi16(mask, from.add(row * stride + column).cast())
                        } else {
                            _mm512_setzero_si512()
                        }
                    };
                    let words = amx::pairs(load(row), load(row + 1));
                    for (i, words) in words.into_iter().enumerate() {
                        _mm512_storeu_epi32(pairs.add(pair * distance + column + i * SIDE).cast(), words);
                    }
                }
            }
            for i in (0..rows).step_by(SQUARE) {
                let a = a.add(i * lanes(k) + start / SQUARE * GROUP);
                for j in (0..columns).step_by(SQUARE) {
                    let to = sums.add(i * distance + j);
                    if start == 0 {
                        amx::clear();
                    } else {
                        amx::load((to, distance));
                    }
                    for group in 0..groups {
                        let b = pairs.add(group * SIDE * distance + j);
                        amx::multiply((a.add(group * GROUP), SIDE), (b, distance));
                    }
                    amx::store(to, distance);
                }
            }
        }
        amx::end();
    }
}

/// Returns whether [`project`] takes the GEMM: it loads tiles from the first factor in place. A few
/// rows go to [`super::blocked`], with the same bits.
pub(super) fn projects(product: &Product) -> bool {
    let a = &product.a;
    let is_of_whole_tiles =
        a.rows() >= SQUARE && a.depth().is_multiple_of(SQUARE) && a.stride().is_multiple_of(2);
    is_of_whole_tiles && !product.accumulate && product.term.is_none()
}

/// Computes `c[m, n] = a[m, k] · b[n, k]ᵀ` with a short n, each element summed as
/// [`super::blocked`] does.
pub(super) fn project<C: Element>(cpu: &Cpu, product: &mut Product) {
    let ((m, n), k) = (product.c.shape(), product.a.depth());
    let a = product.a.view();
    let right = product.b;
    let c = RowsMut::<C>::new(product.c.reborrow());
    let width = n.next_multiple_of(SQUARE);
    scratch::with_f32(packed_len(n, k), |b| {
        pack(cpu, &right, false, b);
        let b = &*b;
        cpu.parallel_ranges(m, SQUARE, |_, rows| {
            scratch::with_f32(SQUARE * (width + SQUARE), |sums| {
                // The last square begins earlier, so that all its rows exist; rows before are not
                // written again.
                let first = rows.start.min(m - SQUARE);
                // SAFETY: tiles are there; 32 rows from the first exist.
                unsafe { project_square(k, a, first, b, sums, width) };
                for row in rows {
                    // SAFETY: blocks are disjoint rows of the result.
                    let to = unsafe { c.part(row, 0, n) };
                    for (to, sum) in to.iter_mut().zip(&sums[(row - first) * width..]) {
                        *to = C::from_f32(*sum);
                    }
                }
            });
        });
    });
}

/// Writes the sums `[32, width]` to the front of `sums`, followed by 32 × 32 words of work space.
///
/// # Safety
/// The CPU has tiles; 32 rows exist from `first` on; `b` is packed as a second factor.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn project_square(k: usize, a: View, first: usize, b: &[f32], sums: &mut [f32], width: usize) {
    /// Prefetch distance in words.
    const AHEAD: usize = 8 * SIDE;
    let (row, depth) = (a.stride() / 2, Depth::new::<Tiles<1>>(k, 0));
    let (sums, block_sums) = sums.split_at_mut(SQUARE * width);
    // SAFETY: the caller's promise.
    unsafe {
        let a = a.pointer_of::<bf16>().add(first * a.stride()).cast::<f32>();
        amx::begin();
        for j in (0..width).step_by(SQUARE) {
            for block in 0..depth.blocks {
                amx::clear();
                for lane in depth.lanes(block..block + 1).step_by(SIDE) {
                    let a = a.add(lane);
                    if j == 0 {
                        (0..SQUARE).for_each(|i| prefetch(a.wrapping_add(i * row + AHEAD).cast()));
                    }
                    amx::multiply((a, row), (b.as_ptr().add(j * lanes(k) + lane * SQUARE), SQUARE));
                }
                if block == 0 {
                    amx::store(sums.as_mut_ptr().add(j), width);
                    continue;
                }
                amx::store(block_sums.as_mut_ptr(), SQUARE);
                for (sums, block_sums) in sums.chunks_exact_mut(width).zip(block_sums.chunks_exact(SQUARE)) {
                    sums[j..].iter_mut().zip(block_sums).for_each(|(sum, more)| *sum += more);
                }
            }
        }
        amx::end();
    }
}
