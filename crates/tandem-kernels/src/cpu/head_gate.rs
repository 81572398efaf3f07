//! Gates on heads.

use super::Cpu;
use super::elementary::sigmoid;
use super::rows::RowsMut;
use super::vector::{Vector, for_lanes, vector_kernel};
use crate::ops::{Gate, HeadGates};
use crate::{Element, View, ViewMut, with_element};

/// Returns `f(g)` and `f'(g)`.
#[inline(always)]
fn evaluate<V: Vector>(function: Gate, g: V) -> (V, V) {
    let s = sigmoid(g);
    // SAFETY: `g` exists, so the CPU has V.
    let one = unsafe { V::splat(1.0) };
    let rest = one.sub(s);
    match function {
        Gate::Sigmoid => (s, s.mul(rest)),
        Gate::Silu => (g.mul(s), s.mul(g.mul_add(rest, one))),
    }
}

pub(crate) fn forward(cpu: &Cpu, gates: HeadGates, x: View, gate: View, h: ViewMut) {
    let HeadGates { function, head_dim, step, offset } = gates;
    with_element!(x.dtype(), E => {
        let h = RowsMut::<E>::new(h);
        cpu.for_rows(x.shape(), |t| {
            // SAFETY: row `t` belongs to this call alone.
            let heads = unsafe { h.row(t) }.chunks_exact_mut(head_dim);
            for ((index, h), x) in heads.enumerate().zip(x.row::<E>(t).chunks_exact(head_dim)) {
                let gate = &gate.row::<E>(t)[index * step + offset..][..head_dim];
                // SAFETY: all have one length; the level has V.
                unsafe { gate_head::<E>(cpu.isa(), function, x, gate, h) };
            }
        });
    });
}

vector_kernel! {
    unsafe fn gate_head<V: Vector, E: Element>(function: Gate, x: &[E], gate: &[E], h: &mut [E]) {
        for_lanes!(V, h.len(), |i, n| {
            // SAFETY: inside the rows, which have one length.
            unsafe {
                let (value, _) = evaluate(function, V::get(gate.as_ptr().add(i), n));
                value.mul(V::get(x.as_ptr().add(i), n)).put(h.as_mut_ptr().add(i), n);
            }
        });
    }
}

pub(crate) fn backward(
    cpu: &Cpu,
    gates: HeadGates,
    x: View,
    gate: View,
    dh: View,
    dx: ViewMut,
    d_gate: ViewMut,
) {
    let HeadGates { function, head_dim, step, offset } = gates;
    with_element!(x.dtype(), E => {
        let (dx, d_gate) = (RowsMut::<E>::new(dx), RowsMut::<E>::new(d_gate));
        cpu.for_rows(x.shape(), |t| {
            for head in 0..x.cols() / head_dim {
                let (own, place) = (head * head_dim, head * step + offset);
                let gate = &gate.row::<E>(t)[place..][..head_dim];
                let (x, dh) = (&x.row::<E>(t)[own..][..head_dim], &dh.row::<E>(t)[own..][..head_dim]);
                // SAFETY: row `t` belongs to this call alone; all have one length; the level has V.
                unsafe {
                    let (dx, d_gate) = (dx.part(t, own, head_dim), d_gate.part(t, place, head_dim));
                    gate_head_backward::<E>(cpu.isa(), function, x, gate, dh, dx, d_gate);
                }
            }
        });
    });
}

vector_kernel! {
    unsafe fn gate_head_backward<V: Vector, E: Element>(
        function: Gate,
        x: &[E],
        gate: &[E],
        dh: &[E],
        dx: &mut [E],
        d_gate: &mut [E],
    ) {
        for_lanes!(V, x.len(), |i, n| {
            // SAFETY: inside the rows, which have one length.
            unsafe {
                let (value, slope) = evaluate(function, V::get(gate.as_ptr().add(i), n));
                let (x, dh) = (V::get(x.as_ptr().add(i), n), V::get(dh.as_ptr().add(i), n));
                value.mul(dh).put(dx.as_mut_ptr().add(i), n);
                slope.mul(x).mul(dh).put(d_gate.as_mut_ptr().add(i), n);
            }
        });
    }
}
