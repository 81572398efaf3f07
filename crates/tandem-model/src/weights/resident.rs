//! Weights and gradients that simply stay in device memory.

use tandem_kernels::{DType, Device, Kind, Tensor, ops};

use crate::decoder::Decoder;
use crate::layout::LayerId;
use crate::weights::{FlatLayer, GradientSink, LayerGradients, LayerWeights, WeightSource};
use crate::{ModelError, Result};

/// One flat buffer `[1, len]` per layer, in the order of [`Decoder::layers`]. By default there is none.
#[derive(Default)]
pub struct FlatWeights {
    /// The buffers.
    pub layers: Vec<Tensor>,
}

impl FlatWeights {
    /// f32 zeros for every layer.
    ///
    /// # Errors
    /// If the device's memory does not suffice.
    pub fn zeros(decoder: &Decoder, device: &Device, kind: Kind) -> Result<Self> {
        let zeros = |&layer: &LayerId| device.zeros(kind, 1, decoder.trained(layer).len, DType::F32);
        Ok(Self { layers: decoder.layers().iter().map(zeros).collect::<Result<_, _>>()? })
    }

    /// Copies in `dtype` of what products read: the first `compute_len` elements of each layer.
    ///
    /// # Errors
    /// If the device's memory does not suffice.
    pub fn compute_copy(&self, decoder: &Decoder, device: &Device, kind: Kind, dtype: DType) -> Result<Self> {
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

/// A weight source that holds everything.
pub struct ResidentWeights<'a> {
    decoder: &'a Decoder,
    master: &'a FlatWeights,
    compute: Option<&'a FlatWeights>,
}

impl<'a> ResidentWeights<'a> {
    /// Over f32 masters and, for another compute type, the copies made by [`FlatWeights::compute_copy`].
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

/// A gradient sink that adds everything up in f32.
pub struct ResidentGradients<'a> {
    decoder: &'a Decoder,
    /// The sums so far.
    pub sums: FlatWeights,
}

impl<'a> ResidentGradients<'a> {
    /// All zeros.
    ///
    /// # Errors
    /// If the device's memory does not suffice.
    pub fn zeros(decoder: &'a Decoder, device: &Device) -> Result<Self> {
        Ok(Self { decoder, sums: FlatWeights::zeros(decoder, device, Kind::Gradients)? })
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
