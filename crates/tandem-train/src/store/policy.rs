//! The weights that train, wherever they live.

use tandem_comm::Group;
use tandem_kernels::{Device, Tensor};
use tandem_model::{FlatWeights, LayerId, LayerWeights, Result as ModelResult, WeightSource};

use super::{Partition, ReplicatedWeights, ShardedWeights};
use crate::Result;

/// The policy's weights.
pub enum Policy {
    /// Whole on every rank.
    Replicated(ReplicatedWeights),
    /// In parts.
    Sharded(Box<ShardedWeights>),
}

impl Policy {
    /// The masters that this rank holds, and whose part they are.
    pub fn masters(&self) -> (&FlatWeights, &Partition) {
        match self {
            Self::Replicated(weights) => (weights.masters(), weights.partition()),
            Self::Sharded(weights) => (weights.parts().expect("a policy has masters"), weights.partition()),
        }
    }

    /// The same, to be written from outside; then [`Policy::refresh`].
    pub fn masters_mut(&mut self) -> &mut FlatWeights {
        match self {
            Self::Replicated(weights) => weights.masters_mut(),
            Self::Sharded(weights) => weights.parts_mut().expect("a policy has masters"),
        }
    }

    /// Masters that this rank holds of each layer, and the compute copy of their first elements where there is one.
    pub fn layers_mut(&mut self) -> Vec<(&mut Tensor, Option<&mut Tensor>)> {
        match self {
            Self::Replicated(weights) => weights.layers_mut().collect(),
            Self::Sharded(weights) => {
                let parts = weights.parts_mut().expect("a policy has masters");
                parts.layers.iter_mut().map(|part| (part, None)).collect()
            }
        }
    }

    /// After this rank has updated what `updated` says is its own: brings the others' parts, if they are held here.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn gather(&mut self, device: &Device, updated: &Partition, group: &mut Group) -> Result<()> {
        match self {
            Self::Replicated(weights) => weights.gather(device, updated, group),
            Self::Sharded(_) => Ok(()),
        }
    }

    /// Makes what is derived from the masters anew, after they were written from outside.
    ///
    /// # Errors
    /// If a copy does not fit its master.
    pub fn refresh(&mut self, device: &Device) -> Result<()> {
        match self {
            Self::Replicated(weights) => weights.refresh(device),
            Self::Sharded(_) => Ok(()),
        }
    }

    /// Copies a whole layer's masters into host memory. The other ranks [`Policy::hand_over`] the same.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn read_layer(&mut self, index: usize, flat: &mut [f32]) -> Result<()> {
        match self {
            Self::Replicated(weights) => {
                flat.copy_from_slice(weights.masters().layers[index].view().as_slice());
                Ok(())
            }
            Self::Sharded(weights) => weights.read_layer(index, flat),
        }
    }

    /// Takes this rank's part in what another rank does that reads a layer.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn hand_over(&mut self, index: usize) -> Result<()> {
        let Self::Sharded(weights) = self else { return Ok(()) };
        let mut flat = vec![0.0; weights.partition().len(index)];
        weights.read_layer(index, &mut flat)
    }

    fn source(&mut self) -> &mut dyn WeightSource {
        match self {
            Self::Replicated(weights) => weights,
            Self::Sharded(weights) => weights.as_mut(),
        }
    }
}

impl WeightSource for Policy {
    fn prefetch(&mut self, layer: LayerId) -> ModelResult<()> {
        self.source().prefetch(layer)
    }

    fn fetch(&mut self, layer: LayerId) -> ModelResult<LayerWeights<'_>> {
        self.source().fetch(layer)
    }

    fn release(&mut self, layer: LayerId) {
        self.source().release(layer);
    }
}
