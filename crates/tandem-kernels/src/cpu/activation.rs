//! Feed-forward activations.

use rayon::prelude::*;

use crate::cpu::Cpu;
use crate::cpu::rows::RowsMut;
use crate::ops::Activation;
use crate::{Element, View, ViewMut, with_element};

pub(crate) fn gated(cpu: &Cpu, function: Activation, gu: View, h: ViewMut) {
    with_element!(gu.dtype(), E => {
        let h = RowsMut::<E>::new(h);
        cpu.pool.install(|| (0..gu.rows()).into_par_iter().for_each(|t| {
            // SAFETY: row `t` belongs to this task alone.
            let h = unsafe { h.row(t) };
            let (gate, up) = gu.row::<E>(t).split_at(h.len());
            for i in 0..h.len() {
                h[i] = E::from_f32(value(function, gate[i].to_f32()) * up[i].to_f32());
            }
        }));
    });
}

pub(crate) fn gated_backward(cpu: &Cpu, function: Activation, gu: View, dh: View, dgu: ViewMut) {
    with_element!(gu.dtype(), E => {
        let dgu = RowsMut::<E>::new(dgu);
        cpu.pool.install(|| (0..gu.rows()).into_par_iter().for_each(|t| {
            let dh = dh.row::<E>(t);
            let (gate, up) = gu.row::<E>(t).split_at(dh.len());
            // SAFETY: row `t` belongs to this task alone.
            let (dgate, dup) = unsafe { dgu.row(t) }.split_at_mut(dh.len());
            for i in 0..dh.len() {
                let (gate, d) = (gate[i].to_f32(), dh[i].to_f32());
                dgate[i] = E::from_f32(slope(function, gate) * up[i].to_f32() * d);
                dup[i] = E::from_f32(value(function, gate) * d);
            }
        }));
    });
}

pub(crate) fn activate(cpu: &Cpu, function: Activation, u: View, h: ViewMut) {
    with_element!(u.dtype(), E => {
        let h = RowsMut::<E>::new(h);
        cpu.pool.install(|| (0..u.rows()).into_par_iter().for_each(|t| {
            // SAFETY: row `t` belongs to this task alone.
            let h = unsafe { h.row(t) };
            for (h, u) in h.iter_mut().zip(u.row::<E>(t)) {
                *h = E::from_f32(value(function, u.to_f32()));
            }
        }));
    });
}

pub(crate) fn activate_backward(cpu: &Cpu, function: Activation, u: View, dh: View, du: ViewMut) {
    with_element!(u.dtype(), E => {
        let du = RowsMut::<E>::new(du);
        cpu.pool.install(|| (0..u.rows()).into_par_iter().for_each(|t| {
            let (u, dh) = (u.row::<E>(t), dh.row::<E>(t));
            // SAFETY: row `t` belongs to this task alone.
            let du = unsafe { du.row(t) };
            for i in 0..du.len() {
                du[i] = E::from_f32(slope(function, u[i].to_f32()) * dh[i].to_f32());
            }
        }));
    });
}

/// √(2/π), and the cubic coefficient of the tanh approximation of GELU (arXiv 1606.08415).
const TANH_SCALE: f32 = 0.797_884_6;
const TANH_CUBIC: f32 = 0.044_715;

fn value(function: Activation, x: f32) -> f32 {
    match function {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => {
            (0.5 * f64::from(x) * erfc(-f64::from(x) * std::f64::consts::FRAC_1_SQRT_2)) as f32
        }
        Activation::GeluTanh => 0.5 * x * (1.0 + (TANH_SCALE * (x + TANH_CUBIC * x * x * x)).tanh()),
        Activation::Relu => x.max(0.0),
    }
}

fn slope(function: Activation, x: f32) -> f32 {
    match function {
        Activation::Silu => {
            let s = 1.0 / (1.0 + (-x).exp());
            s * (1.0 + x * (1.0 - s))
        }
        Activation::Gelu => {
            let x = f64::from(x);
            let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
            (0.5 * erfc(-x * std::f64::consts::FRAC_1_SQRT_2) + x * density) as f32
        }
        Activation::GeluTanh => {
            let t = (TANH_SCALE * (x + TANH_CUBIC * x * x * x)).tanh();
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * TANH_SCALE * (1.0 + 3.0 * TANH_CUBIC * x * x)
        }
        Activation::Relu => f32::from(x > 0.0),
    }
}

/// The complementary error function: its Taylor series near 0, its continued fraction beyond.
fn erfc(x: f64) -> f64 {
    let z = x.abs();
    let tail = if z < 2.5 {
        let (mut term, mut sum) = (z, z);
        for n in 1..60 {
            term *= -z * z / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        1.0 - sum * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let fraction = (1..40).rev().fold(z, |f, n| z + f64::from(n) / 2.0 / f);
        (-z * z).exp() / fraction / std::f64::consts::PI.sqrt()
    };
    if x < 0.0 { 2.0 - tail } else { tail }
}
