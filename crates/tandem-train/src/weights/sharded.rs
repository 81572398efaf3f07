//! Weights that train and are not all on the device: a layer is brought there before it runs. A
//! rank holds a part of each, and the others the rest; or it holds them whole, but offloaded; or
//! both.

use std::ops::Range;
use std::sync::Arc;

use tandem_comm::ProcessGroup;
use tandem_kernels::{DType, Device, MemoryKind, Tensor, ops};
use tandem_model::{
    Decoder, FlatLayer, FlatWeights, LayerId, LayerWeights, Result as ModelResult, WeightSource,
};

use crate::Result;
use crate::parallel::{Partition, collective_buffer};
use crate::placement::OffloadedStorage;
use crate::placement::async_transfer::{AsyncTransfer, Outcome, not_made};
use crate::placement::offload::bring;
use crate::placement::prefetch::{LayerLoader, LayerPrefetcher};
use crate::weights::gather::gather_updated;
use crate::weights::replicated::unshared;

/// Masters that are divided, offloaded, or both.
pub struct ShardedWeights {
    parts: Parts,
    slots: LayerPrefetcher<Gathered>,
}

/// Sharded weights: this rank's part of every layer, gathered on demand.
struct Parts {
    device: Device,
    /// Device of the masters.
    home: Device,
    decoder: Arc<Decoder>,
    partition: Arc<Partition>,
    dtype: DType,
    /// f32. Gathers in progress share them; writes happen only without one.
    masters: Arc<FlatWeights>,
    /// Per layer.
    pieces: Arc<Vec<Pieces>>,
}

/// Layout of a gathered layer.
struct Pieces {
    /// f32 part: the whole layer, or everything after the matrices.
    flat: Piece,
    /// Matrices in the compute type, if they travel apart from the rest.
    matrices: Option<Piece>,
    /// Elements of matrices that are needed in the compute type as well, if any.
    compute_len: Option<usize>,
}

/// A range of a layer and its owners.
struct Piece {
    range: Range<usize>,
    /// This rank's range, relative to the start of its part.
    own: Range<usize>,
    /// The same, relative to the start of the range.
    place: Range<usize>,
    /// Elements of the range by rank.
    counts: Vec<usize>,
}

/// A whole layer, or one on its way.
struct Gathered {
    index: usize,
    /// Raw parts until the gather completes.
    masters: Option<Arc<FlatWeights>>,
    /// Matrices in the compute type `[1, compute_len]`.
    matrices: Option<Tensor>,
    /// f32: everything after the matrices, or the whole layer.
    flat: Tensor,
}

impl ShardedWeights {
    /// Creates trainable weights from this rank's shard of each layer. `group` is used for nothing
    /// else. `away` is the offload storage, if any.
    pub fn new(
        device: &Device,
        decoder: Arc<Decoder>,
        partition: Arc<Partition>,
        group: ProcessGroup,
        masters: FlatWeights,
        away: Option<OffloadedStorage>,
        dtype: DType,
    ) -> Result<Self> {
        let home = away.as_ref().map_or(device, OffloadedStorage::home).clone();
        let layers = decoder.layers().into_iter();
        let pieces = layers.map(|layer| Pieces::new(&decoder, &partition, layer, dtype));
        let pieces: Arc<Vec<_>> = Arc::new(pieces.collect());
        let (device, masters) = (device.clone(), Arc::new(masters));
        Self::bringing(Parts { device, home, decoder, partition, dtype, masters, pieces }, group, away)
    }

    fn bringing(parts: Parts, group: ProcessGroup, mut away: Option<OffloadedStorage>) -> Result<Self> {
        let travels = away.is_some() || parts.partition.is_divided();
        let (name, all) = (format!("rank {} gather", group.rank()), parts.pieces.clone());
        let takes_a_while = away.is_some() || group.size() > 1;
        let gather = move |by: &Device, group: &mut ProcessGroup, gathered: &mut Gathered| {
            gathered.put_own(by, &mut away, &all[gathered.index])?;
            gathered.gather(by, group, &all[gathered.index])
        };
        let transfer = AsyncTransfer::new(&parts.device, &name, group, 1, takes_a_while, gather)?;
        Ok(Self { parts, slots: LayerPrefetcher::new(transfer, travels) })
    }

