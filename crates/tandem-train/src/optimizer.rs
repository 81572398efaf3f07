//! The optimiser over flat buffers: of each rank's part of every layer.

use std::ops::Range;
use std::sync::Arc;

use tandem_kernels::ops::{self, AdamW, RmsProp};
use tandem_kernels::{DType, Device, Kind};
use tandem_model::{Decoder, FlatWeights, LayerLayout};

use crate::Result;
use crate::config::{self, TrainConfig};
use crate::store::{Accumulator, Partition, Policy};

/// Optimiser states: flat f32 buffers laid out like this rank's part of the masters.
pub struct Optimizer {
    partition: Arc<Partition>,
    rule: config::Optimizer,
    weight_decay: f64,
    /// First moments (AdamW only).
    first: Option<FlatWeights>,
    /// Second moments.
    second: FlatWeights,
    /// Per layer, the runs of this rank's part that are updated alike.
    runs: Vec<Vec<Run>>,
}

/// A run of a layer's flat buffer: all of it decays or none, all of it has a compute copy or none.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    range: Range<usize>,
    decays: bool,
}

impl Optimizer {
    /// Zero states.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn new(
        device: &Device,
        decoder: &Decoder,
        partition: Arc<Partition>,
        config: &TrainConfig,
    ) -> Result<Self> {
        let zeros = || -> Result<FlatWeights> {
            let owned = (0..partition.num_layers()).map(|layer| partition.owned(layer).len());
            let layers = owned.map(|len| device.zeros(Kind::Optimizer, 1, len, DType::F32));
            Ok(FlatWeights { layers: layers.collect::<Result<_, _>>()? })
        };
        let layouts = decoder.layers().into_iter().map(|layer| decoder.trained(layer));
        Ok(Self {
            rule: config.optimizer,
            weight_decay: config.weight_decay,
            first: match config.optimizer {
                config::Optimizer::AdamW { .. } => Some(zeros()?),
                config::Optimizer::RmsProp { .. } => None,
            },
            second: zeros()?,
            runs: layouts.zip(0..).map(|(layout, layer)| runs(layout, partition.owned(layer))).collect(),
            partition,
        })
    }

    /// Whose the states are.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// The states by name.
    pub fn states(&self) -> Vec<(&'static str, &FlatWeights)> {
        let first = self.first.iter().map(|first| ("first_moment", first));
        first.chain([("second_moment", &self.second)]).collect()
    }

    /// As [`Optimizer::states`], to be restored.
    pub fn states_mut(&mut self) -> Vec<(&'static str, &mut FlatWeights)> {
        let first = self.first.iter_mut().map(|first| ("first_moment", first));
        first.chain([("second_moment", &mut self.second)]).collect()
    }

    /// One update with the accumulated gradient times `grad_scale`; `update` is the 1-based count of updates, for
    /// Adam's bias correction. Masters and compute copies are written in the same pass.
    ///
    /// # Errors
    /// If buffers do not fit one another.
    pub fn update(
        &mut self,
        device: &Device,
        learning_rate: f64,
        grad_scale: f32,
        update: u64,
        gradients: &Accumulator,
        weights: &mut Policy,
    ) -> Result<()> {
        // Masters may be held whole while the states are in parts.
        let starts: Vec<usize> =
            (0..self.runs.len()).map(|index| weights.masters().1.owned(index).start).collect();
        for (index, (master, mut copy)) in weights.layers_mut().into_iter().enumerate() {
            let start = self.partition.owned(index).start;
            for Run { range, decays } in &self.runs[index] {
                let weight_decay = if *decays { self.weight_decay } else { 0.0 };
                let own = range.start - start..range.end - start;
                let grad = gradients.owned(index).range(own.clone());
                let second = self.second.layers[index].view_mut().col_range(own.clone());
                let copy = copy
                    .as_mut()
                    .filter(|copy| range.end <= copy.cols())
                    .map(|copy| copy.view_mut().col_range(range.clone()));
                let held = range.start - starts[index]..range.end - starts[index];
                let master = master.view_mut().col_range(held);
                match (self.rule, &mut self.first) {
                    (config::Optimizer::AdamW { beta1, beta2, eps }, Some(first)) => {
                        let rule = AdamW { learning_rate, beta1, beta2, eps, weight_decay, step: update };
                        let first = first.layers[index].view_mut().col_range(own);
                        ops::adamw(device, &rule, grad_scale, grad, master, first, second, copy)?;
                    }
                    (config::Optimizer::RmsProp { alpha, eps }, _) => {
                        let rule = RmsProp { learning_rate, alpha, eps, weight_decay };
                        ops::rmsprop(device, &rule, grad_scale, grad, master, second, copy)?;
                    }
                    (config::Optimizer::AdamW { .. }, None) => {
                        unreachable!("AdamW is made with first moments")
                    }
                }
            }
        }
        Ok(())
    }
}

/// The layout puts matrices with a compute copy first, then what else decays, then the rest.
fn runs(layout: &LayerLayout, owned: Range<usize>) -> Vec<Run> {
    let cuts =
        [0, layout.compute_len, layout.decay_len, layout.len].map(|at| at.clamp(owned.start, owned.end));
    let run = |i: usize| Run { range: cuts[i]..cuts[i + 1], decays: i < 2 };
    (0..3).map(run).filter(|run| !run.range.is_empty()).collect()
}
