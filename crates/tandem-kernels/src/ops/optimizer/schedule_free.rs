//! Schedule-free AdamW.

use super::{Numbers, Rule, Update, rounded, step};
use crate::cpu::vector::Vector;
use crate::{AdamMoment, Device, KernelError, Result, StatesMut};

/// Schedule-free AdamW (arXiv 2405.15682), in the arithmetic order of the authors' `AdamWScheduleFree`.
///
/// The weights are the points `y` where gradients are taken, between the base sequence `z` and the
/// average `x`: `y = (1 − beta1) · z + beta1 · x`. The average is not stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduleFreeAdamW {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Share of the average in the point where gradients are taken.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay, of the point where gradients are taken.
    pub weight_decay: f64,
    /// 1-based step, for bias correction.
    pub step: u64,
    /// Share of the new base point in the average: its weight over the weights of all.
    pub share: f64,
}

/// Takes one step on the weights `y`, the base sequence `z`, which is f32 and begins at the first
/// weights, and the second moment `v`, as [`adamw`](super::adamw()).
pub fn schedule_free_adamw(
    device: &Device,
    config: &ScheduleFreeAdamW,
    update: Update,
    z: StatesMut<'_>,
    v: StatesMut<'_>,
) -> Result<()> {
    if config.step == 0 {
        return Err(KernelError::invalid(ScheduleFreeAdamW::NAME, "steps count from 1"));
    }
    if !matches!(z, StatesMut::F32(_)) {
        return Err(KernelError::invalid(ScheduleFreeAdamW::NAME, "z holds weights and must be f32"));
    }
    step(device, config, update, vec![z, v])
}

impl Rule for ScheduleFreeAdamW {
    const NAME: &'static str = "schedule_free_adamw";
    const FLOPS: f64 = 17.0;
    const STATES: &'static [(&'static str, AdamMoment)] =
        &[("z", AdamMoment::First), ("v", AdamMoment::Second)];

    fn numbers(&self) -> Numbers {
        let Self { learning_rate, beta1, beta2, eps, weight_decay, share, .. } = *self;
        let correction2 = 1.0 - beta2.powf(self.step as f64);
        // From the nearer of y and z, as `torch.lerp`.
        let (from_z, way) = if share < 0.5 { (0.0, share) } else { (1.0, share - 1.0) };
        let of_y = learning_rate * (beta1 * (1.0 - share) - 1.0);
        rounded([from_z, way, beta2, 1.0 - beta2, correction2, eps, weight_decay, of_y, -learning_rate])
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(numbers: &Numbers, g: V, y: V, [z, v]: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's promise.
        let (numbers, zero) = unsafe { (numbers.map(|number| V::splat(number)), V::splat(0.0)) };
        let [from_z, way, beta2, one_minus_beta2, correction2, eps, weight_decay, of_y, of_z] = numbers;
        let v = g.mul(one_minus_beta2).fused_mul_add(g, v.mul(beta2));
        let direction = g.div(v.div(correction2).sqrt().add(eps));
        let direction = y.fused_mul_add(weight_decay, direction);
        let base = zero.if_less(from_z, z, y);
        let y = z.sub(y).fused_mul_add(way, base);
        (direction.fused_mul_add(of_y, y), [direction.fused_mul_add(of_z, z), v])
    }
}
