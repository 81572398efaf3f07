//! Weights of which each rank holds a part: a layer is gathered from all ranks when it is fetched.
//!
//! One gathered layer is in memory at a time. It stays until another is fetched, so that the head, which is fetched several
//! times in a row, is gathered once.

use std::ops::Range;
use std::sync::Arc;

use tandem_comm::{Call, CommError, ElementKind, Group, Operation};
use tandem_kernels::{DType, Device, Kind, Tensor, bf16, ops};
use tandem_model::{
    Decoder, FlatWeights, LayerId, LayerWeights, ModelError, Result as ModelResult, WeightSource,
};

use super::Partition;
use crate::Result;

/// Sharded weights, masters or frozen.
pub struct ShardedWeights {
    device: Device,
    decoder: Arc<Decoder>,
    partition: Arc<Partition>,
    group: Group,
    dtype: DType,
    parts: Parts,
    gathered: Option<Gathered>,
}

/// This rank's part of every layer.
enum Parts {
    /// f32.
    Masters(FlatWeights),
    /// What lies in matrices in the compute type (absent where that is f32), and the rest in f32.
    Frozen(Vec<(Option<Tensor>, Tensor)>),
}

/// A whole layer.
struct Gathered {
    layer: LayerId,
    /// Matrices in the compute type `[1, compute_len]`.
    matrices: Option<Tensor>,
    /// f32: what follows the matrices, or all of the layer.
    flat: Tensor,
    /// Whether `flat` is all of it.
    is_whole: bool,
}

impl ShardedWeights {
    /// Weights that train, from this rank's part of each layer. `group` is used for nothing else.
    pub fn masters(
        device: &Device,
        decoder: Arc<Decoder>,
        partition: Arc<Partition>,
        group: Group,
        parts: FlatWeights,
        dtype: DType,
    ) -> Self {
        let (device, parts) = (device.clone(), Parts::Masters(parts));
        Self { device, decoder, partition, group, dtype, parts, gathered: None }
    }

    /// Weights that do not train: as [`ShardedWeights::masters`], but kept in the compute type.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn frozen(
        device: &Device,
        decoder: Arc<Decoder>,
        partition: Arc<Partition>,
        group: Group,
        parts: FlatWeights,
        dtype: DType,
    ) -> Result<Self> {
        let mut frozen = Vec::with_capacity(parts.layers.len());
        for (index, (layer, part)) in decoder.layers().into_iter().zip(parts.layers).enumerate() {
            let matrices = within(&partition, index, 0..decoder.layout(layer).compute_len);
            if dtype == DType::F32 || decoder.layout(layer).compute_len == 0 {
                frozen.push((None, part));
                continue;
            }
            let cut = matrices.own.len();
            let mut in_dtype = device.alloc(Kind::Reference, 1, cut, dtype)?;
            ops::cast(device, part.view().col_range(0..cut), in_dtype.view_mut())?;
            let mut rest = device.alloc(Kind::Reference, 1, part.cols() - cut, DType::F32)?;
            ops::cast(device, part.view().col_range(cut..part.cols()), rest.view_mut())?;
            frozen.push((Some(in_dtype), rest));
        }
        let (device, parts) = (device.clone(), Parts::Frozen(frozen));
        Ok(Self { device, decoder, partition, group, dtype, parts, gathered: None })
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
        self.gathered = None;
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
        let Parts::Masters(parts) = &self.parts else { return Ok(()) };
        flat[self.partition.owned(index)].copy_from_slice(parts.layers[index].view().as_slice());
        Ok(self.group.all_gather(flat, self.partition.counts(index))?)
    }

    fn gather(&mut self, layer: LayerId) -> ModelResult<Gathered> {
        let index = self.decoder.index(layer);
        let layout = self.decoder.layout(layer);
        let (cut, len) = (layout.compute_len, layout.len);
        let is_split = self.dtype != DType::F32 && cut > 0;
        // The look-up of tokens reads masters, where there are any.
        let is_whole = !is_split || (layer == LayerId::Embedding && matches!(self.parts, Parts::Masters(_)));
        let rest = if is_whole { 0..len } else { cut..len };
        let mut flat = self.device.alloc(Kind::Weights, 1, rest.len(), DType::F32)?;
        self.gather_range(index, &rest, &mut flat)?;
        let mut matrices = None;
        if is_split {
            let mut whole = self.device.alloc(Kind::Weights, 1, cut, self.dtype)?;
            if is_whole {
                ops::cast(&self.device, flat.view().col_range(0..cut), whole.view_mut())?;
            } else {
                self.gather_range(index, &(0..cut), &mut whole)?;
            }
            matrices = Some(whole);
        }
        Ok(Gathered { layer, matrices, flat, is_whole })
    }

    /// Fills `whole` with elements `range` of a layer, converted to its type before they travel.
    fn gather_range(&mut self, index: usize, range: &Range<usize>, whole: &mut Tensor) -> ModelResult<()> {
        let Within { own, place, counts } = within(&self.partition, index, range.clone());
        let part = match &self.parts {
            Parts::Masters(parts) => parts.layers[index].view().col_range(own),
            Parts::Frozen(layers) => match &layers[index] {
                (None, flat) => flat.view().col_range(own),
                (Some(matrices), rest) => if range.start == 0 { matrices } else { rest }.view(),
            },
        };
        ops::cast(&self.device, part, whole.view_mut().col_range(place))?;
        if matches!(self.device, Device::Meta(_)) {
            let kind = match whole.dtype() {
                DType::F32 => ElementKind::F32,
                DType::Bf16 => ElementKind::Bf16,
            };
            return self.group.dry(Call::parted(Operation::AllGather, kind, &counts)).map_err(lost);
        }
        let gathered = match whole.dtype() {
            DType::F32 => self.group.all_gather(whole.view_mut().into_slice::<f32>(), &counts),
            DType::Bf16 => self.group.all_gather(whole.view_mut().into_slice::<bf16>(), &counts),
        };
        gathered.map_err(lost)
    }
}

/// What a store answers when a rank is gone.
pub(crate) fn lost(error: CommError) -> ModelError {
    ModelError::Store(Box::new(error))
}

/// A range of a layer, and whose it is.
struct Within {
    /// What this rank holds of it, counted from the start of its part.
    own: Range<usize>,
    /// The same, counted from the start of the range.
    place: Range<usize>,
    /// Elements of the range by rank.
    counts: Vec<usize>,
}

fn within(partition: &Partition, layer: usize, range: Range<usize>) -> Within {
    let clip =
        |part: Range<usize>| part.start.clamp(range.start, range.end)..part.end.clamp(range.start, range.end);
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
    Within { own, place, counts }
}

impl WeightSource for ShardedWeights {
    fn prefetch(&mut self, _: LayerId) -> ModelResult<()> {
        Ok(())
    }

    fn fetch(&mut self, layer: LayerId) -> ModelResult<LayerWeights<'_>> {
        if self.gathered.as_ref().is_none_or(|gathered| gathered.layer != layer) {
            // The old one is freed before there is a new one.
            self.gathered = None;
            self.gathered = Some(self.gather(layer)?);
        }
        let Some(Gathered { matrices, flat, is_whole, .. }) = &self.gathered else {
            unreachable!("gathered above")
        };
        let layout = self.decoder.layout(layer);
        Ok(match matrices {
            Some(matrices) if !is_whole => LayerWeights::frozen(layout, flat.view(), matrices.view()),
            matrices => LayerWeights::new(layout, flat.view(), matrices.as_ref().map(Tensor::view)),
        })
    }

    fn release(&mut self, _: LayerId) {}
}
