//! Weights of evaluations and of the trained model, where they are not those that train.
//!
//! The masters hold the weights that train. For an evaluation the others take their place, and go
//! back to where they were: training goes on with the same bits.

use serde::{Deserialize, Serialize};
use tandem_kernels::{
    DType, Device, MemoryKind, States, StatesMut, StochasticRounding, Tensor, View, ViewMut, ops,
};

use super::Optimizer;
use crate::Result;
use crate::config::{self, TrainConfig};
use crate::parallel::Partition;
use crate::weights::Policy;

/// Name of the moving average in checkpoints.
pub(crate) const AVERAGE: &str = "average";

/// Weights that evaluations and the trained model have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EvaluationWeights {
    /// Those that train.
    Trained,
    /// Their exponential moving average (`train.ema_decay`).
    Average,
    /// The average of schedule-free AdamW, computed from the weights that train and the base sequence.
    ScheduleFree {
        /// Share of the average in the weights that train.
        beta1: f64,
    },
}

/// Way from the weights that train to the base sequence at which the average lies, beyond the weights:
/// `1 − 1 / beta1`, as in the authors' `eval`.
pub(crate) fn way_to_average(beta1: f64) -> f32 {
    (1.0 - 1.0 / beta1) as f32
}

/// Weights of the points in the average of schedule-free AdamW: each has the square of the largest
/// learning rate so far, as `weight_lr_power = 2` in the authors' code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weighting {
    /// Largest learning rate of an update.
    pub largest_rate: f64,
    /// Sum of the weights of all points.
    pub sum: f64,
}

impl Weighting {
    /// Returns the share of the next point in the average.
    pub(super) fn share(&mut self, learning_rate: f64) -> f64 {
        self.largest_rate = self.largest_rate.max(learning_rate);
        let weight = self.largest_rate * self.largest_rate;
        self.sum += weight;
        if self.sum == 0.0 { 0.0 } else { weight / self.sum }
    }
}

impl TrainConfig {
    /// Weights that evaluations and the trained model have.
    pub fn evaluation_weights(&self) -> EvaluationWeights {
        match (self.optimizer, self.ema_decay) {
            (config::Optimizer::ScheduleFreeAdamW { beta1, .. }, _) => {
                EvaluationWeights::ScheduleFree { beta1 }
            }
            (_, Some(_)) => EvaluationWeights::Average,
            (_, None) => EvaluationWeights::Trained,
        }
    }
}

/// Exponential moving average of this rank's part of the masters, f32.
pub(super) struct MovingAverage {
    pub decay: f64,
    /// By layer.
    pub layers: Vec<States>,
}

impl MovingAverage {
    /// Takes in the masters of a layer after an update. The first update is taken over whole, as by
    /// `torch.optim.swa_utils.AveragedModel`.
    pub(super) fn update(&mut self, home: &Device, layer: usize, masters: View, update: u64) -> Result<()> {
        let average = floats(&mut self.layers[layer]);
        match update {
            1 => ops::cast(home, masters, average)?,
            _ => ops::lerp(home, masters, (1.0 - self.decay) as f32, average)?,
        }
        Ok(())
    }
}

/// All of a layer's states, which are f32.
pub(super) fn floats(states: &mut States) -> ViewMut<'_> {
    let all = 0..states.len();
    match states.range_mut(all, StochasticRounding::default()) {
        StatesMut::F32(view) => view,
        StatesMut::Bf16(..) | StatesMut::EightBit(_) => unreachable!("an average of weights is f32"),
    }
}

impl Optimizer {
    /// Begins averages at the weights that a run starts with.
    pub fn start(&mut self, weights: &Policy) -> Result<()> {
        let Self { home, partition, states, average, .. } = self;
        let (masters, held) = weights.masters();
        let states =
            states.iter_mut().filter(|state| state.spec.holds_weights).map(|state| &mut state.layers);
        for layers in states.chain(average.iter_mut().map(|average| &mut average.layers)) {
            for (layer, states) in layers.iter_mut().enumerate() {
                let (owned, start) = (partition.owned(layer), held.owned(layer).start);
                ops::cast(home, own(&masters.layers[layer], &owned, start), floats(states))?;
                masters.layers[layer].evict_pages();
                states.evict_pages();
            }
        }
        Ok(())
    }

    /// Puts the weights of evaluations into this rank's part of the masters, and returns whether they are
    /// others than those that train. The caller makes what other ranks hold, and copies, the same. Without
    /// `goes_on`, [`Optimizer::end_evaluation`] cannot follow, and no memory is taken.
    pub fn begin_evaluation(&mut self, weights: &mut Policy, goes_on: bool) -> Result<bool> {
        match self.rule {
            config::Optimizer::ScheduleFreeAdamW { beta1, .. } => {
                self.trained = if goes_on { Some(self.copy_masters(weights)?) } else { None };
                let states = self.states.iter_mut().find(|state| state.spec.holds_weights);
                let layers = &mut states.expect("it has a base sequence").layers;
                let towards_base = |home: &Device, masters: ViewMut, base: ViewMut| {
                    ops::lerp(home, base.view(), way_to_average(beta1), masters)
                };
                for_layers(&self.home, &self.partition, weights, layers, &towards_base)?;
                Ok(true)
            }
            _ => self.exchange_average(weights),
        }
    }

