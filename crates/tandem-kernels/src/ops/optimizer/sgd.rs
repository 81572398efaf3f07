//! Stochastic gradient descent, with momentum or without.

use super::{Numbers, Rule, Update, rounded, step};
use crate::cpu::vector::Vector;
use crate::{AdamMoment, Device, Result, StatesMut};

/// SGD as `torch.optim.SGD` (L2 weight decay).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// L2 penalty added to the gradient.
    pub weight_decay: f64,
    /// Momentum, if any.
    pub momentum: Option<Momentum>,
}

/// Momentum of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Momentum {
    /// Decay of the buffer.
    pub momentum: f64,
    /// Share of a gradient that does not enter the buffer.
    pub dampening: f64,
    /// Nesterov's: the direction is the gradient and the decayed new buffer.
    pub nesterov: bool,
    /// 1-based step: the first gradient enters the buffer whole.
    pub step: u64,
}

/// Takes one SGD step on the master weights and, with momentum, its buffer, as
/// [`adamw`](super::adamw()).
///
/// # Panics
/// If there is momentum without a buffer, or a buffer without momentum.
pub fn sgd(device: &Device, config: &Sgd, update: Update, buffer: Option<StatesMut<'_>>) -> Result<()> {
    match (config.momentum, buffer) {
        (None, None) => step(device, &Plain(*config), update, Vec::new()),
        (Some(momentum), Some(buffer)) => {
            step(device, &WithMomentum(*config, momentum), update, vec![buffer])
        }
        _ => panic!("SGD has a buffer where it has momentum"),
    }
}

struct Plain(Sgd);

impl Rule for Plain {
    const NAME: &'static str = "sgd";
    const FLOPS: f64 = 5.0;
    const STATES: &'static [(&'static str, AdamMoment)] = &[];

    fn numbers(&self) -> Numbers {
        let Sgd { learning_rate, weight_decay, .. } = self.0;
        rounded([weight_decay, -learning_rate])
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(numbers: &Numbers, g: V, w: V, none: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's promise.
        let numbers = numbers.map(|number| unsafe { V::splat(number) });
        let [weight_decay, minus_learning_rate, ..] = numbers;
        let g = w.fused_mul_add(weight_decay, g);
        (g.fused_mul_add(minus_learning_rate, w), none)
    }
}

struct WithMomentum(Sgd, Momentum);

impl Rule for WithMomentum {
    const NAME: &'static str = "momentum";
    const FLOPS: f64 = 9.0;
    const STATES: &'static [(&'static str, AdamMoment)] = &[("buffer", AdamMoment::First)];

    fn numbers(&self) -> Numbers {
        let Self(Sgd { learning_rate, weight_decay, .. }, Momentum { momentum, dampening, nesterov, step }) =
            *self;
        let entering = if step == 1 { 1.0 } else { 1.0 - dampening };
        // The direction is `ahead · buffer + now · gradient`.
        let [ahead, now] = if nesterov { [momentum, 1.0] } else { [1.0, 0.0] };
        rounded([weight_decay, momentum, entering, ahead, now, -learning_rate])
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(numbers: &Numbers, g: V, w: V, [buffer, none]: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's promise.
        let numbers = numbers.map(|number| unsafe { V::splat(number) });
        let [weight_decay, momentum, entering, ahead, now, minus_learning_rate, ..] = numbers;
        let g = w.fused_mul_add(weight_decay, g);
        let buffer = g.fused_mul_add(entering, buffer.mul(momentum));
        let direction = buffer.fused_mul_add(ahead, g.mul(now));
        (direction.fused_mul_add(minus_learning_rate, w), [buffer, none])
    }
}
