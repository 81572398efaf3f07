//! A tile of about as many rows as one or two registers have lanes: lanes are rows, and each weight is read once, where
//! it lies, for all of them. Nothing is transposed but the sums.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::few::TURNED_TILES;
use super::in_place::WORDS;
use super::kernel::{Ahead, InPlace, Kernel, Lines, MOST_COLUMNS, Multiply, Panels, Tail, Tile};
use super::outlined::Outlined;
use super::pack::{Packing, Whole, with_packing};
use crate::cpu::prefetch::prefetch_far;
use crate::cpu::vector::Vector;

/// Kernel of `MR` rows in `NT` registers, with the sums of `NC` of `NR` columns at a time. It takes no packed weights.
pub(super) struct Turned<M, const MR: usize, const NT: usize, const NC: usize, const NR: usize>(
    PhantomData<M>,
);

impl<M: Multiply, const MR: usize, const NT: usize, const NC: usize, const NR: usize> Kernel
    for Turned<M, MR, NT, NC, NR>
{
    const ROWS: usize = MR;
    const COLUMNS: usize = NR;
    const DEPTH: usize = M::DEPTH;
    const WORDS: usize = 1;
    const GROUP: usize = 1;
    const BLOCK: usize = 512;
    const TILES_IN_PLACE: usize = TURNED_TILES;

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

    unsafe fn begin() {}

    unsafe fn end((): ()) {}

    #[inline(always)]
    unsafe fn multiply(lanes: usize, a: *const f32, b: *const f32, tile: &Tile, ahead: Ahead, (): &mut ()) {
        ahead.prefetch(0..ahead.length);
        let tail = Tail { lanes: 0, columns: b };
        // SAFETY: the caller's promise: a packed panel holds the lanes of a column NR words apart.
        unsafe { Self::compute::<Whole>(a, &Columns::packed(b, lanes, NR), tail, tile) };
    }

    #[inline(always)]
    unsafe fn multiply_in_place(columns: &InPlace, a: *const f32, tile: &Tile) -> bool {
        // SAFETY: the caller's promise.
        unsafe {
            let of = (columns.panel.source.dtype(), M::DEPTH);
            with_packing!(of, P => Self::in_place::<P>(columns, a, tile))
        }
    }
}

/// Elements of columns, in words: the first of column c is `c · stride` bytes behind `first`, the next `step` words further.
struct Columns {
    first: *const f32,
    stride: usize,
    step: usize,
    elements: usize,
    /// Bytes from a word to what is prefetched with it.
    ahead: Option<usize>,
}

impl Columns {
    /// Creates the columns of a packed panel of `width` columns.
    fn packed(first: *const f32, lanes: usize, width: usize) -> Self {
        Self { first, stride: size_of::<f32>(), step: width, elements: lanes, ahead: None }
    }

    /// Returns the columns from `column` on.
    fn from(&self, column: usize) -> Self {
        Self { first: self.first.wrapping_byte_add(column * self.stride), ..*self }
    }
}

impl<M: Multiply, const MR: usize, const NT: usize, const NC: usize, const NR: usize>
    Turned<M, MR, NT, NC, NR>
{
    #[inline(always)]
    unsafe fn in_place<P: Packing>(columns: &InPlace, a: *const f32, tile: &Tile) -> bool {
        let Some(lines) = columns.lines(NR, P::DEPTH) else { return false };
        let Lines { stride, elements, ahead, .. } = lines;
        let words = Columns { first: lines.first.cast(), stride, step: 1, elements, ahead: Some(ahead) };
        // SAFETY: all rows and elements lie inside the operand; `a` holds MR numbers for each lane.
        unsafe { Self::compute::<P>(a, &words, columns.tail, tile) };
        true
    }

    /// Computes a tile.
    #[inline(always)]
    unsafe fn compute<P: Packing>(a: *const f32, columns: &Columns, tail: Tail, tile: &Tile) {
        let width = M::Vector::LANES;
        let behind = a.wrapping_add(columns.elements.div_ceil(P::DEPTH) * MR);
        let tail = Columns::packed(tail.columns, tail.lanes, NR);
        debug_assert!(MR == NT * width && NC <= width && NR.is_multiple_of(NC));
        let mut values = [const { MaybeUninit::<[f32; MOST_COLUMNS]>::uninit() }; MR];
        // SAFETY: the caller's promise; a row of values has room for NR columns.
        unsafe {
            for column in (0..NR).step_by(NC) {
                let mut sums = [[M::Vector::splat(0.0); NT]; NC];
                Self::add::<P>(a, &columns.from(column), &mut sums);
                Self::add::<Whole>(behind, &tail.from(column), &mut sums);
                for t in 0..NT {
                    let mut square = [M::Vector::splat(0.0); 16];
                    for c in 0..NC {
                        square[c] = sums[c][t];
                    }
                    M::Vector::transpose(&mut square);
                    for i in 0..width {
                        square[i].store(values[t * width + i].as_mut_ptr().cast::<f32>().add(column), NC);
                    }
                }
            }
            M::Vector::store_tile(tile, values.as_ptr().cast());
        }
    }

    /// Adds the products of `NC` columns.
    #[inline(always)]
    unsafe fn add<P: Packing>(mut a: *const f32, columns: &Columns, to: &mut [[M::Vector; NT]; NC]) {
        let width = M::Vector::LANES;
        let Columns { first, stride, step, elements, ahead } = *columns;
        let words = elements / P::READ;
        // SAFETY: the caller's promise.
        unsafe {
            let mut sums = *to;
            for line in (0..words).step_by(WORDS) {
                if let Some(ahead) = ahead {
                    for c in 0..NC {
                        prefetch_far(first.add(line).wrapping_byte_add(c * stride + ahead).cast());
                    }
                }
                for word in line..words.min(line + WORDS) {
                    let from = first.add(word * step);
                    let mut rows = [[M::Vector::splat(0.0); NT]; 2];
                    for lane in 0..P::LANES {
                        for t in 0..NT {
                            rows[lane][t] = M::Vector::load(a.add(lane * MR + t * width), width);
                        }
                    }
                    for c in 0..NC {
                        let lanes = P::lanes_of(M::Vector::splat(*from.byte_add(c * stride)));
                        for lane in 0..P::LANES {
                            for t in 0..NT {
                                sums[c][t] = M::multiply_add(rows[lane][t], lanes[lane], sums[c][t]);
                            }
                        }
                    }
                    a = a.add(P::LANES * MR);
                }
            }
            // Half of a word.
            for element in words * P::READ..elements {
                for c in 0..NC {
                    let from = first.byte_add(c * stride).cast::<P::Element>().add(element);
                    let lane = M::Vector::splat(P::lane(from, 1, 1));
                    for t in 0..NT {
                        sums[c][t] =
                            M::multiply_add(M::Vector::load(a.add(t * width), width), lane, sums[c][t]);
                    }
                }
            }
            *to = sums;
        }
    }
}
