//! A base with an adapter beside it, as a policy has them.

use tandem_kernels::{DType, Device, Format, MemoryKind};
use tandem_model::{
    AdapterConfig, AdapterKind, AdapterWeights, Decoder, FlatLayer, FlatWeights, LayerId, LayerWeights,
    ResidentWeights, Result, Targets, WeightSource, adapter,
};

/// The rank of every term.
pub const RANK: usize = 3;

/// An adapter.
pub fn config(kind: AdapterKind, targets: Targets, modules_to_save: &[&str]) -> AdapterConfig {
    let modules_to_save = modules_to_save.iter().map(|&name| name.to_owned()).collect();
    AdapterConfig {
        kind,
        rank: RANK,
        alpha: 5.0,
        rank_stabilized: false,
        dropout: 0.0,
        targets,
        modules_to_save,
        file: None,
    }
}

/// A base with an adapter, as a policy has them.
pub struct Adapted<'a, B> {
    pub decoder: &'a Decoder,
    pub base: B,
    pub weights: &'a FlatWeights,
    pub copy: Option<&'a FlatWeights>,
    /// Layers that were fetched.
    pub fetched: Vec<LayerId>,
}

impl<B> Adapted<'_, B> {
    fn of<'w>(
        weights: &'w FlatWeights,
        copy: Option<&'w FlatWeights>,
        decoder: &'w Decoder,
        layer: LayerId,
    ) -> AdapterWeights<'w> {
        let index = decoder.index(layer);
        let copy = copy.map(|copy| copy.layers[index].view());
        let weights = FlatLayer::new(decoder.trained(layer), weights.layers[index].view(), copy);
        AdapterWeights { adapter: decoder.adapter().unwrap(), layer, weights }
    }
}

impl<B: WeightSource> WeightSource for Adapted<'_, B> {
    fn prefetch(&mut self, _: LayerId) -> Result<()> {
        Ok(())
    }

    fn fetch(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        self.fetched.push(layer);
        let own = Self::of(self.weights, self.copy, self.decoder, layer);
        Ok(self.base.fetch(layer)?.with_adapter(Some(own)))
    }

    fn packed_format(&self) -> Option<Format> {
        self.base.packed_format()
    }

    fn fetch_packed(&mut self, layer: LayerId) -> Result<LayerWeights<'_>> {
        self.fetched.push(layer);
        let own = Self::of(self.weights, self.copy, self.decoder, layer);
        Ok(self.base.fetch_packed(layer)?.with_adapter(Some(own)))
    }

    fn fetch_both(
        &mut self,
        layer: LayerId,
        may_be_packed: bool,
    ) -> Result<(LayerWeights<'_>, LayerWeights<'_>)> {
        self.fetched.push(layer);
        let own = Self::of(self.weights, self.copy, self.decoder, layer);
        let base = self.base.fetch_for(layer, may_be_packed)?;
        Ok((base.with_adapter(Some(own)), base))
    }

    fn release(&mut self, _: LayerId) {}
}

/// An adapter of which nothing is zero.
pub fn adapter_weights(decoder: &Decoder, device: &Device, base: &FlatWeights) -> FlatWeights {
    let plain = Decoder::new(decoder.spec().clone(), decoder.positions()).unwrap();
    let mut source = ResidentWeights::new(&plain, base, None);
    let mut layers = Vec::new();
    for layer in decoder.layers() {
        let mut flat = device.zeros(MemoryKind::Master, 1, decoder.trained(layer).len, DType::F32).unwrap();
        adapter::copy_base(decoder, device, None, &source.fetch(layer).unwrap(), layer, &mut flat).unwrap();
        let salt = decoder.index(layer) as f32;
        for param in &decoder.trained(layer).params {
            for (i, x) in flat.view_mut().into_slice::<f32>()[param.range()].iter_mut().enumerate() {
                let wave = ((i * 7 + param.part as usize * 13) as f32 + salt).sin();
                *x = if param.part.is_factor() { 0.2 * wave } else { *x * (1.0 + 0.1 * wave) };
            }
        }
        layers.push(flat);
    }
    FlatWeights { layers }
}
