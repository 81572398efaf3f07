//! Weights that are kept in fewer bits, and unpacked when they are fetched, or multiplied by as they are.

use tandem_kernels::{Bytes, DType, Device, Format, MemoryKind, Tensor, ops};
use tandem_model::{Decoder, FlatWeights, LayerId, LayerWeights, PackedLayer, Packing, Result, WeightSource};

/// Every layer in bytes, and the one that was fetched last.
pub struct Packed<'a> {
    decoder: &'a Decoder,
    device: &'a Device,
    dtype: DType,
    layers: Vec<(Packing, Bytes)>,
    unpacked: Option<Tensor>,
}

impl<'a> Packed<'a> {
    /// Packs weights.
    pub fn new(
        decoder: &'a Decoder,
        device: &'a Device,
        weights: &FlatWeights,
        format: Format,
        dtype: DType,
    ) -> Self {
        let pack = |(layer, flat): (LayerId, &Tensor)| {
            let packing = Packing::new(decoder, layer, format, dtype);
            let mut bytes = Bytes::new(device, MemoryKind::Weights, packing.len()).unwrap();
            for piece in packing.pieces() {
                let values = flat.view().col_range(piece.flat.clone()).reshape(piece.rows, piece.cols);
                ops::pack(device, values, piece.format, bytes.range_mut(piece.bytes.clone())).unwrap();
            }
            (packing, bytes)
        };
        let layers = decoder.layers().into_iter().zip(&weights.layers).map(pack).collect();
        Self { decoder, device, dtype, layers, unpacked: None }
    }

    fn fetch_unpacked(&mut self, layer: LayerId, len: fn(&Packing) -> usize) -> Result<LayerWeights<'_>> {
        let (packing, bytes) = &self.layers[self.decoder.index(layer)];
        self.unpacked = None;
        if len(packing) > 0 {
            let mut unpacked = self.device.alloc(MemoryKind::Gathered, 1, len(packing), self.dtype)?;
            packing.unpack(self.device, bytes.view(), unpacked.view_mut())?;
            self.unpacked = Some(unpacked);
        }
        let unpacked = self.unpacked.as_ref().map(Tensor::view);
        Ok(LayerWeights::packed(PackedLayer::new(packing, bytes.view(), unpacked)))
    }
}

impl WeightSource for Packed<'_> {
    fn prefetch(&mut self, _: LayerId) -> Result<()> {
        Ok(())
    }

    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        self.fetch_unpacked(layer, Packing::unpacked_len)
    }

    fn packed_format(&self) -> Option<Format> {
        self.layers.first().map(|(packing, _)| packing.format())
    }

    fn fetch_packed(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        self.fetch_unpacked(layer, Packing::always_unpacked_len)
    }

    fn release(&mut self, _: LayerId) {}
}
