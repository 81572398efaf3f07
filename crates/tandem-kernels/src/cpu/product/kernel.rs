//! The innermost loop: one tile of the result, held in registers.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::lanes::Lanes;
use crate::bf16;
use crate::cpu::vector::Vector;

/// How a packed lane of one factor is multiplied by one of the other. A lane is 32 bits: one f32, or a pair of bf16.
pub(super) trait Multiply {
    type Vector: Lanes;
    /// Elements along k in one lane.
    const DEPTH: usize;

    /// `c + a · b`, lane by lane.
    ///
    /// # Safety
    /// The processor must have the vector's level.
    unsafe fn multiply_add(a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
}

/// One f32 a lane.
pub(super) struct Singles<V>(PhantomData<V>);

impl<V: Lanes> Multiply for Singles<V> {
    type Vector = V;
    const DEPTH: usize = 1;

    #[inline(always)]
    unsafe fn multiply_add(a: V, b: V, c: V) -> V {
        a.mul_add(b, c)
    }
}

/// A pair of bf16 a lane.
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
}

/// What a tile is added to, and where it goes. Addresses are those of the tile's first element.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Rows and columns to write; the tile in registers may be larger.
    pub rows: usize,
    pub cols: usize,
    /// Added to the tile, if not null: what was there, or the residual. Rows are `add_stride` apart.
    pub add: *const f32,
    pub add_stride: usize,
    /// One number per column, added to every row, if not null.
    pub bias: *const f32,
    pub out: Out,
    pub out_stride: usize,
}

/// The type of the result.
#[derive(Clone, Copy)]
pub(super) enum Out {
    F32(*mut f32),
    Bf16(*mut bf16),
}

/// `out = add + bias + Σ a · b` over `lanes` packed lanes: `MR` rows from `a`, `NV` vectors of columns from `b`.
///
/// # Safety
/// The caller is compiled for the vector's level and runs where it exists; `a` and `b` hold `lanes` groups of `MR` and
/// of `NV` vectors; the tile's addresses are valid for its rows and columns.
#[inline(always)]
pub(super) unsafe fn multiply<M: Multiply, const MR: usize, const NV: usize>(
    lanes: usize,
    mut a: *const f32,
    mut b: *const f32,
    tile: &Tile,
) {
    let width = M::Vector::LANES;
    // SAFETY: the caller's promise.
    unsafe {
        let mut sums = [[M::Vector::splat(0.0); NV]; MR];
        for _ in 0..lanes {
            let mut columns = [M::Vector::splat(0.0); NV];
            for j in 0..NV {
                columns[j] = M::Vector::load(b.add(j * width), width);
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
        // Through memory, so that the loops above are all that touches the array of sums: it then stays in registers.
        let mut values = [const { MaybeUninit::<[f32; MOST_COLUMNS]>::uninit() }; MR];
        for i in 0..MR {
            for j in 0..NV {
                sums[i][j].store(values[i].as_mut_ptr().cast::<f32>().add(j * width), width);
            }
        }
        tile.store::<M::Vector>(values.as_ptr().cast());
    }
}

/// Columns of the widest tile.
const MOST_COLUMNS: usize = 32;

impl Tile {
    /// `out = add + bias + values`, rows of `values` [`MOST_COLUMNS`] apart.
    ///
    /// # Safety
    /// As [`multiply`].
    #[inline(always)]
    unsafe fn store<V: Lanes>(&self, values: *const f32) {
        for i in 0..self.rows {
            for first in (0..self.cols).step_by(V::LANES) {
                let count = V::LANES.min(self.cols - first);
                // SAFETY: the caller's promise.
                unsafe {
                    let mut sum = V::load(values.add(i * MOST_COLUMNS + first), V::LANES);
                    if !self.add.is_null() {
                        sum = sum.add(V::load(self.add.add(i * self.add_stride + first), count));
                    }
                    if !self.bias.is_null() {
                        sum = sum.add(V::load(self.bias.add(first), count));
                    }
                    let offset = i * self.out_stride + first;
                    match self.out {
                        Out::F32(out) => sum.store(out.add(offset), count),
                        Out::Bf16(out) => sum.store_bf16(out.add(offset), count),
                    }
                }
            }
        }
    }
}
