//! Weights of which each rank holds a part: a layer is gathered from all ranks before it runs.
//!
//! Two gathered layers are in memory at a time: the one that runs, and the one that the walk has announced, which travels
//! meanwhile. The one that has run stays until another is fetched, so that the head, which is fetched several times in a row,
//! is gathered once. What is gathered when depends on the walk's calls alone, so it is the same on every rank. On one rank
//! nothing travels, and there is one layer at a time.

use std::ops::Range;
use std::sync::Arc;

use tandem_comm::{CommError, Group};
use tandem_kernels::{DType, Device, Kind, Tensor, ops};
use tandem_model::{
    Decoder, FlatLayer, FlatWeights, LayerId, LayerWeights, ModelError, Result as ModelResult, WeightSource,
};

use super::Partition;
use super::courier::Courier;
use crate::{Result, numbers};

/// Sharded weights, masters or frozen.
pub struct ShardedWeights {
    device: Device,
    decoder: Arc<Decoder>,
    partition: Arc<Partition>,
    dtype: DType,
    parts: Parts,
    /// By layer.
    pieces: Arc<Vec<Pieces>>,
    courier: Courier<Gathered>,
    /// The layer that was fetched last.
    current: Option<Gathered>,
    /// One that has come before it was asked for.
    ahead: Option<Gathered>,
    /// What is to be gathered as soon as there is room for it.
    announced: Option<LayerId>,
}

/// This rank's part of every layer.
enum Parts {
    /// f32.
    Masters(FlatWeights),
    /// What lies in matrices in the compute type (absent where that is f32), and the rest in f32.
    Frozen(Vec<(Option<Tensor>, Tensor)>),
}

/// What of a layer travels.
struct Pieces {
    /// In f32: all of the layer, or what follows the matrices.
    flat: Piece,
    /// Matrices in the compute type, if they travel apart from the rest.
    matrices: Option<Piece>,
    /// Elements of matrices that are needed in the compute type as well, if any.
    compute_len: Option<usize>,
}

/// A range of a layer, and whose it is.
struct Piece {
    range: Range<usize>,
    /// What this rank holds of it, counted from the start of its part.
    own: Range<usize>,
    /// The same, counted from the start of the range.
    place: Range<usize>,
    /// Elements of the range by rank.
    counts: Vec<usize>,
}

/// A whole layer, or one on its way.
struct Gathered {
    layer: LayerId,
    index: usize,
    /// Matrices in the compute type `[1, compute_len]`.
    matrices: Option<Tensor>,
    /// f32: what follows the matrices, or all of the layer.
    flat: Tensor,
}