    /// Creates a read-only view of the weights for another thread, as
    /// [`crate::weights::Policy::reader`].
    pub fn reader(
        &self,
        device: &Device,
        away: Option<OffloadedStorage>,
        shard: &mut ProcessGroup,
    ) -> Result<Self> {
        let Parts { home, decoder, partition, dtype, pieces, .. } = &self.parts;
        let parts = Parts {
            device: device.clone(),
            home: home.clone(),
            decoder: decoder.clone(),
            partition: partition.clone(),
            dtype: *dtype,
            masters: Arc::default(),
            pieces: pieces.clone(),
        };
        let group = if partition.is_divided() { shard.split(0)? } else { ProcessGroup::alone() };
        Self::bringing(parts, group, away)
    }

    /// Lends these weights to a reader of them.
    pub fn share_with(&self, reader: &mut Self) {
        reader.parts.masters = self.parts.masters.clone();
    }

    /// Releases the shared weights of a reader.
    pub fn release_shared(&mut self) {
        self.slots.forget();
        self.parts.masters = Arc::default();
    }

    /// This rank's part of the masters.
    pub fn parts(&self) -> &FlatWeights {
        &self.parts.masters
    }

    /// Mutable [`ShardedWeights::parts`]; drops gathered layers.
    pub fn parts_mut(&mut self) -> &mut FlatWeights {
        self.slots.forget();
        unshared(&mut self.parts.masters)
    }

    /// Device that holds and updates the masters.
    pub fn home(&self) -> &Device {
        &self.parts.home
    }

    /// Partition of the parts.
    pub fn partition(&self) -> &Partition {
        &self.parts.partition
    }

    /// After the update of this rank's shard by `updated`: gathers the others' shards if masters
    /// are held whole.
    pub fn gather(&mut self, updated: &Partition, group: &mut ProcessGroup) -> Result<()> {
        if self.partition().is_divided() || !updated.is_divided() || group.size() == 1 {
            return Ok(());
        }
        let home = self.parts.home.clone();
        gather_updated(&home, &mut self.parts_mut().layers, updated, group)
    }

    /// Copies a whole layer's masters into host memory. All ranks call this.
    pub fn read_layer(&mut self, index: usize, flat: &mut [f32]) -> Result<()> {
        let Parts { partition, masters, .. } = &self.parts;
        let mut group = self.slots.group(&self.parts)?;
        let own = &mut flat[partition.owned(index)];
        let masters = masters.layers[index].view();
        self.parts.home.host_read(masters, |masters| own.copy_from_slice(masters))?;
        Ok(group.all_gather(flat, partition.counts(index))?)
    }
}

impl Gathered {
    /// Writes this rank's part at its place in the gather buffer, converted to the transfer type.
    fn put_own(
        &mut self,
        by: &Device,
        away: &mut Option<OffloadedStorage>,
        Pieces { flat, matrices, .. }: &Pieces,
    ) -> Outcome {
        let masters = self.masters.take().expect("it sets out with them");
        let master = &masters.layers[self.index];
        let mut put = |piece: &Piece, whole: &mut Tensor| {
            let part = master.view().col_range(piece.own.clone());
            bring(away, by, part, whole.view_mut().col_range(piece.place.clone())).map_err(not_made)
        };
        put(flat, &mut self.flat)?;
        if let (Some(piece), Some(whole)) = (matrices, &mut self.matrices) {
            put(piece, whole)?;
        }
        master.evict_pages();
        Ok(())
    }

