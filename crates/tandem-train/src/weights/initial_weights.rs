//! The weights that a run starts from, and where it puts them.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tandem_comm::ProcessGroup;
use tandem_kernels::{Bytes, BytesMut, DType, Device, Format, MemoryKind, ops};
use tandem_model::adapter::{self, AdapterFiles, PeftFolder};
use tandem_model::{
    Decoder, FlatWeights, LayerId, ModelFolder, PackedMatrix, Packing, TensorParallelOps, WeightFiles,
    WeightSource, init,
};

use crate::Result;
use crate::config::{Config, Weights};
use crate::parallel::{DeviceMesh, Partition};
use crate::placement::{MemoryPlacement, OffloadedStorage};
use crate::weights::{FrozenWeights, Packings, Policy, ReplicatedWeights, ShardedWeights, Trained};

/// Initial weights of a run.
pub struct InitialWeights {
    source: Source,
    /// The format that they are quantised in already, if they are.
    quantised: Option<Format>,
}

enum Source {
    /// Files on disk.
    Files {
        /// Of the decoder, which may be a shard.
        own: Box<WeightFiles>,
        /// Of the whole decoder, which quantised weights are cut from.
        whole: Option<Box<WeightFiles>>,
    },
    /// A seed.
    Random(u64),
}

/// Is shown the weights of every layer as they are loaded, whole but for the slice, in the order of
/// their places.
pub type LoadObserver<'a> = &'a mut dyn FnMut(LayerId, &[f32]);

impl InitialWeights {
    /// For dry runs: no content; `quantised` as in the files.
    pub fn dry(quantised: Option<Format>) -> Self {
        Self { source: Source::Random(0), quantised }
    }

    /// Initial weights of the policy, for `decoder`, which may be a shard.
    pub fn for_policy(config: &Config, folder: &ModelFolder, decoder: &Decoder) -> Result<Self> {
        match &config.weights {
            Weights::Folder | Weights::File(_) => Self::from_folder(folder, decoder),
            // Drawn weights are kept as the folder keeps its own, so that they take the same
            // memory.
            Weights::Random => {
                Ok(Self { source: Source::Random(config.seed), quantised: folder.quantised() })
            }
        }
    }

    /// Initial weights of the reference: its own folder, or the policy's.
    pub fn for_reference(config: &Config, folder: &ModelFolder, decoder: &Decoder) -> Result<Self> {
        match &config.reference.model {
            Some(path) => Self::from_folder(&ModelFolder::open(path)?, decoder),
            None => Self::for_policy(config, folder, decoder),
        }
    }

    /// Weights of a folder.
    pub fn from_folder(folder: &ModelFolder, decoder: &Decoder) -> Result<Self> {
        let is_cut = decoder.slice().count > 1 && decoder.adapter().is_some();
        let whole = if is_cut { Some(Box::new(folder.weights(decoder.whole())?)) } else { None };
        let own = Box::new(folder.weights(decoder)?);
        Ok(Self { source: Source::Files { own, whole }, quantised: folder.quantised() })
    }

    /// The format that [`InitialWeights::frozen`] keeps matrices in.
    pub fn frozen_format(&self, config: &Config) -> Format {
        config.frozen_format(self.quantised)
    }

    /// Loads the policy: full weights or an adapter on a base. `partition` divides trainable
    /// parameters among the shard group.
    ///
    /// # Errors
    /// Files do not fit, memory runs out, or the system refuses a thread.
    pub fn policy(
        &self,
        config: &Config,
        decoder: &Arc<Decoder>,
        placement: &MemoryPlacement,
        mesh: &mut DeviceMesh,
        partition: &Arc<Partition>,
        see: Option<LoadObserver<'_>>,
    ) -> Result<Policy> {
        let shard = mesh.shard();
        if decoder.adapter().is_none() {
            let kind = MemoryKind::Master;
            return Ok(Policy::full(self.trained(config, decoder, placement, shard, partition, kind, see)?));
        }
        let device = &placement.device;
        let nothing = &mut |_: LayerId, _: &[f32]| {};
        let see = see.unwrap_or(nothing);
        let folder = config.adapter.as_ref().and_then(|adapter| adapter.folder());
        let from = self.adapter(folder.map(PathBuf::as_path), decoder, device)?;
        let mut base =
            self.frozen(config, decoder, placement, shard, MemoryKind::Weights, Some(&mut *see))?;
        let (kind, split) = (MemoryKind::Master, mesh.split());
        let masters = adapter_masters(config, decoder, device, split, kind, &from, base.as_mut())?;
        for (layer, flat) in decoder.layers().into_iter().zip(&masters.layers) {
            device.host_read(flat.view(), |flat| see(layer, flat))?;
        }
        let adapter =
            ReplicatedWeights::new(device, decoder.clone(), masters, config.compute.compute_type())?;
        Ok(Policy::adapted(adapter, base))
    }