impl ShardedWeights {
    /// Weights that train, from this rank's part of each layer. `group` is used for nothing else.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn masters(
        device: &Device,
        decoder: Arc<Decoder>,
        partition: Arc<Partition>,
        group: Group,
        parts: FlatWeights,
        dtype: DType,
    ) -> Result<Self> {
        Self::new(device, decoder, partition, group, Parts::Masters(parts), dtype)
    }

    /// Weights that do not train: as [`ShardedWeights::masters`], but kept in the compute type.
    ///
    /// # Errors
    /// If memory runs out, or the system refuses a thread.
    pub fn frozen(
        device: &Device,
        decoder: Arc<Decoder>,
        partition: Arc<Partition>,
        group: Group,
        parts: FlatWeights,
        dtype: DType,
        kind: Kind,
    ) -> Result<Self> {
        let mut frozen = Vec::with_capacity(parts.layers.len());
        for (index, (layer, part)) in decoder.layers().into_iter().zip(parts.layers).enumerate() {
            let matrices = Piece::new(&partition, index, 0..decoder.layout(layer).compute_len);
            if dtype == DType::F32 || decoder.layout(layer).compute_len == 0 {
                frozen.push((None, part));
                continue;
            }
            let cut = matrices.own.len();
            let mut in_dtype = device.alloc(kind, 1, cut, dtype)?;
            ops::cast(device, part.view().col_range(0..cut), in_dtype.view_mut())?;
            let mut rest = device.alloc(kind, 1, part.cols() - cut, DType::F32)?;
            ops::cast(device, part.view().col_range(cut..part.cols()), rest.view_mut())?;
            frozen.push((Some(in_dtype), rest));
        }
        Self::new(device, decoder, partition, group, Parts::Frozen(frozen), dtype)
    }

    fn new(
        device: &Device,
        decoder: Arc<Decoder>,
        partition: Arc<Partition>,
        group: Group,
        parts: Parts,
        dtype: DType,
    ) -> Result<Self> {
        let trains = matches!(parts, Parts::Masters(_));
        let layers = decoder.layers().into_iter();
        let pieces = layers.map(|layer| Pieces::new(&decoder, &partition, layer, dtype, trains));
        let pieces: Arc<Vec<_>> = Arc::new(pieces.collect());
        let (name, all) = (format!("rank {} gather", group.rank()), pieces.clone());
        let courier = Courier::new(device, &name, group, move |group, gathered: &mut Gathered| {
            let Pieces { flat, matrices, .. } = &all[gathered.index];
            group.all_gather_numbers(numbers::tensor(&mut gathered.flat), &flat.counts)?;
            match (&mut gathered.matrices, matrices) {
                (Some(whole), Some(piece)) => group.all_gather_numbers(numbers::tensor(whole), &piece.counts),
                _ => Ok(()),
            }
        })?;
        let device = device.clone();
        let (current, ahead, announced) = (None, None, None);
        Ok(Self { device, decoder, partition, dtype, parts, pieces, courier, current, ahead, announced })
    }

    /// This rank's part of the masters; nothing for frozen weights.
    pub fn parts(&self) -> Option<&FlatWeights> {
        match &self.parts {
            Parts::Masters(parts) => Some(parts),
            Parts::Frozen(_) => None,
        }
    }

    /// As [`ShardedWeights::parts`], to be written. What was gathered before is forgotten.
    pub fn parts_mut(&mut self) -> Option<&mut FlatWeights> {
        // If a gather is under way that fails, the next one says so too.
        drop(self.courier.end());
        (self.current, self.ahead, self.announced) = (None, None, None);
        match &mut self.parts {
            Parts::Masters(parts) => Some(parts),
            Parts::Frozen(_) => None,
        }
    }

    /// Whose the parts are.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Copies a whole layer's masters into host memory. All ranks call this.
    ///
    /// # Errors
    /// If a rank is lost.
    pub fn read_layer(&mut self, index: usize, flat: &mut [f32]) -> Result<()> {
        self.arrive()?;
        let Parts::Masters(parts) = &self.parts else { return Ok(()) };
        flat[self.partition.owned(index)].copy_from_slice(parts.layers[index].view().as_slice());
        Ok(self.courier.group().all_gather(flat, self.partition.counts(index))?)
    }

    /// Begins to gather a layer: this rank's part of it, converted to what it travels in, at its place among all.
    fn begin(&mut self, layer: LayerId) -> ModelResult<()> {
        let Self { device, decoder, dtype, parts, pieces, .. } = &*self;
        let index = decoder.index(layer);
        let Pieces { flat: piece, matrices, compute_len } = &pieces[index];
        let place = |piece: &Piece, whole: &mut Tensor| {
            let own = piece.own.clone();
            let part = match parts {
                Parts::Masters(parts) => parts.layers[index].view().col_range(own),
                Parts::Frozen(layers) => match &layers[index] {
                    (None, flat) => flat.view().col_range(own),
                    (Some(matrices), rest) => if piece.range.start == 0 { matrices } else { rest }.view(),
                },
            };
            ops::cast(device, part, whole.view_mut().col_range(piece.place.clone()))
        };
        let mut flat = device.alloc(Kind::Weights, 1, piece.range.len(), DType::F32)?;
        place(piece, &mut flat)?;
        let in_dtype = |len: &usize| device.alloc(Kind::Weights, 1, *len, *dtype);
        let mut whole = compute_len.as_ref().map(in_dtype).transpose()?;
        if let (Some(piece), Some(whole)) = (matrices, &mut whole) {
            place(piece, whole)?;
        }
        self.courier.begin(Gathered { layer, index, matrices: whole, flat });
        Ok(())
    }

    /// Waits for the layer that is under way, if there is one.
    fn arrive(&mut self) -> ModelResult<()> {
        let Some((mut gathered, outcome)) = self.courier.end() else { return Ok(()) };
        outcome.map_err(lost)?;
        if let Gathered { index, matrices: Some(whole), flat, .. } = &mut gathered
            && self.pieces[*index].matrices.is_none()
        {
            ops::cast(&self.device, flat.view().col_range(0..whole.cols()), whole.view_mut())?;
        }
        self.ahead = Some(gathered);
        Ok(())
    }

    /// Makes this layer the current one.
    fn bring(&mut self, layer: LayerId) -> ModelResult<()> {
        // The old one is freed before there is a new one.
        self.current = None;
        self.arrive()?;
        if self.ahead.as_ref().is_none_or(|ahead| ahead.layer != layer) {
            let other = self.ahead.take();
            self.begin(layer)?;
            self.arrive()?;
            self.current = std::mem::replace(&mut self.ahead, other);
        } else {
            self.current = self.ahead.take();
        }
        Ok(())
    }

    /// Begins to gather what was announced, if there is room for it.
    fn go_ahead(&mut self) -> ModelResult<()> {
        if self.ahead.is_some() || self.courier.is_under_way() {
            return Ok(());
        }
        let is_here = |layer: &LayerId| self.current.as_ref().is_some_and(|current| current.layer == *layer);
        match self.announced.take() {
            Some(layer) if !is_here(&layer) => self.begin(layer),
            _ => Ok(()),
        }
    }
}