    /// Brings the others' parts.
    fn gather(
        &mut self,
        by: &Device,
        group: &mut ProcessGroup,
        Pieces { flat, matrices, .. }: &Pieces,
    ) -> Outcome {
        group.together(|group| {
            group.all_gather_numbers(collective_buffer::tensor(by, &mut self.flat), &flat.counts)?;
            match (&mut self.matrices, matrices) {
                (Some(whole), Some(piece)) => {
                    group.all_gather_numbers(collective_buffer::tensor(by, whole), &piece.counts)
                }
                _ => Ok(()),
            }
        })
    }
}

impl LayerLoader<Gathered> for Parts {
    fn prefetch_pages(&self, layer: LayerId) {
        self.masters.layers[self.decoder.index(layer)].prefetch_pages();
    }

    fn begin(&self, layer: LayerId) -> ModelResult<Gathered> {
        let Self { device, decoder, dtype, masters, pieces, .. } = self;
        let index = decoder.index(layer);
        let Pieces { flat, compute_len, .. } = &pieces[index];
        let flat = device.alloc(MemoryKind::Gathered, 1, flat.range.len(), DType::F32)?;
        let in_dtype = |len: &usize| device.alloc(MemoryKind::Gathered, 1, *len, *dtype);
        let matrices = compute_len.as_ref().map(in_dtype).transpose()?;
        Ok(Gathered { index, masters: Some(masters.clone()), matrices, flat })
    }

    fn on_loaded(&self, _: LayerId, gathered: &mut Gathered) -> ModelResult<()> {
        if let Gathered { index, matrices: Some(whole), flat, .. } = gathered
            && self.pieces[*index].matrices.is_none()
        {
            ops::cast(&self.device, flat.view().col_range(0..whole.cols()), whole.view_mut())?;
        }
        Ok(())
    }
}

impl Pieces {
    fn new(decoder: &Decoder, partition: &Partition, layer: LayerId, dtype: DType) -> Self {
        let (index, layout) = (decoder.index(layer), decoder.layout(layer));
        let (cut, len) = (layout.compute_len, layout.len);
        let compute_len = (dtype != DType::F32 && cut > 0).then_some(cut);
        // The look-up of tokens reads masters.
        let is_whole = compute_len.is_none() || layer == LayerId::Embedding;
        Self {
            flat: Piece::new(partition, index, if is_whole { 0..len } else { cut..len }),
            matrices: (!is_whole).then(|| Piece::new(partition, index, 0..cut)),
            compute_len,
        }
    }
}

impl Piece {
    fn new(partition: &Partition, layer: usize, range: Range<usize>) -> Self {
        let clip = |part: Range<usize>| {
            part.start.clamp(range.start, range.end)..part.end.clamp(range.start, range.end)
        };
        let mut start = 0;
        let counts = partition.counts(layer).iter().map(|&count| {
            start += count;
            clip(start - count..start).len()
        });
        let counts = counts.collect();
        let owned = partition.owned(layer);
        let mine = clip(owned.clone());
        let own = if mine.is_empty() { 0..0 } else { mine.start - owned.start..mine.end - owned.start };
        let place = if mine.is_empty() { 0..0 } else { mine.start - range.start..mine.end - range.start };
        Self { range, own, place, counts }
    }
}

impl WeightSource for ShardedWeights {
    fn prefetch(&mut self, layer: LayerId) -> ModelResult<()> {
        self.slots.prefetch(layer, &self.parts)
    }

    fn fetch(&mut self, layer: LayerId) -> ModelResult<LayerWeights<'_>> {
        let Gathered { index, matrices, flat, .. } = self.slots.fetch(layer, &self.parts)?;
        let layout = self.parts.decoder.layout(layer);
        let matrices = matrices.as_ref().map(Tensor::view);
        Ok(LayerWeights::new(match matrices {
            Some(matrices) if self.parts.pieces[*index].matrices.is_some() => {
                FlatLayer::without_masters(layout, flat.view(), matrices)
            }
            matrices => FlatLayer::new(layout, flat.view(), matrices),
        }))
    }

    /// The layer stays until another is fetched.
    fn release(&mut self, _: LayerId) {}

    fn release_all(&mut self) {
        self.slots.forget();
    }
}