    /// Initial adapter: the one in `folder`, or a new one.
    ///
    /// # Errors
    /// Its files do not fit, or hold embedding copies of another base.
    pub fn adapter(&self, folder: Option<&Path>, decoder: &Decoder, device: &Device) -> Result<AdapterStart> {
        let Some(folder) = folder else { return Ok(AdapterStart::New) };
        if device.is_meta() {
            return Ok(AdapterStart::Unread);
        }
        let files = PeftFolder::open(folder)?.weights(decoder)?;
        // Random weights carry no adapter.
        if let Source::Files { own, .. } = &self.source {
            files.check_base(own)?;
        }
        Ok(AdapterStart::Files(files))
    }

    /// Weights that change, which are the model's own.
    pub fn trained(
        &self,
        config: &Config,
        decoder: &Arc<Decoder>,
        placement: &MemoryPlacement,
        shard: &mut ProcessGroup,
        partition: &Arc<Partition>,
        kind: MemoryKind,
        see: Option<LoadObserver<'_>>,
    ) -> Result<Trained> {
        let dtype = config.compute.compute_type();
        let in_parts = |partition: Arc<Partition>, group, see: Option<LoadObserver<'_>>| {
            let (device, decoder) = (&placement.device, decoder.clone());
            let parts = self.load_parts(&decoder, placement.state(), kind, &partition, see)?;
            let away = OffloadedStorage::from_placement(placement)?;
            let weights = ShardedWeights::new(device, decoder, partition, group, parts, away, dtype)?;
            Ok(Trained::Sharded(Box::new(weights)))
        };
        if config.compute.sharded().weights {
            return in_parts(partition.clone(), shard.split(0)?, see);
        }
        if placement.is_offloaded() {
            return in_parts(Arc::new(Partition::whole(decoder)), ProcessGroup::alone(), see);
        }
        let masters = self.load(decoder, &placement.device, kind, see)?;
        Ok(Trained::Replicated(ReplicatedWeights::new(&placement.device, decoder.clone(), masters, dtype)?))
    }

    /// Weights that never change, whole or this rank's part of them.
    pub fn frozen(
        &self,
        config: &Config,
        decoder: &Arc<Decoder>,
        placement: &MemoryPlacement,
        shard: &mut ProcessGroup,
        kind: MemoryKind,
        see: Option<LoadObserver<'_>>,
    ) -> Result<Box<FrozenWeights>> {
        let dtype = config.compute.compute_type();
        let format = self.frozen_format(config);
        Packing::check_cut(decoder, format)?;
        if config.compute.fp8_matmul {
            Packing::check_fp8(decoder, dtype)?;
        }
        let packings = Packings::new(decoder, format, dtype);
        let divides = config.compute.sharded().weights && shard.size() > 1;
        let group = if divides { Some(shard.split(0)?) } else { None };
        let place = if divides { (shard.rank(), shard.size()) } else { (0, 1) };
        let bytes = self.pack(decoder, placement, kind, &packings, place, see)?;
        let (device, decoder, away) =
            (&placement.device, decoder.clone(), OffloadedStorage::from_placement(placement)?);
        Ok(Box::new(FrozenWeights::new(device, decoder, packings, bytes, group, away, dtype)?))
    }

    /// Weights that never change, whole in the memory of `device`.
    pub fn resident(
        &self,
        decoder: &Arc<Decoder>,
        device: &Device,
        format: Format,
        dtype: DType,
    ) -> Result<FrozenWeights> {
        let placement = MemoryPlacement::all_in(device.clone());
        let packings = Packings::new(decoder, format, dtype);
        let bytes = self.pack(decoder, &placement, MemoryKind::Weights, &packings, (0, 1), None)?;
        FrozenWeights::new(device, decoder.clone(), packings, bytes, None, None, dtype)
    }

    /// This rank's part of every packed layer. One piece at a time is in memory as f32.
    fn pack(
        &self,
        decoder: &Decoder,
        placement: &MemoryPlacement,
        kind: MemoryKind,
        packings: &Packings,
        (rank, num_ranks): (usize, usize),
        mut see: Option<LoadObserver<'_>>,
    ) -> Result<Vec<Bytes>> {
        let layers = decoder.layers();
        let lengths = layers
            .iter()
            .flat_map(|&layer| packings.packing(layer).pieces().map(|piece| tensor_of(piece).0.len()));
        let (scratch, packer, home) =
            (placement.gradient_device(), placement.pack_device(), placement.state());
        let mut values = scratch.alloc(MemoryKind::Scratch, 1, lengths.max().unwrap_or(0), DType::F32)?;
        let (mut drawn, mut drawn_whole) = (Vec::new(), Vec::new());
        let mut packed = Vec::with_capacity(layers.len());
        for (index, layer) in layers.into_iter().enumerate() {
            let packing = packings.packing(layer);
            let counts = packing.counts(num_ranks);
            let start: usize = counts[..rank].iter().sum();
            let own = start..start + counts[rank];
            let mut bytes = Bytes::new(home, kind, own.len())?;
            if let (Source::Random(seed), false) = (&self.source, packer.is_meta()) {
                drawn.resize(decoder.layout(layer).len, 0.0);
                init::init_layer(decoder, layer, *seed, &mut drawn);
                if packing.pieces().any(|piece| piece.whole.is_some()) {
                    drawn_whole.resize(decoder.whole().layout(layer).len, 0.0);
                    init::init_layer(decoder.whole(), layer, *seed, &mut drawn_whole);
                }
            }
            for piece in packing.pieces() {
                let part = piece.bytes.start.max(own.start)..piece.bytes.end.min(own.end);
                if part.is_empty() && see.is_none() {
                    continue;
                }
                let (flat, rows, cols) = tensor_of(piece);
                let (files, index, drawn) = match (&self.source, &piece.whole) {
                    (Source::Files { own, .. }, None) => (Some(&**own), index, &drawn),
                    (Source::Files { whole, .. }, Some(_)) => {
                        (whole.as_deref(), decoder.whole().index(layer), &drawn)
                    }
                    (Source::Random(_), None) => (None, index, &drawn),
                    (Source::Random(_), Some(_)) => (None, index, &drawn_whole),
                };
                // Codes and scales that the files hold are taken as they are.
                let stored = files.filter(|files| files.is_stored(index, flat, piece.format));
                let mut values = values.view_mut().col_range(0..flat.len());
                if stored.is_none() || see.is_some() {
                    let fill = |values: &mut [f32]| -> Result<()> {
                        match files {
                            Some(files) => files.read_range(index, flat.clone(), values)?,
                            None => values.copy_from_slice(&drawn[flat.clone()]),
                        }
                        see.iter_mut().for_each(|see| see(layer, values));
                        Ok(())
                    };
                    packer.host_write(values.reborrow(), fill)?.transpose()?;
                }
                let values = values.view().reshape(rows, cols);
                let pack = |packed: BytesMut| -> Result<()> {
                    match stored {
                        Some(files) => Ok(files.pack_stored(packer, index, flat, packed)?),
                        None => Ok(ops::pack(packer, values, piece.format, packed)?),
                    }
                };
                if part == piece.bytes && piece.whole.is_none() {
                    pack(bytes.range_mut(part.start - own.start..part.end - own.start))?;
                } else if !part.is_empty() {
                    let len = piece.format.packed_len(rows, cols);
                    let mut whole = Bytes::new(scratch, MemoryKind::Scratch, len)?;
                    pack(whole.view_mut())?;
                    let mut start = piece.bytes.start;
                    let all = 0..len;
                    let kept = piece.whole.as_ref().map(|whole| &whole.kept[..]);
                    for kept in kept.unwrap_or(std::slice::from_ref(&all)) {
                        let here = part.start.max(start)..part.end.min(start + kept.len());
                        if !here.is_empty() {
                            let of_whole = kept.start + here.start - start..kept.start + here.end - start;
                            let place = here.start - own.start..here.end - own.start;
                            packer.copy_bytes(whole.range(of_whole), bytes.range_mut(place))?;
                        }
                        start += kept.len();
                    }
                }
            }
            bytes.evict_pages();
            packed.push(bytes);
        }
        Ok(packed)
    }

    /// Loads all weights into device memory.
    pub fn load(
        &self,
        decoder: &Decoder,
        device: &Device,
        kind: MemoryKind,
        see: Option<LoadObserver<'_>>,
    ) -> Result<FlatWeights> {
        let whole = match &self.source {
            Source::Files { own, .. } => own.load(decoder, device, kind)?,
            Source::Random(seed) => init::init(decoder, device, kind, *seed)?,
        };
        if let Some(see) = see {
            for (layer, flat) in decoder.layers().into_iter().zip(&whole.layers) {
                device.host_read(flat.view(), |flat| see(layer, flat))?;
            }
        }
        Ok(whole)
    }

    /// This rank's part of every layer in the memory of `device`. One whole layer at a time is in
    /// host memory.
    fn load_parts(
        &self,
        decoder: &Decoder,
        device: &Device,
        kind: MemoryKind,
        partition: &Partition,
        mut see: Option<LoadObserver<'_>>,
    ) -> Result<FlatWeights> {
        let (mut layers, mut flat) = (Vec::new(), Vec::new());
        for (index, layer) in decoder.layers().into_iter().enumerate() {
            let owned = partition.owned(index);
            let mut part = device.alloc(kind, 1, owned.len(), DType::F32)?;
            if !device.is_meta() {
                flat.clear();
                flat.resize(partition.len(index), 0.0);
                match &self.source {
                    Source::Files { own, .. } => own.read_layer(index, &mut flat)?,
                    Source::Random(seed) => init::init_layer(decoder, layer, *seed, &mut flat),
                }
                see.iter_mut().for_each(|see| see(layer, &flat));
                device.host_write(part.view_mut(), |part| part.copy_from_slice(&flat[owned]))?;
                part.evict_pages();
            }
            layers.push(part);
        }
        Ok(FlatWeights { layers })
    }
}

