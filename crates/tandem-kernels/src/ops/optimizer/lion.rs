//! Lion.

use super::{Numbers, Rule, Update, rounded, step};
use crate::cpu::vector::Vector;
use crate::{AdamMoment, Device, Result, StatesMut};

/// Lion (arXiv 2302.06675, algorithm 2), in the arithmetic order of the authors' `lion_pytorch.py`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Weight of the momentum in the direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// Takes one Lion step on the master weights and the momentum `m`, as [`adamw`](super::adamw()).
pub fn lion(device: &Device, config: &Lion, update: Update, m: StatesMut<'_>) -> Result<()> {
    step(device, config, update, vec![m])
}

impl Rule for Lion {
    const NAME: &'static str = "lion";
    const FLOPS: f64 = 10.0;
    const STATES: &'static [(&'static str, AdamMoment)] = &[("m", AdamMoment::First)];

    fn numbers(&self) -> Numbers {
        let Self { learning_rate, beta1, beta2, weight_decay } = *self;
        let decay = 1.0 - learning_rate * weight_decay;
        rounded([decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, -learning_rate])
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(numbers: &Numbers, g: V, w: V, [m, none]: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's promise.
        let (numbers, [zero, one]) =
            unsafe { (numbers.map(|number| V::splat(number)), [0.0, 1.0].map(|number| V::splat(number))) };
        let [decay, beta1, one_minus_beta1, beta2, one_minus_beta2, minus_learning_rate, ..] = numbers;
        let direction = g.fused_mul_add(one_minus_beta1, m.mul(beta1));
        let sign = direction.if_less(zero, zero.sub(one), zero.if_less(direction, one, zero));
        let m = g.fused_mul_add(one_minus_beta2, m.mul(beta2));
        (sign.fused_mul_add(minus_learning_rate, w.mul(decay)), [m, none])
    }
}
