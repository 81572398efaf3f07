//! Packing of panels from the codes of int8 and nf4 weights: codes of several rows are transposed, four to a
//! register's lane and more, and become numbers in the order of the micro-kernel. Their bits are those of
//! [`unpack`](crate::ops::unpack).

use std::ops::Range;

use super::kernel::{CodedPanel, MOST_COLUMNS, Multiply};
use super::lanes::{Lanes, MOST_LANES, Rows};
use super::packed::Part;
use crate::cpu::double_quant::TABLE;
use crate::cpu::prefetch::{LINE, prefetch_far};
use crate::cpu::vector::Vector;
use crate::cpu::{INT8_LARGEST, NF4_NUMBERS, coded_rows, nf4};
use crate::numerics::format::NF4_BLOCK;
use crate::ops::packed::{PackedPlace, PackedWeight};
use crate::{DType, Format};

/// Bytes of a row that are read at once.
const READ: usize = 16;

/// Smallest scale whose numbers are normal after a hardware conversion to bf16, which makes zeros of smaller
/// ones. They are 0.07 times as large or more, or zero.
const SMALLEST: f32 = 1e-30;

/// Returns the elements of a part that [`pack`] packs, for a kernel of `depth` elements to a lane. Others are
/// packed from unpacked ones.
pub(super) fn body(weight: &PackedWeight, elements: &Range<usize>, depth: usize) -> Range<usize> {
    let none = elements.end..elements.end;
    let (skipped, step) = match weight.format() {
        Format::Int8 => (0, READ),
        Format::Nf4 => {
            // Blocks of all rows begin at the same columns.
            let PackedPlace { width, col, .. } = weight.place(0);
            let first = col + elements.start;
            let skipped = first.next_multiple_of(NF4_BLOCK) - first;
            if !width.is_multiple_of(NF4_BLOCK) || !skipped.is_multiple_of(depth) {
                return none;
            }
            (skipped, 2 * READ)
        }
        _ => return none,
    };
    let start = elements.start + skipped;
    if start >= elements.end { none } else { start..start + (elements.end - start) / step * step }
}

/// Packs a panel of at most `W` rows of a part, whose elements are a [`body`]. Missing rows repeat the last. Meanwhile
/// lines at `ahead` are prefetched.
///
/// # Safety
/// The caller is compiled for the vector's level and runs where it exists; `to` has room for the panel.
#[inline(always)]
pub(super) unsafe fn pack<M: Multiply, const W: usize>(panel: &CodedPanel) {
    // SAFETY: the caller's promise.
    unsafe {
        match (panel.weight.format(), panel.weight.dtype(), M::DEPTH) {
            (Format::Int8, DType::F32, _) => pack_int8::<M, W, WHOLE>(panel),
            (Format::Int8, DType::Bf16, 1) => pack_int8::<M, W, WIDENED>(panel),
            (Format::Int8, DType::Bf16, _) => pack_int8::<M, W, PAIRED>(panel),
            (_, DType::F32, _) => pack_nf4::<M, W, WHOLE>(panel),
            (_, DType::Bf16, 1) => pack_nf4::<M, W, WIDENED>(panel),
            (_, DType::Bf16, _) => pack_nf4::<M, W, PAIRED>(panel),
        }
    }
}

/// f32 in lanes.
const WHOLE: u8 = 0;
/// Rounded to bf16, each in a lane.
const WIDENED: u8 = 1;
/// Rounded to bf16, a pair in a lane.
const PAIRED: u8 = 2;

/// Stores the numbers of neighbours along k, `W` words from lane to lane.
#[inline(always)]
unsafe fn put<M: Multiply, const W: usize, const FORM: u8>(
    first: M::Vector,
    second: M::Vector,
    is_small: bool,
    to: *mut f32,
) {
    let width = M::Vector::LANES;
    // SAFETY: the caller's promise.
    unsafe {
        match FORM {
            WHOLE => {
                first.store(to, width);
                second.store(to.add(W), width);
            }
            WIDENED => {
                first.round_to_bf16().store(to, width);
                second.round_to_bf16().store(to.add(W), width);
            }
            _ if is_small => first.round_to_bf16().pair_with(second.round_to_bf16()).store(to, width),
            _ => M::pair(first, second).store(to, width),
        }
    }
}

/// Returns the words of one pair of neighbours.
const fn words<const W: usize, const FORM: u8>() -> usize {
    if FORM == PAIRED { W } else { 2 * W }
}

