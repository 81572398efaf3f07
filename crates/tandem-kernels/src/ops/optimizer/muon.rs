//! The steps of Muon before and after a matrix is [orthogonalised](super::super::orthogonalize).

use super::{Numbers, Rule, Update, rounded, step};
use crate::cpu::vector::Vector;
use crate::{AdamMoment, Device, Result, StatesMut};

/// Momentum of Muon, in the arithmetic order of `torch.optim.Muon`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MuonMomentum {
    /// Decay of the average of gradients.
    pub momentum: f64,
    /// Whether the direction is between the gradient and the new average, not the average itself.
    pub nesterov: bool,
}

/// Takes the gradient into its average `m`, and writes the direction that is orthogonalised in the place
/// of the master weights of `update`.
pub fn muon_momentum(device: &Device, config: &MuonMomentum, update: Update, m: StatesMut<'_>) -> Result<()> {
    step(device, config, update, vec![m])
}

/// Parts of `torch.lerp(from, to, weight)`: whether `to` is the nearer end, and the way from it.
fn lerp(weight: f64) -> [f64; 2] {
    if weight < 0.5 { [0.0, weight] } else { [1.0, weight - 1.0] }
}

impl Rule for MuonMomentum {
    const NAME: &'static str = "muon_momentum";
    const FLOPS: f64 = 6.0;
    const STATES: &'static [(&'static str, AdamMoment)] = &[("m", AdamMoment::First)];

    fn numbers(&self) -> Numbers {
        let [from_g, to_g] = lerp(1.0 - self.momentum);
        let [from_m, to_m] = if self.nesterov { lerp(self.momentum) } else { [1.0, 0.0] };
        rounded([from_g, to_g, from_m, to_m])
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(numbers: &Numbers, g: V, _: V, [m, none]: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's promise.
        let (numbers, zero) = unsafe { (numbers.map(|number| V::splat(number)), V::splat(0.0)) };
        let [from_g, to_g, from_m, to_m, ..] = numbers;
        let m = g.sub(m).fused_mul_add(to_g, zero.if_less(from_g, g, m));
        (m.sub(g).fused_mul_add(to_m, zero.if_less(from_m, m, g)), [m, none])
    }
}

/// Step of the weights of a matrix by its orthogonalised direction, which is the gradient of the update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecayedUpdate {
    /// Learning rate of this step, times the matrix's ratio.
    pub learning_rate: f64,
    /// Share of the weights that decays in this step.
    pub decay: f64,
}

/// Takes the step on the master weights.
pub fn decayed_update(device: &Device, config: &DecayedUpdate, update: Update) -> Result<()> {
    step(device, config, update, Vec::new())
}

impl Rule for DecayedUpdate {
    const NAME: &'static str = "decayed_update";
    const FLOPS: f64 = 3.0;
    const STATES: &'static [(&'static str, AdamMoment)] = &[];

    fn numbers(&self) -> Numbers {
        rounded([1.0 - self.decay, -self.learning_rate])
    }

    #[inline(always)]
    unsafe fn step<V: Vector>(numbers: &Numbers, direction: V, w: V, none: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's promise.
        let numbers = numbers.map(|number| unsafe { V::splat(number) });
        let [kept, minus_learning_rate, ..] = numbers;
        (direction.fused_mul_add(minus_learning_rate, w.mul(kept)), none)
    }
}
