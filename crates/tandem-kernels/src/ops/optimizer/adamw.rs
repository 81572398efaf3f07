//! AdamW.

use super::{Numbers, Rule, Update, rounded, step};
use crate::cpu::vector::Vector;
use crate::{AdamMoment, Device, KernelError, Result, StatesMut};

/// Decoupled weight decay Adam (arXiv 1711.05101), in the arithmetic order of `torch.optim.AdamW`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// 1-based step, for bias correction.
    pub step: u64,
}

/// Takes one AdamW step on the master weights and the states `m` and `v`, in any form. The weights
/// move by the states before these are rounded.
pub fn adamw(
    device: &Device,
    config: &AdamW,
    update: Update,
    m: StatesMut<'_>,
    v: StatesMut<'_>,
) -> Result<()> {
    if config.step == 0 {
        return Err(KernelError::invalid(AdamW::NAME, "steps count from 1"));
    }
    step(device, config, update, vec![m, v])
}

impl Rule for AdamW {
    const NAME: &'static str = "adamw";
    const FLOPS: f64 = 14.0;
    const STATES: &'static [(&'static str, AdamMoment)] =
        &[("m", AdamMoment::First), ("v", AdamMoment::Second)];

    fn numbers(&self) -> Numbers {
        let step = self.step as f64;
        let (correction1, correction2) = (1.0 - self.beta1.powf(step), 1.0 - self.beta2.powf(step));
        let decay = 1.0 - self.learning_rate * self.weight_decay;
        let (root_correction2, step_size) = (correction2.sqrt(), self.learning_rate / correction1);
        let Self { beta1, beta2, eps, .. } = *self;
        rounded([decay, 1.0 - beta1, beta2, 1.0 - beta2, root_correction2, eps, -step_size])
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(numbers: &Numbers, g: V, w: V, [m, v]: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's promise.
        let numbers = numbers.map(|number| unsafe { V::splat(number) });
        let [decay, one_minus_beta1, beta2, one_minus_beta2, root_correction2, eps, minus_step_size, ..] =
            numbers;
        let m = g.sub(m).fused_mul_add(one_minus_beta1, m);
        let v = g.mul(one_minus_beta2).fused_mul_add(g, v.mul(beta2));
        let root = v.sqrt().div(root_correction2).add(eps);
        (w.mul(decay).add(m.mul(minus_step_size).div(root)), [m, v])
    }
}
