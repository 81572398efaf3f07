//! A tile of very few rows: the second factor goes from memory through registers, and is packed nowhere.

use super::kernel::{Multiply, Panels, Sums, Tile};
use super::pack::{Packing, Paired, Whole, Widened};
use crate::DType;
use crate::cpu::prefetch::prefetch_far;
use crate::cpu::vector::Vector;

/// Computes `out = add + bias + Σ a · b` as [`Kernel::multiply`](super::kernel::Kernel::multiply), of a panel
/// of the second factor that is not packed, and returns whether it did: of whole squares of rows that run
/// along k.
///
/// # Safety
/// As there; `panels` are one panel.
#[inline(always)]
pub(super) unsafe fn multiply<M: Multiply, const MR: usize, const NV: usize>(
    panels: &Panels,
    a: *const f32,
    tile: &Tile,
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        match (panels.source.dtype(), M::DEPTH) {
            (DType::F32, _) => multiply_as::<M, Whole, MR, NV>(panels, a, tile),
            (DType::Bf16, 1) => multiply_as::<M, Widened, MR, NV>(panels, a, tile),
            (DType::Bf16, _) => multiply_as::<M, Paired, MR, NV>(panels, a, tile),
        }
    }
}

#[inline(always)]
unsafe fn multiply_as<M: Multiply, P: Packing, const MR: usize, const NV: usize>(
    panels: &Panels,
    a: *const f32,
    tile: &Tile,
) -> bool {
    let width = M::Vector::LANES;
    let (source, square) = (panels.source, width * P::READ);
    let elements = panels.lanes.start * P::DEPTH..source.depth().min(panels.lanes.end * P::DEPTH);
    if source.is_transposed() || panels.rows.len() != NV * width || !elements.len().is_multiple_of(square) {
        return false;
    }
    let stride = source.stride();
    // SAFETY: all rows and elements lie inside the operand; `a` holds MR numbers for each lane.
    unsafe {
        let first = source.pointer::<P::Element>().add(panels.rows.start * stride + elements.start);
        let mut sums = [[M::Vector::splat(0.0); NV]; MR];
        // One register of columns after the other: squares of several would not fit the registers.
        for j in 0..NV {
            let (first, mut a) = (first.add(j * width * stride), a);
            let mut of_rows = [M::Vector::splat(0.0); MR];
            for k in (0..elements.len()).step_by(square) {
                let mut lanes = [M::Vector::splat(0.0); 16];
                for i in 0..width {
                    let from = first.add(i * stride + k);
                    // The next panel's.
                    prefetch_far(from.wrapping_add(NV * width * stride).cast());
                    lanes[i] = M::Vector::load(from.cast(), width);
                }
                M::Vector::transpose(&mut lanes);
                for l in 0..width {
                    let read = P::lanes_of(lanes[l]);
                    for half in 0..P::LANES {
                        for i in 0..MR {
                            of_rows[i] = M::multiply_add(M::Vector::splat(*a.add(i)), read[half], of_rows[i]);
                        }
                        a = a.add(MR);
                    }
                }
            }
            for i in 0..MR {
                sums[i][j] = of_rows[i];
            }
        }
        Sums(sums).store(tile);
    }
    true
}
