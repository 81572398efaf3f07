//! Weights that every rank holds whole.
//!
//! Each layer is one flat f32 buffer (the master) and, where compute is not f32, a flat copy of its
//! matrices in the compute type. The optimiser walks the flat buffers; the model sees views into
//! them.

use std::sync::Arc;

use tandem_comm::ProcessGroup;
use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};
use tandem_model::{
    Decoder, FlatLayer, FlatWeights, LayerId, LayerWeights, Result as ModelResult, WeightSource,
};

use crate::Result;
use crate::parallel::Partition;
use crate::weights::gather::gather_updated;

/// Weights that train: f32 masters and their compute copies.
pub struct ReplicatedWeights {
    device: Device,
    decoder: Arc<Decoder>,
    /// Shared while another thread reads them; never during a write.
    masters: Arc<FlatWeights>,
    /// As the masters.
    compute: Option<Arc<FlatWeights>>,
    /// Everything is this rank's.
    partition: Partition,
}

impl ReplicatedWeights {
    /// Takes the masters and makes the compute copies.
    pub fn new(device: &Device, decoder: Arc<Decoder>, masters: FlatWeights, dtype: DType) -> Result<Self> {
        let compute = match dtype {
            DType::F32 => None,
            _ => Some(Arc::new(masters.compute_copy(&decoder, device, MemoryKind::Weights, dtype)?)),
        };
        let (partition, masters) = (Partition::whole(&decoder), Arc::new(masters));
        Ok(Self { device: device.clone(), decoder, masters, compute, partition })
    }

    /// Creates a read-only view of the weights for another thread.
    pub fn reader(&self) -> Self {
        let Self { device, decoder, partition, .. } = self;
        let (device, decoder, partition) = (device.clone(), decoder.clone(), partition.clone());
        Self { device, decoder, masters: Arc::default(), compute: None, partition }
    }

    /// Lends these weights to a reader of them.
    pub fn share_with(&self, reader: &mut Self) {
        (reader.masters, reader.compute) = (self.masters.clone(), self.compute.clone());
    }

    /// Releases the shared weights of a reader.
    pub fn release_shared(&mut self) {
        (self.masters, self.compute) = (Arc::default(), None);
    }

    /// Device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The decoder whose trainable parameters these are.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// A layer.
    pub fn layer(&self, layer: LayerId) -> FlatLayer<'_> {
        let index = self.decoder.index(layer);
        let compute = self.compute.as_ref().map(|c| c.layers[index].view());
        FlatLayer::new(self.decoder.trained(layer), self.masters.layers[index].view(), compute)
    }

    /// Partition of the masters: this rank holds all.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// The masters.
    pub fn masters(&self) -> &FlatWeights {
        &self.masters
    }

    /// The masters, to be written from outside; then [`ReplicatedWeights::refresh`].
    pub fn masters_mut(&mut self) -> &mut FlatWeights {
        unshared(&mut self.masters)
    }

    /// Master and compute copy (of its first elements) of each layer, to be updated together.
    pub fn layers_mut(&mut self) -> impl Iterator<Item = (&mut Tensor, Option<&mut Tensor>)> {
        let mut copies = self.compute.as_mut().map(|c| unshared(c).layers.iter_mut());
        unshared(&mut self.masters)
            .layers
            .iter_mut()
            .map(move |master| (master, copies.as_mut().and_then(Iterator::next)))
    }

    /// Brings every rank the parts that the others have updated.
    pub fn gather(&mut self, device: &Device, partition: &Partition, group: &mut ProcessGroup) -> Result<()> {
        if !partition.is_divided() || group.size() == 1 {
            return Ok(());
        }
        gather_updated(device, &mut unshared(&mut self.masters).layers, partition, group)?;
        self.refresh(device)
    }

    /// Makes the compute copies anew, after the masters were written from outside.
    pub fn refresh(&mut self, device: &Device) -> Result<()> {
        for (master, copy) in self.layers_mut() {
            if let Some(copy) = copy.filter(|c| c.cols() > 0) {
                ops::cast(device, master.view().col_range(0..copy.cols()), copy.view_mut())?;
            }
        }
        Ok(())
    }
}

impl WeightSource for ReplicatedWeights {
    fn prefetch(&mut self, _: LayerId) -> ModelResult<()> {
        Ok(())
    }

    fn fetch(&mut self, layer: LayerId) -> ModelResult<LayerWeights<'_>> {
        Ok(LayerWeights::new(self.layer(layer)))
    }

    fn release(&mut self, _: LayerId) {}
}

/// Mutable weights; no other thread may read them.
pub(super) fn unshared<T>(weights: &mut Arc<T>) -> &mut T {
    Arc::get_mut(weights).expect("weights that were lent are given back before they are written")
}
