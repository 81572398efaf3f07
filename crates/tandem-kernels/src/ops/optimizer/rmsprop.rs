//! RMSprop.

use super::{Numbers, Rule, Update, rounded, step};
use crate::cpu::vector::Vector;
use crate::{AdamMoment, Device, Result, StatesMut};

/// RMSprop as `torch.optim.RMSprop` (alpha 0.99, eps 1e-8, no momentum, not centred, L2 weight
/// decay).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsProp {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the squared gradient.
    pub alpha: f64,
    /// Added to the root.
    pub eps: f64,
    /// L2 penalty added to the gradient.
    pub weight_decay: f64,
}

/// Takes one RMSprop step on the master weights and `v`, as [`adamw`](super::adamw()).
pub fn rmsprop(device: &Device, config: &RmsProp, update: Update, v: StatesMut<'_>) -> Result<()> {
    step(device, config, update, vec![v])
}

impl Rule for RmsProp {
    const NAME: &'static str = "rmsprop";
    const FLOPS: f64 = 10.0;
    const STATES: &'static [(&'static str, AdamMoment)] = &[("v", AdamMoment::Second)];

    fn numbers(&self) -> Numbers {
        let Self { learning_rate, alpha, eps, weight_decay } = *self;
        rounded([weight_decay, alpha, 1.0 - alpha, eps, -learning_rate])
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(numbers: &Numbers, g: V, w: V, [v, none]: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's promise.
        let numbers = numbers.map(|number| unsafe { V::splat(number) });
        let [weight_decay, alpha, one_minus_alpha, eps, minus_learning_rate, ..] = numbers;
        let g = w.fused_mul_add(weight_decay, g);
        let v = g.mul(one_minus_alpha).fused_mul_add(g, v.mul(alpha));
        let root = v.sqrt().add(eps);
        (w.add(g.mul(minus_learning_rate).div(root)), [v, none])
    }
}
