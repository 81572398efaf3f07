//! A tile of very few rows: the second factor goes from memory through registers, and is packed nowhere.

use std::mem::MaybeUninit;

use super::kernel::{InPlace, Lines, MOST_COLUMNS, Multiply, Sums, Tile};
use super::pack::{Packing, with_packing};
use crate::cpu::prefetch::{LINE, prefetch_far};
use crate::cpu::vector::Vector;

/// 32-bit words of a cache line.
pub(super) const WORDS: usize = LINE / size_of::<f32>();

/// Computes `out = add + bias + Σ a · b` as [`Kernel::multiply`](super::kernel::Kernel::multiply), of a panel of the
/// second factor where it lies, and returns whether it did: of rows that run along k.
///
/// # Safety
/// As there; it is one panel.
#[inline(always)]
pub(super) unsafe fn multiply<M: Multiply, const MR: usize, const NV: usize>(
    columns: &InPlace,
    a: *const f32,
    tile: &Tile,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let of = (columns.panel.source.dtype(), M::DEPTH);
        with_packing!(of, P => multiply_as::<M, P, MR, NV>(columns, a, tile))
    }
}

#[inline(always)]
unsafe fn multiply_as<M: Multiply, P: Packing, const MR: usize, const NV: usize>(
    columns: &InPlace,
    a: *const f32,
    tile: &Tile,
) -> bool {
    let (width, tail) = (M::Vector::LANES, columns.tail);
    let Some(lines) = columns.lines(NV * width, P::DEPTH) else { return false };
    // SAFETY: all rows and elements lie inside the operand; `a` holds MR numbers for each lane.
    unsafe {
        let mut sums = [[M::Vector::splat(0.0); NV]; MR];
        if is_alone::<M, P>() {
            for j in 0..NV {
                let first = lines.first.add(j * width * lines.stride);
                let of_rows = add::<M, P, MR, 1>(&Lines { first, ..lines }, a);
                for i in 0..MR {
                    sums[i][j] = of_rows[i][0];
                }
            }
        } else {
            sums = add::<M, P, MR, NV>(&lines, a);
        }
        let mut a = a.add(lines.elements.div_ceil(P::DEPTH) * MR);
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

/// Returns the sums of `NV` registers of columns, which take turns.
#[inline(always)]
unsafe fn add<M: Multiply, P: Packing, const MR: usize, const NV: usize>(
    lines: &Lines,
    mut a: *const f32,
) -> [[M::Vector; NV]; MR] {
    let Lines { stride, elements, ahead, .. } = *lines;
    let first = lines.first.cast::<P::Element>();
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
