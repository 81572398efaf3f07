//! Feed-forward activations.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use super::Cpu;
use super::elementary::{normal, sigmoid};
use super::rows::RowsMut;
use super::vector::{Vector, for_lanes, vector_kernel};
use crate::ops::Activation;
use crate::{Element, View, ViewMut, with_element};

/// `f(x)` and `f'(x)`, as a type so that the choice is made outside the loops.
trait Function {
    fn evaluate<V: Vector>(x: V) -> (V, V);
}

struct Silu;
struct Gelu;
struct GeluTanh;
struct Relu;
struct ReluSquared;

impl Function for Silu {
    #[inline(always)]
    fn evaluate<V: Vector>(x: V) -> (V, V) {
        let s = sigmoid(x);
        // SAFETY: `x` exists, so the CPU has V.
        let one = unsafe { V::splat(1.0) };
        (x.mul(s), s.mul(x.mul_add(one.sub(s), one)))
    }
}

impl Function for Gelu {
    #[inline(always)]
    fn evaluate<V: Vector>(x: V) -> (V, V) {
        let (cdf, density) = normal(x);
        // SAFETY: `x` exists, so the CPU has V.
        let bounded = unsafe { V::splat(20.0).min(V::splat(-20.0).max(x)) };
        (x.mul(cdf), bounded.mul_add(density, cdf))
    }
}

impl Function for GeluTanh {
    /// Computes it with u = √(2/π)·(x + 0.044715 x³): (1 + tanh u)/2 = sigmoid(2u).
    #[inline(always)]
    fn evaluate<V: Vector>(x: V) -> (V, V) {
        // SAFETY: `x` exists, so the CPU has V.
        unsafe {
            // 2/√π · 1/√2 = √(2/π).
            let (one, twice_scale) = (V::splat(1.0), V::splat(2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2));
            // Beyond 16 the function is 0 or x; the bound keeps powers finite.
            let z = V::splat(16.0).min(V::splat(-16.0).max(x));
            let square = z.mul(z);
            let s = sigmoid(square.mul_add(V::splat(0.044_715), one).mul(z).mul(twice_scale));
            let du = square.mul_add(V::splat(3.0 * 0.044_715), one).mul(twice_scale);
            (x.mul(s), z.mul(s).mul(one.sub(s)).mul_add(du, s))
        }
    }
}

impl Function for Relu {
    #[inline(always)]
    fn evaluate<V: Vector>(x: V) -> (V, V) {
        // SAFETY: `x` exists, so the CPU has V.
        let (zero, one) = unsafe { (V::splat(0.0), V::splat(1.0)) };
        (zero.max(x), zero.if_less(x, one, zero))
    }
}

impl Function for ReluSquared {
    #[inline(always)]
    fn evaluate<V: Vector>(x: V) -> (V, V) {
        // SAFETY: `x` exists, so the CPU has V.
        let positive = unsafe { V::splat(0.0).max(x) };
        (positive.mul(positive), positive.add(positive))
    }
}

/// Runs `$body` with the type alias `$F` bound to the [`Function`] of an [`Activation`].
macro_rules! with_function {
    ($function:expr, $F:ident => $body:expr) => {
        match $function {
            Activation::Silu => {
                type $F = Silu;
                $body
            }
            Activation::Gelu => {
                type $F = Gelu;
                $body
            }
            Activation::GeluTanh => {
                type $F = GeluTanh;
                $body
            }
            Activation::Relu => {
                type $F = Relu;
                $body
            }
            Activation::ReluSquared => {
                type $F = ReluSquared;
                $body
            }
        }
    };
}

pub(crate) fn gated(cpu: &Cpu, function: Activation, gu: View, h: ViewMut) {
    let (rows, width) = (h.rows(), h.cols());
    with_element!(gu.dtype(), E => {
        let h = RowsMut::<E>::new(h);
        with_function!(function, F => cpu.for_rows((rows, width), |t| {
            let (gate, up) = gu.row::<E>(t).split_at(width);
            // SAFETY: row `t` belongs to this call alone; all rows have one length.
            unsafe { gated_row::<E, F>(cpu.isa(), gate, up, h.row(t)) };
        }));
    });
}

