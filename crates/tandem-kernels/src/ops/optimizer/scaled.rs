//! The gradient as f32, times its factor.

use super::{Numbers, Rule, Update, step};
use crate::cpu::vector::Vector;
use crate::{AdamMoment, Device, Result};

struct ScaledGradient;

/// Writes the gradient times its factor in the place of the master weights of `update`.
pub fn scaled_gradient(device: &Device, update: Update) -> Result<()> {
    step(device, &ScaledGradient, update, Vec::new())
}

impl Rule for ScaledGradient {
    const NAME: &'static str = "scaled_gradient";
    const FLOPS: f64 = 1.0;
    const STATES: &'static [(&'static str, AdamMoment)] = &[];

    fn numbers(&self) -> Numbers {
        Numbers::default()
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(_: &Numbers, g: V, _: V, none: [V; 2]) -> (V, [V; 2]) {
        (g, none)
    }
}