impl Pieces {
    fn new(decoder: &Decoder, partition: &Partition, layer: LayerId, dtype: DType, trains: bool) -> Self {
        let (index, layout) = (decoder.index(layer), decoder.layout(layer));
        let (cut, len) = (layout.compute_len, layout.len);
        let compute_len = (dtype != DType::F32 && cut > 0).then_some(cut);
        // The look-up of tokens reads masters, where there are any.
        let is_whole = compute_len.is_none() || (layer == LayerId::Embedding && trains);
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

/// What a store answers when a rank is gone.
pub(crate) fn lost(error: CommError) -> ModelError {
    ModelError::Store(Box::new(error))
}

impl WeightSource for ShardedWeights {
    fn prefetch(&mut self, layer: LayerId) -> ModelResult<()> {
        if !self.partition.is_divided() {
            return Ok(());
        }
        self.announced = Some(layer);
        self.go_ahead()
    }

    fn fetch(&mut self, layer: LayerId) -> ModelResult<LayerWeights<'_>> {
        if self.current.as_ref().is_none_or(|current| current.layer != layer) {
            self.bring(layer)?;
        }
        self.go_ahead()?;
        let Some(Gathered { index, matrices, flat, .. }) = &self.current else {
            unreachable!("brought above")
        };
        let layout = self.decoder.layout(layer);
        Ok(match matrices {
            Some(matrices) if self.pieces[*index].matrices.is_some() => {
                LayerWeights::new(FlatLayer::frozen(layout, flat.view(), matrices.view()))
            }
            matrices => {
                let matrices = matrices.as_ref().map(Tensor::view);
                LayerWeights::new(FlatLayer::new(layout, flat.view(), matrices))
            }
        })
    }

    /// It stays until another is fetched.
    fn release(&mut self, _: LayerId) {}
}