    /// Puts back the weights that train, as they were.
    pub fn end_evaluation(&mut self, weights: &mut Policy) -> Result<()> {
        let Some(trained) = self.trained.take() else { return self.exchange_average(weights).map(drop) };
        let starts = starts(weights);
        for (layer, (kept, (master, _))) in trained.iter().zip(weights.layers_mut()).enumerate() {
            let owned = self.partition.owned(layer);
            let held = owned.start - starts[layer]..owned.end - starts[layer];
            ops::cast(&self.home, kept.view(), master.view_mut().col_range(held))?;
            master.evict_pages();
        }
        Ok(())
    }

    /// Exchanges masters and average; returns whether there is one.
    fn exchange_average(&mut self, weights: &mut Policy) -> Result<bool> {
        let Self { home, partition, average: Some(average), .. } = self else { return Ok(false) };
        for_layers(home, partition, weights, &mut average.layers, &ops::swap)?;
        Ok(true)
    }

    /// Copies this rank's part of the masters.
    fn copy_masters(&self, weights: &Policy) -> Result<Vec<Tensor>> {
        let (masters, held) = weights.masters();
        let copy = |(layer, master): (usize, &Tensor)| {
            let (owned, start) = (self.partition.owned(layer), held.owned(layer).start);
            let mut copy = self.home.alloc(MemoryKind::Optimizer, 1, owned.len(), DType::F32)?;
            ops::cast(&self.home, own(master, &owned, start), copy.view_mut())?;
            copy.evict_pages();
            Ok(copy)
        };
        masters.layers.iter().enumerate().map(copy).collect()
    }
}

/// Calls `change` with this rank's part of the masters and the states of each layer.
fn for_layers(
    home: &Device,
    partition: &Partition,
    weights: &mut Policy,
    layers: &mut [States],
    change: &dyn Fn(&Device, ViewMut, ViewMut) -> tandem_kernels::Result<()>,
) -> Result<()> {
    let starts = starts(weights);
    let mut masters = weights.layers_mut();
    for (layer, states) in layers.iter_mut().enumerate() {
        if let Some((next, _)) = masters.get(layer + 1) {
            next.prefetch_pages();
        }
        let (owned, (master, _)) = (partition.owned(layer), &mut masters[layer]);
        let held = owned.start - starts[layer]..owned.end - starts[layer];
        change(home, master.view_mut().col_range(held), floats(states))?;
        master.evict_pages();
        states.evict_pages();
    }
    Ok(())
}

/// The first element of each layer that a rank holds of the masters: they may be held whole while the
/// states are in parts.
pub(super) fn starts(weights: &Policy) -> Vec<usize> {
    let (masters, held) = weights.masters();
    (0..masters.layers.len()).map(|layer| held.owned(layer).start).collect()
}

/// This rank's part of a layer's masters, of which the first element is `start`.
pub(super) fn own<'a>(master: &'a Tensor, owned: &std::ops::Range<usize>, start: usize) -> View<'a> {
    master.view().col_range(owned.start - start..owned.end - start)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::Value;
    use tandem_kernels::{AdamMoment, MemoryKind, StateForm};

    use super::*;
    use crate::optimizer::golden;

    /// Fifty updates against `AveragedModel` with `get_ema_multi_avg_fn`.
    #[test]
    fn averages_equal_pytorch() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/optimizers/averages.json");
        let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let device = Device::cpu(1, 1 << 20).unwrap();
        for run in golden["runs"].as_array().unwrap() {
            let len = golden::ELEMENTS;
            let zeros = States::zeros(&device, MemoryKind::Optimizer, AdamMoment::First, StateForm::F32, len)
                .unwrap();
            let decay = run["decay"].as_f64().unwrap();
            let mut average = MovingAverage { decay, layers: vec![zeros] };
            let mut compared = 0;
            for update in 1..=golden::STEPS {
                let masters = golden::numbers(update, 2.0);
                average.update(&device, 0, View::from_slice(&masters), update).unwrap();
                let Some(expected) = run["weights"].get(update.to_string()) else { continue };
                compared += 1;
                let found = floats(&mut average.layers[0]).into_slice::<f32>();
                for (found, expected) in found.iter().zip(golden::floats(expected)) {
                    // Torch fuses product and sum: half a unit of the last place a step, of which the decay
                    // keeps its share.
                    let steps = (1.0 / (1.0 - decay)).min(update as f64) as f32;
                    assert!(
                        (found - expected).abs() <= 1.2e-7 * (1.0 + steps),
                        "{decay} step {update}: {found}, expected {expected}"
                    );
                }
            }
            assert_eq!(compared, 4);
        }
    }
}
