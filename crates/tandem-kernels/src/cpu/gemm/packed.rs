//! Parts of a packed second factor, and those that are unpacked into a cache before they are ordered for the
//! kernel: all that [`codes`](super::codes) does not order by itself.

use std::ops::Range;

use super::{Operand, Product};
use crate::cpu::double_quant::TABLE;
use crate::cpu::rows::RowsMut;
use crate::cpu::{Cpu, Isa, coded_rows, convert, nf4, scratch};
use crate::numerics::format::{NF4_UNIT, NF4_UNIT_LEN};
use crate::ops::packed::{PackedPlace, PackedWeight};
use crate::{Element, Format, View, bf16, with_element};

/// Unpacks neighbours in a row.
fn unpack<E: Element>(isa: Isa, format: Format, place: &PackedPlace, cols: Range<usize>, values: &mut [E]) {
    let PackedPlace { bytes, width, row, col, .. } = *place;
    let first = col + cols.start;
    match format {
        Format::Int8 | Format::Fp8 => {
            let (codes, scale) = coded_rows::row_of(bytes, format, width, row);
            coded_rows::decode(isa, format, &codes[first..][..cols.len()], scale, values);
        }
        // SAFETY: the weights lie in the piece.
        Format::Nf4 => unsafe { nf4::decode(isa, bytes, &TABLE, row * width + first, values) },
        Format::F32 | Format::Bf16 => {
            let dtype = format.dtype().expect("these formats are plain");
            let plain = bytes[row * width * dtype.size()..][..width * dtype.size()].as_ptr();
            // SAFETY: the row lies in the piece, which begins at a cache line.
            let plain = unsafe { View::from_pointer(plain, 1, width, dtype) };
            let plain = plain.col_range(first..first + cols.len());
            with_element!(dtype, S => convert::convert(isa, plain.row::<S>(0), values));
        }
    }
}

/// Returns the address of a row's element; in nf4, of the byte that holds its code.
pub(super) fn address(format: Format, place: &PackedPlace, element: usize) -> *const u8 {
    let PackedPlace { bytes, width, row, col, .. } = *place;
    let col = col + element;
    let at = row * width + col;
    let offset = match format {
        Format::Int8 | Format::Fp8 => row * format.unit_len(width) + col,
        Format::Nf4 => at / NF4_UNIT * NF4_UNIT_LEN + at % NF4_UNIT / 2,
        Format::F32 => at * size_of::<f32>(),
        Format::Bf16 => at * size_of::<bf16>(),
    };
    bytes.as_ptr().wrapping_add(offset)
}

/// Part of a packed factor: rows, and elements along k.
pub(super) struct Part {
    pub rows: Range<usize>,
    pub elements: Range<usize>,
}

/// Unpacks a part to `to`, rows `stride` elements apart.
///
/// # Safety
/// There is room for the part's rows, of the weight's type.
pub(super) unsafe fn unpack_part(isa: Isa, weight: &PackedWeight, part: &Part, to: *mut u8, stride: usize) {
    with_element!(weight.dtype(), E => {
        for (index, place) in weight.places(part.rows.clone()).enumerate() {
            // SAFETY: the caller's promise.
            let values = unsafe {
                std::slice::from_raw_parts_mut(to.cast::<E>().add(index * stride), part.elements.len())
            };
            unpack(isa, weight.format(), &place, part.elements.clone(), values);
        }
    });
}

/// Computes a product whose second factor is unpacked as a whole.
pub(super) fn run_unpacked(cpu: &Cpu, product: Product, weight: &PackedWeight) {
    let (rows, cols) = (weight.rows(), weight.cols());
    scratch::with_bytes(rows * cols * weight.dtype().size(), |all| {
        let all = all.as_ptr();
        with_element!(weight.dtype(), E => {
            // SAFETY: the scratch memory is initialised, this long and aligned, and used by this call alone.
            let values = unsafe { std::slice::from_raw_parts_mut(all.cast::<E>(), rows * cols) };
            let values = RowsMut::from_slice(values);
            cpu.for_rows((rows, cols), |row| {
                // SAFETY: rows are disjoint.
                let values = unsafe { values.part(0, row * cols, cols) };
                unpack(cpu.isa(), weight.format(), &weight.place(row), 0..cols, values);
            });
        });
        // SAFETY: written above, and no longer.
        let unpacked = unsafe { View::from_pointer(all, rows, cols, weight.dtype()) };
        Product { b: Operand::rows_of(unpacked), ..product }.run(cpu);
    });
}