/// Elements of a flat buffer that a piece is packed from, and their rows and columns.
fn tensor_of(piece: &PackedMatrix) -> (&Range<usize>, usize, usize) {
    match &piece.whole {
        Some(whole) => (&whole.flat, whole.rows, whole.cols),
        None => (&piece.flat, piece.rows, piece.cols),
    }
}

/// Source of an adapter's initial values.
pub enum AdapterStart {
    /// A new adapter, which adds nothing to the base.
    New,
    /// Files of a folder.
    Files(AdapterFiles),
    /// Files; a dry run does not read them.
    Unread,
}

/// The weights that an adapter starts from. `split` are the ranks that hold the other slices.
pub fn adapter_masters(
    config: &Config,
    decoder: &Decoder,
    device: &Device,
    split: Option<&dyn TensorParallelOps>,
    kind: MemoryKind,
    from: &AdapterStart,
    base: &mut dyn WeightSource,
) -> Result<FlatWeights> {
    let mut layers = Vec::new();
    for (index, layer) in decoder.layers().into_iter().enumerate() {
        let mut flat = device.alloc(kind, 1, decoder.trained(layer).len, DType::F32)?;
        match from {
            AdapterStart::Files(files) => {
                device.host_write(flat.view_mut(), |flat| files.read_layer(index, flat))?.transpose()?;
            }
            AdapterStart::New => {
                let seed = config.seed;
                device.host_write(flat.view_mut(), |flat| adapter::init_layer(decoder, layer, seed, flat))?;
            }
            AdapterStart::Unread => {}
        }
        if matches!(from, AdapterStart::New) && flat.cols() > 0 {
            adapter::copy_base(decoder, device, split, &base.fetch(layer)?, layer, &mut flat)?;
            base.release(layer);
            // The masters are contiguous.
            base.release_all();
        }
        layers.push(flat);
    }
    Ok(FlatWeights { layers })
}
