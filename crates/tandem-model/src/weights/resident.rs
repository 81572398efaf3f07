//! Weights and gradients that stay in device memory.

use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};

use crate::decoder::Decoder;
use crate::layout::LayerId;
use crate::weights::{FlatLayer, GradientSink, LayerGradients, LayerWeights, WeightSource};
use crate::{ModelError, Result};

/// Flat buffers `[1, len]` of all layers, in the order of [`Decoder::layers`]. Empty by default.
#[derive(Default)]
pub struct FlatWeights {
    /// The buffers.
    pub layers: Vec<Tensor>,
}

impl FlatWeights {
    /// Allocates f32 zeros for every layer.
    pub fn zeros(decoder: &Decoder, device: &Device, kind: MemoryKind) -> Result<Self> {
        let zeros = |&layer: &LayerId| device.zeros(kind, 1, decoder.trained(layer).len, DType::F32);
        Ok(Self { layers: decoder.layers().iter().map(zeros).collect::<Result<_, _>>()? })
    }

    /// Copies the operands of products in `dtype`: the first `compute_len` elements of each layer.
    pub fn compute_copy(
        &self,
        decoder: &Decoder,
        device: &Device,
        kind: MemoryKind,
        dtype: DType,
    ) -> Result<Self> {
        let mut layers = Vec::with_capacity(self.layers.len());
        for (layer, flat) in decoder.layers().into_iter().zip(&self.layers) {
            let len = decoder.trained(layer).compute_len;
            let mut copy = device.alloc(kind, 1, len, dtype)?;
            if len > 0 {
                ops::cast(device, flat.view().col_range(0..len), copy.view_mut())?;
            }
            layers.push(copy);
        }
        Ok(Self { layers })
    }
}

/// Weight source with all layers in device memory.
pub struct ResidentWeights<'a> {
    decoder: &'a Decoder,
    master: &'a FlatWeights,
    compute: Option<&'a FlatWeights>,
}

impl<'a> ResidentWeights<'a> {
    /// Reads f32 masters and, for another compute type, the copies of
    /// [`FlatWeights::compute_copy`].
    pub fn new(decoder: &'a Decoder, master: &'a FlatWeights, compute: Option<&'a FlatWeights>) -> Self {
        Self { decoder, master, compute }
    }
}

impl WeightSource for ResidentWeights<'_> {
    fn prefetch(&mut self, _: LayerId) -> Result<()> {
        Ok(())
    }

    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        let index = self.decoder.index(layer);
        let master = self.master.layers.get(index);
        let master = master.ok_or_else(|| ModelError::Invalid(format!("no weights for the {layer}")))?;
        let compute = self.compute.map(|c| c.layers[index].view());
        Ok(LayerWeights::new(FlatLayer::new(self.decoder.layout(layer), master.view(), compute)))
    }

    fn release(&mut self, _: LayerId) {}
}

/// Gradient sink that sums in f32.
pub struct ResidentGradients<'a> {
    decoder: &'a Decoder,
    /// Sums so far.
    pub sums: FlatWeights,
}

impl<'a> ResidentGradients<'a> {
    /// Allocates sums of zero.
    pub fn zeros(decoder: &'a Decoder, device: &Device) -> Result<Self> {
        Ok(Self { decoder, sums: FlatWeights::zeros(decoder, device, MemoryKind::Gradients)? })
    }
}

impl GradientSink for ResidentGradients<'_> {
    fn open(&mut self, layer: LayerId) -> Result<LayerGradients<'_>> {
        let flat = &mut self.sums.layers[self.decoder.index(layer)];
        Ok(LayerGradients::new(self.decoder.trained(layer), flat.view_mut()))
    }

    fn emit(&mut self, _: LayerId) -> Result<()> {
        Ok(())
    }
}