vector_kernel! {
    unsafe fn gated_row<V: Vector, E: Element, F: Function>(gate: &[E], up: &[E], h: &mut [E]) {
        for_lanes!(V, h.len(), |i, n| {
            // SAFETY: inside the rows, which have one length.
            unsafe {
                let (value, _) = F::evaluate(V::get(gate.as_ptr().add(i), n));
                value.mul(V::get(up.as_ptr().add(i), n)).put(h.as_mut_ptr().add(i), n);
            }
        });
    }
}

pub(crate) fn gated_backward(cpu: &Cpu, function: Activation, gu: View, dh: View, dgu: ViewMut) {
    let (rows, width) = dh.shape();
    with_element!(gu.dtype(), E => {
        let dgu = RowsMut::<E>::new(dgu);
        with_function!(function, F => cpu.for_rows((rows, width), |t| {
            let (gate, up) = gu.row::<E>(t).split_at(width);
            // SAFETY: row `t` belongs to this call alone; all rows have one length.
            unsafe {
                let (dgate, dup) = dgu.row(t).split_at_mut(width);
                gated_backward_row::<E, F>(cpu.isa(), gate, up, dh.row(t), dgate, dup);
            }
        }));
    });
}

vector_kernel! {
    unsafe fn gated_backward_row<V: Vector, E: Element, F: Function>(
        gate: &[E],
        up: &[E],
        dh: &[E],
        dgate: &mut [E],
        dup: &mut [E],
    ) {
        for_lanes!(V, dh.len(), |i, n| {
            // SAFETY: inside the rows, which have one length.
            unsafe {
                let (value, slope) = F::evaluate(V::get(gate.as_ptr().add(i), n));
                let (up, dh) = (V::get(up.as_ptr().add(i), n), V::get(dh.as_ptr().add(i), n));
                slope.mul(up).mul(dh).put(dgate.as_mut_ptr().add(i), n);
                value.mul(dh).put(dup.as_mut_ptr().add(i), n);
            }
        });
    }
}

pub(crate) fn activate(cpu: &Cpu, function: Activation, u: View, h: ViewMut) {
    let (rows, width) = u.shape();
    with_element!(u.dtype(), E => {
        let h = RowsMut::<E>::new(h);
        with_function!(function, F => cpu.for_rows((rows, width), |t| {
            // SAFETY: row `t` belongs to this call alone; all rows have one length.
            unsafe { activate_row::<E, F>(cpu.isa(), u.row(t), h.row(t)) };
        }));
    });
}

vector_kernel! {
    unsafe fn activate_row<V: Vector, E: Element, F: Function>(u: &[E], h: &mut [E]) {
        for_lanes!(V, u.len(), |i, n| {
            // SAFETY: inside the rows, which have one length.
            unsafe {
                F::evaluate(V::get(u.as_ptr().add(i), n)).0.put(h.as_mut_ptr().add(i), n);
            }
        });
    }
}

pub(crate) fn activate_backward(cpu: &Cpu, function: Activation, u: View, dh: View, du: ViewMut) {
    let (rows, width) = u.shape();
    with_element!(u.dtype(), E => {
        let du = RowsMut::<E>::new(du);
        with_function!(function, F => cpu.for_rows((rows, width), |t| {
            // SAFETY: row `t` belongs to this call alone; all rows have one length.
            unsafe { activate_backward_row::<E, F>(cpu.isa(), u.row(t), dh.row(t), du.row(t)) };
        }));
    });
}

vector_kernel! {
    unsafe fn activate_backward_row<V: Vector, E: Element, F: Function>(u: &[E], dh: &[E], du: &mut [E]) {
        for_lanes!(V, u.len(), |i, n| {
            // SAFETY: inside the rows, which have one length.
            unsafe {
                let (_, slope) = F::evaluate(V::get(u.as_ptr().add(i), n));
                slope.mul(V::get(dh.as_ptr().add(i), n)).put(du.as_mut_ptr().add(i), n);
            }
        });
    }
}
