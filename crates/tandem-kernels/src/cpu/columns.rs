//! Column factors and column dot products; bound by memory.

use super::Cpu;
use super::rows::RowsMut;
use super::vector::{for_lanes, vector_kernel};
use crate::{Element, View, ViewMut, with_element};

/// Computes `y = x ⊙ factors + bias`, in place if there is no `x`.
pub(crate) fn scale_columns(cpu: &Cpu, x: Option<View>, factors: View, bias: Option<View>, y: ViewMut) {
    let shape = y.shape();
    let (factors, bias) = (factors.row::<f32>(0), bias.map_or(&[][..], |bias| bias.row::<f32>(0)));
    with_element!(y.dtype(), Y => {
        let y = RowsMut::<Y>::new(y);
        with_element!(x.map_or(Y::DTYPE, |x| x.dtype()), X => cpu.for_parts(shape, |row, cols| {
            let (factors, bias) = (&factors[cols.clone()], bias.get(cols.clone()).unwrap_or_default());
            // SAFETY: parts are disjoint; the slices have one length. Without `x`, X is Y.
            unsafe {
                let y = y.part(row, cols.start, cols.len());
                let x = x.map_or(y.as_ptr().cast(), |x| x.row::<X>(row)[cols].as_ptr());
                scale_row::<X, Y>(cpu.isa(), x, factors, bias, y.as_mut_ptr());
            }
        }));
    });
}

vector_kernel! {
    /// Scales a row. `x` and `y` are as long as `factors` and may coincide; `bias` may be empty.
    unsafe fn scale_row<V: Vector, X: Element, Y: Element>(x: *const X, factors: &[f32], bias: &[f32], y: *mut Y) {
        // SAFETY: the caller's promise.
        unsafe {
            if bias.is_empty() {
                for_lanes!(V, factors.len(), |i, n| {
                    V::get(x.add(i), n).mul(V::load(factors.as_ptr().add(i), n)).put(y.add(i), n);
                });
            } else {
                for_lanes!(V, factors.len(), |i, n| {
                    let (factor, bias) = (V::load(factors.as_ptr().add(i), n), V::load(bias.as_ptr().add(i), n));
                    V::get(x.add(i), n).mul_add(factor, bias).put(y.add(i), n);
                });
            }
        }
    }
}

pub(crate) fn column_dots(cpu: &Cpu, a: View, b: View, out: ViewMut, add: bool) {
    /// Columns of a block.
    const COLUMNS: usize = 256;
    let (rows, cols) = a.shape();
    let out = RowsMut::<f32>::new(out);
    with_element!(a.dtype(), A => with_element!(b.dtype(), B => {
        cpu.parallel_ranges(cols, COLUMNS, |_, range| {
            // SAFETY: ranges are disjoint.
            let out = unsafe { out.part(0, range.start, range.len()) };
            if !add {
                out.fill(0.0);
            }
            for row in 0..rows {
                let (a, b) = (&a.row::<A>(row)[range.clone()], &b.row::<B>(row)[range.clone()]);
                // SAFETY: the slices have one length.
                unsafe { add_products(cpu.isa(), a, b, out) };
            }
        });
    }));
}

vector_kernel! {
    /// Computes `sums += a ⊙ b`, all of one length.
    unsafe fn add_products<V: Vector, A: Element, B: Element>(a: &[A], b: &[B], sums: &mut [f32]) {
        for_lanes!(V, sums.len(), |i, n| {
            // SAFETY: the lanes lie inside the slices.
            unsafe {
                let sums = sums.as_mut_ptr().add(i);
                V::get(a.as_ptr().add(i), n).mul_add(V::get(b.as_ptr().add(i), n), V::load(sums, n)).store(sums, n);
            }
        });
    }
}
