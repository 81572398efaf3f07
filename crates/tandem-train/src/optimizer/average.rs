//! Weights of evaluations and of the trained model, where they are not those that train.
//!
//! The masters hold the weights that train. For an evaluation the others take their place, and go
//! back to where they were: training goes on with the same bits.

use tandem_kernels::{Device, States, StatesMut, StochasticRounding, Tensor, View, ViewMut, ops};

use super::Optimizer;
use crate::Result;
use crate::config::TrainConfig;
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
}

impl TrainConfig {
    /// Weights that evaluations and the trained model have.
    pub fn evaluation_weights(&self) -> EvaluationWeights {
        match self.ema_decay {
            Some(_) => EvaluationWeights::Average,
            None => EvaluationWeights::Trained,
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
        let Some(average) = &mut self.average else { return Ok(()) };
        let (masters, held) = weights.masters();
        for (layer, states) in average.layers.iter_mut().enumerate() {
            let (owned, start) = (self.partition.owned(layer), held.owned(layer).start);
            ops::cast(&self.home, own(&masters.layers[layer], &owned, start), floats(states))?;
            masters.layers[layer].evict_pages();
            states.evict_pages();
        }
        Ok(())
    }

    /// Puts the weights of evaluations into this rank's part of the masters, and returns whether they are
    /// others than those that train. The caller makes what other ranks hold, and copies, the same.
    pub fn begin_evaluation(&mut self, weights: &mut Policy) -> Result<bool> {
        if self.average.is_none() {
            return Ok(false);
        }
        self.exchange_average(weights)?;
        Ok(true)
    }

    /// Puts back the weights that train, as they were.
    pub fn end_evaluation(&mut self, weights: &mut Policy) -> Result<()> {
        self.exchange_average(weights)
    }

    /// Exchanges masters and average.
    fn exchange_average(&mut self, weights: &mut Policy) -> Result<()> {
        let Self { home, partition, average: Some(average), .. } = self else { return Ok(()) };
        let starts = starts(weights);
        let mut masters = weights.layers_mut();
        for (layer, states) in average.layers.iter_mut().enumerate() {
            if let Some((next, _)) = masters.get(layer + 1) {
                next.prefetch_pages();
            }
            let (owned, (master, _)) = (partition.owned(layer), &mut masters[layer]);
            let held = owned.start - starts[layer]..owned.end - starts[layer];
            ops::swap(home, master.view_mut().col_range(held), floats(states))?;
            master.evict_pages();
            states.evict_pages();
        }
        Ok(())
    }
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