/// Prefetches lines, a quarter of the rows in each of four steps that read a line.
#[inline(always)]
fn prefetch_quarter(ahead: &[*const u8; MOST_COLUMNS], first: usize, rows: usize, byte: usize) {
    let quarter = byte % LINE / READ;
    for row in first + quarter * rows / 4..first + (quarter + 1) * rows / 4 {
        prefetch_far(ahead[row].wrapping_add(byte));
    }
}

/// Returns the rows of a part that the lanes of a register hold, from lane `first` of the panel on. Lanes beyond the
/// last row repeat it.
#[inline(always)]
fn rows_of(part: &Part, first: usize, lanes: usize) -> Range<usize> {
    let start = (part.rows.start + first).min(part.rows.end - 1);
    start..part.rows.end.min(start + lanes)
}

#[inline(always)]
unsafe fn pack_int8<M: Multiply, const W: usize, const FORM: u8>(panel: &CodedPanel) {
    let CodedPanel { weight, part, ahead, to } = *panel;
    let lanes = M::Vector::LANES;
    for first in (0..W).step_by(lanes) {
        let mut starts: Rows = [std::ptr::null(); MOST_LANES];
        let (mut scales, mut is_small) = ([0.0f32; MOST_LANES], false);
        let mut places = weight.places(rows_of(part, first, lanes));
        for i in 0..lanes {
            let Some(PackedPlace { bytes, width, row, col, .. }) = places.next() else {
                (starts[i], scales[i]) = (starts[i - 1], scales[i - 1]);
                continue;
            };
            let (codes, scale) = coded_rows::row_of(bytes, Format::Int8, width, row);
            starts[i] = codes[col + part.elements.start..].as_ptr();
            scales[i] = scale;
            is_small |= scale.abs() < SMALLEST && scale != 0.0;
        }
        // SAFETY: the rows hold the elements; the caller promises the room.
        unsafe {
            let scale = M::Vector::load(scales.as_ptr(), lanes);
            let inverse = M::Vector::splat(1.0 / INT8_LARGEST);
            let mut to = to.add(first);
            for k in (0..part.elements.len()).step_by(READ) {
                prefetch_quarter(ahead, first, lanes, k);
                let columns = M::Vector::load_columns(&starts, k);
                for j in 0..4 {
                    for pair in 0..2 {
                        let first = columns[j].signed_byte(2 * pair).mul(scale).mul(inverse);
                        let second = columns[j].signed_byte(2 * pair + 1).mul(scale).mul(inverse);
                        put::<M, W, FORM>(first, second, is_small, to);
                        to = to.add(words::<W, FORM>());
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn pack_nf4<M: Multiply, const W: usize, const FORM: u8>(panel: &CodedPanel) {
    let CodedPanel { weight, part, ahead, to } = *panel;
    let (lanes, table) = (M::Vector::LANES, &*TABLE);
    for first in (0..W).step_by(lanes) {
        let mut units = [nf4::Blocks::NONE; MOST_LANES];
        let mut places = weight.places(rows_of(part, first, lanes));
        for i in 0..lanes {
            units[i] = match places.next() {
                Some(PackedPlace { bytes, width, row, col, .. }) => {
                    nf4::Blocks::from(bytes, (row * width + col + part.elements.start) / NF4_BLOCK)
                }
                None => units[i - 1],
            };
        }
        // SAFETY: the rows hold the elements; the caller promises the room.
        unsafe {
            let mut to = to.add(first);
            for block in (0..part.elements.len()).step_by(NF4_BLOCK) {
                let mut starts: Rows = [std::ptr::null(); MOST_LANES];
                let (mut scales, mut is_small) = ([0.0f32; MOST_LANES], false);
                for i in 0..lanes {
                    (starts[i], scales[i]) = units[i].next(table);
                    is_small |= scales[i].abs() < SMALLEST && scales[i] != 0.0;
                }
                let scale = M::Vector::load(scales.as_ptr(), lanes);
                let reads = (part.elements.len() - block).min(NF4_BLOCK) / (2 * READ);
                for read in 0..reads {
                    prefetch_quarter(ahead, first, lanes, block / 2 + read * READ);
                    let columns = M::Vector::load_columns(&starts, read * READ);
                    for j in 0..4 {
                        for byte in 0..4 {
                            // The first of two weights is in the high half of their byte.
                            let first = columns[j].look_up_bits(8 * byte + 4, &NF4_NUMBERS).mul(scale);
                            let second = columns[j].look_up_bits(8 * byte, &NF4_NUMBERS).mul(scale);
                            put::<M, W, FORM>(first, second, is_small, to);
                            to = to.add(words::<W, FORM>());
                        }
                    }
                }
            }
        }
    }
}
