//! Weights that do not train: each layer one buffer of bytes, whole on every rank or in parts, on
//! the device or elsewhere.
//!
//! Weights stored in another type than matmuls read are unpacked on fetch and stay so until the
//! next fetch, or are left packed for products that read them so.

use std::sync::Arc;

use tandem_comm::ProcessGroup;
use tandem_kernels::bytes::Bytes;
use tandem_kernels::{DType, Device, Format, MemoryKind, Tensor};
use tandem_model::{
    Decoder, LayerId, LayerWeights, PackedLayer, Packing, Result as ModelResult, WeightSource,
};

use crate::Result;
use crate::parallel::collective_buffer;
use crate::placement::OffloadedStorage;
use crate::placement::async_transfer::{AsyncTransfer, not_made};
use crate::placement::offload::bring_bytes;
use crate::placement::prefetch::{LayerLoader, LayerPrefetcher};

/// Frozen weights.
pub struct FrozenWeights {
    parts: Parts,
    slots: LayerPrefetcher<Layer>,
}

/// Stored part of every layer.
#[derive(Clone)]
struct Parts {
    device: Device,
    decoder: Arc<Decoder>,
    dtype: DType,
    packings: Packings,
    /// Per layer.
    bytes: Arc<Vec<Bytes>>,
    /// Returns whether layers are fetched on demand, from other ranks or from offload.
    travels: bool,
    /// Returns whether layers are sharded over ranks.
    is_divided: bool,
}

/// How the layers of a decoder are packed.
#[derive(Clone)]
pub struct Packings {
    embedding: Packing,
    /// By block; blocks of one layout share a packing.
    blocks: Vec<Arc<Packing>>,
    head: Packing,
}

impl Packings {
    /// As [`Packing::new`].
    pub fn new(decoder: &Decoder, format: Format, dtype: DType) -> Self {
        let of = |layer| Packing::new(decoder, layer, format, dtype);
        let mut blocks: Vec<Arc<Packing>> = Vec::new();
        for index in 0..decoder.spec().num_layers {
            let layout = decoder.layout(LayerId::Block(index));
            let like = (0..index).find(|&other| decoder.layout(LayerId::Block(other)) == layout);
            let packing =
                like.map_or_else(|| Arc::new(of(LayerId::Block(index))), |other| blocks[other].clone());
            blocks.push(packing);
        }
        Self { embedding: of(LayerId::Embedding), blocks, head: of(LayerId::Head) }
    }

    /// Format of the blocks' matrices.
    pub fn format(&self) -> Format {
        self.embedding.format()
    }

    /// One layer.
    pub fn packing(&self, layer: LayerId) -> &Packing {
        match layer {
            LayerId::Embedding => &self.embedding,
            LayerId::Block(index) => &self.blocks[index],
            LayerId::Head => &self.head,
        }
    }
}

/// A layer that is here, or on its way.
struct Layer {
    id: LayerId,
    /// The whole layer, if fetched.
    bytes: Option<Bytes>,
    unpacked: Option<Tensor>,
}

impl FrozenWeights {
    /// Creates it over this rank's stored bytes: its shard by [`Packing::counts`] with a `group` of
    /// its own, else whole layers. `away` is the offload storage, if any.
    pub fn new(
        device: &Device,
        decoder: Arc<Decoder>,
        packings: Packings,
        bytes: Vec<Bytes>,
        group: Option<ProcessGroup>,
        away: Option<OffloadedStorage>,
        dtype: DType,
    ) -> Result<Self> {
        let (travels, is_divided) = (away.is_some() || group.is_some(), group.is_some());
        let (device, bytes) = (device.clone(), Arc::new(bytes));
        Self::bringing(Parts { device, decoder, dtype, packings, bytes, travels, is_divided }, group, away)
    }

