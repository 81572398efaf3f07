//! A tile of very few rows: the second factor goes from memory through registers, and is packed nowhere.

use std::mem::MaybeUninit;

use super::kernel::{MOST_COLUMNS, Multiply, Panels, Sums, Tail, Tile};
use super::pack::{Packing, Paired, Whole, Widened};
use crate::DType;
use crate::cpu::prefetch::{LINE, prefetch_far};
use crate::cpu::vector::Vector;

/// 32-bit words of a cache line.
pub(super) const WORDS: usize = LINE / size_of::<f32>();

/// Computes `out = add + bias + Σ a · b` as [`Kernel::multiply`](super::kernel::Kernel::multiply), of a panel
/// of the second factor of which the tail alone is packed, and returns whether it did: of rows that run along k.
/// Lines from `ahead` on, of as many rows, are prefetched.
///
/// # Safety
/// As there; `panels` are one panel.
#[inline(always)]
pub(super) unsafe fn multiply<M: Multiply, const MR: usize, const NV: usize>(
    panels: &Panels,
    tail: Tail,
    a: *const f32,
    tile: &Tile,
    ahead: *const u8,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        match (panels.source.dtype(), M::DEPTH) {
            (DType::F32, _) => multiply_as::<M, Whole, MR, NV>(panels, tail, a, tile, ahead),
            (DType::Bf16, 1) => multiply_as::<M, Widened, MR, NV>(panels, tail, a, tile, ahead),
            (DType::Bf16, _) => multiply_as::<M, Paired, MR, NV>(panels, tail, a, tile, ahead),
        }
    }
}

#[inline(always)]
unsafe fn multiply_as<M: Multiply, P: Packing, const MR: usize, const NV: usize>(
    panels: &Panels,
    tail: Tail,
    a: *const f32,
    tile: &Tile,
    ahead: *const u8,
) -> bool {
    let width = M::Vector::LANES;
    let (source, rows) = (panels.source, &panels.rows);
    let elements = panels.elements(P::DEPTH);
    if source.is_transposed() || rows.len() != NV * width {
        return false;
    }
    // SAFETY: all rows and elements lie inside the operand; `a` holds MR numbers for each lane.
    unsafe {
        let first = source.pointer::<P::Element>().add(rows.start * source.stride() + elements.start);
        let stride = source.stride() * size_of::<P::Element>();
        let ahead = ahead.addr().wrapping_sub(first.addr());
        let mut sums = [[M::Vector::splat(0.0); NV]; MR];
        if is_alone::<M, P>() {
            for j in 0..NV {
                let from = first.byte_add(j * width * stride);
                let of_rows = add::<M, P, MR, 1>(from, stride, elements.len(), a, ahead);
                for i in 0..MR {
                    sums[i][j] = of_rows[i][0];
                }
            }
        } else {
            sums = add::<M, P, MR, NV>(first, stride, elements.len(), a, ahead);
        }
        let mut a = a.add(elements.len().div_ceil(P::DEPTH) * MR);
        for lane in 0..tail.lanes {
            let from = tail.columns.add(lane * NV * width);
            let mut columns = [M::Vector::splat(0.0); NV];
            for j in 0..NV {
                columns[j] = M::Vector::load(from.add(j * width), width);
            }
            for i in 0..MR {
                let row = M::Vector::splat(*a.add(i));
                for j in 0..NV {
                    sums[i][j] = M::multiply_add(row, columns[j], sums[i][j]);
                }
            }
            a = a.add(MR);
        }
        Sums(sums).store(tile);
    }
    true
}

/// Returns whether the sums of a register of columns end before the next register's begin, so that few rows are read at
/// a time: if one chain of additions is no slower than transposing what it takes.
#[inline(always)]
const fn is_alone<M: Multiply, P: Packing>() -> bool {
    M::Vector::LANES == 16 || P::READ == 1
}

/// Returns the sums of `NV` registers of columns, which take turns. Rows are `stride` bytes apart; lines `ahead` bytes
/// further are prefetched.
#[inline(always)]
unsafe fn add<M: Multiply, P: Packing, const MR: usize, const NV: usize>(
    first: *const P::Element,
    stride: usize,
    elements: usize,
    mut a: *const f32,
    ahead: usize,
) -> [[M::Vector; NV]; MR] {
    let width = M::Vector::LANES;
    // Words of a row that are read at once.
    let step = if NV == 1 { width } else { WORDS };
    let whole = elements / P::READ / step * step;
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[M::Vector::splat(0.0); NV]; MR];
        for word in (0..whole).step_by(step) {
            let from = first.cast::<f32>().add(word);
            let mut words = [const { MaybeUninit::<[f32; MOST_COLUMNS]>::uninit() }; WORDS];
            for j in 0..NV {
                for part in 0..step / width {
                    let mut square = [M::Vector::splat(0.0); 16];
                    for i in 0..width {
                        let from = from.byte_add((j * width + i) * stride).add(part * width);
                        if part == 0 {
                            prefetch_far(from.wrapping_byte_add(ahead).cast());
                        }
                        square[i] = M::Vector::load(from, width);
                    }
                    M::Vector::transpose(&mut square);
                    for l in 0..width {
                        let to = words[part * width + l].as_mut_ptr().cast::<f32>();
                        square[l].store(to.add(j * width), width);
                    }
                }
            }
            // Each sum waits for the one before it; those of other rows and columns do not.
            for l in 0..step {
                let mut columns = [[M::Vector::splat(0.0); 2]; NV];
                for j in 0..NV {
                    let from = words[l].as_ptr().cast::<f32>();
                    columns[j] = P::lanes_of(M::Vector::load(from.add(j * width), width));
                }
                for lane in 0..P::LANES {
                    for i in 0..MR {
                        let row = M::Vector::splat(*a.add(i));
                        for j in 0..NV {
                            sums[i][j] = M::multiply_add(row, columns[j][lane], sums[i][j]);
                        }
                    }
                    a = a.add(MR);
                }
            }
        }
        // Fewer words than a step.
        for element in (whole * P::READ..elements).step_by(P::DEPTH) {
            for j in 0..NV {
                let mut lanes = [0.0; 16];
                for i in 0..width {
                    let from = first.byte_add((j * width + i) * stride).add(element);
                    lanes[i] = P::lane(from, 1, elements - element);
                }
                let columns = M::Vector::load(lanes.as_ptr(), width);
                for i in 0..MR {
                    sums[i][j] = M::multiply_add(M::Vector::splat(*a.add(i)), columns, sums[i][j]);
                }
            }
            a = a.add(MR);
        }
        sums
    }
}