    /// Creates a read-only view of the weights for another thread, as
    /// [`crate::weights::Policy::reader`].
    pub fn reader(
        &self,
        device: &Device,
        away: Option<OffloadedStorage>,
        shard: &mut ProcessGroup,
    ) -> Result<Self> {
        let group = if self.parts.is_divided { Some(shard.split(0)?) } else { None };
        Self::bringing(Parts { device: device.clone(), ..self.parts.clone() }, group, away)
    }

    /// Fetches a layer of which at least the elements of this length are unpacked.
    fn fetch_unpacked(&mut self, id: LayerId, len: fn(&Packing) -> usize) -> ModelResult<LayerWeights<'_>> {
        let Parts { device, decoder, dtype, packings, bytes: stored, .. } = &self.parts;
        let packing = packings.packing(id);
        let Layer { bytes, unpacked, .. } = self.slots.fetch(id, &self.parts)?;
        let bytes = bytes.as_ref().unwrap_or(&stored[decoder.index(id)]);
        if unpacked.as_ref().map_or(0, Tensor::cols) < len(packing) {
            *unpacked = None;
            let mut out = device.alloc(MemoryKind::Gathered, 1, len(packing), *dtype)?;
            packing.unpack(device, bytes.view(), out.view_mut())?;
            *unpacked = Some(out);
        }
        Ok(LayerWeights::packed(PackedLayer::new(packing, bytes.view(), unpacked.as_ref().map(Tensor::view))))
    }

    fn bringing(
        parts: Parts,
        group: Option<ProcessGroup>,
        mut away: Option<OffloadedStorage>,
    ) -> Result<Self> {
        let group = group.unwrap_or_else(ProcessGroup::alone);
        let (name, rank, size) = (format!("rank {} frozen", group.rank()), group.rank(), group.size());
        let Parts { device, decoder, packings, bytes, travels, .. } = &parts;
        let (all, kept, of) = (packings.clone(), bytes.clone(), decoder.clone());
        let transfer =
            AsyncTransfer::new(device, &name, group, 1, *travels, move |by, group, layer: &mut Layer| {
                let Some(bytes) = &mut layer.bytes else { return Ok(()) };
                let counts = all.packing(layer.id).counts(size);
                let own = &kept[of.index(layer.id)];
                let start: usize = counts[..rank].iter().sum();
                let place = bytes.range_mut(start..start + counts[rank]);
                bring_bytes(&mut away, by, own.view(), place).map_err(not_made)?;
                own.evict_pages();
                group.all_gather_numbers(collective_buffer::bytes(by, bytes), &counts)
            })?;
        let slots = LayerPrefetcher::new(transfer, *travels);
        Ok(Self { parts, slots })
    }
}

impl LayerLoader<Layer> for Parts {
    fn prefetch_pages(&self, id: LayerId) {
        self.bytes[self.decoder.index(id)].prefetch_pages();
    }

    fn begin(&self, id: LayerId) -> ModelResult<Layer> {
        let room = || Bytes::new(&self.device, MemoryKind::Gathered, self.packings.packing(id).len());
        let bytes = if self.travels { Some(room()?) } else { None };
        Ok(Layer { id, bytes, unpacked: None })
    }

    fn on_loaded(&self, _: LayerId, _: &mut Layer) -> ModelResult<()> {
        Ok(())
    }
}

impl WeightSource for FrozenWeights {
    fn prefetch(&mut self, layer: LayerId) -> ModelResult<()> {
        self.slots.prefetch(layer, &self.parts)
    }

    fn fetch(&mut self, id: LayerId) -> ModelResult<LayerWeights<'_>> {
        self.fetch_unpacked(id, Packing::unpacked_len)
    }

    fn packed_format(&self) -> Option<Format> {
        Some(self.parts.packings.format())
    }

    fn fetch_packed(&mut self, id: LayerId) -> ModelResult<LayerWeights<'_>> {
        self.fetch_unpacked(id, Packing::always_unpacked_len)
    }

    /// The layer stays until another is fetched.
    fn release(&mut self, _: LayerId) {}

    fn release_all(&mut self) {
        self.slots.forget();
    }
}
