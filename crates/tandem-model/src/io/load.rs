//! HF tensors, read into flat f32 buffers one layer at a time, in parallel, from mapped files.

use std::collections::{HashMap, HashSet};
use std::mem::take;
use std::ops::Range;

use rayon::prelude::*;
use tandem_kernels::{BytesMut, DType, Device, Format, MemoryKind};

use super::archive::{StoredType, TensorArchive};
use super::order;
use super::quantised::{Quantised, companions};
use crate::decoder::Decoder;
use crate::families::{Family, HfTensor, pieces};
use crate::init::init_score;
use crate::layout::Block;
use crate::layout::{LayerId, ParamKind};
use crate::weights::FlatWeights;
use crate::{ModelError, Result};

/// Weights on disk, checked against a decoder. For a part of a decoder, only its own elements are
/// read.
pub struct WeightFiles {
    archive: TensorArchive,
    /// Tensors of each layer by [`Decoder::index`], under their names in the files.
    layers: Vec<Vec<Source>>,
    heads: usize,
}

/// Tensor in the files, and its place in a layer.
pub(crate) struct Source {
    piece: HfTensor,
    /// Part that is read; all, if absent.
    block: Option<Block>,
    /// Elements of the layer's flat buffer.
    range: Range<usize>,
    /// Quantisation, if any.
    quantised: Option<Quantised>,
    /// Fresh elements, if the files lack the tensor.
    drawn: Option<Vec<f32>>,
}

impl From<HfTensor> for Source {
    fn from(piece: HfTensor) -> Self {
        Self { block: None, range: piece.range.clone(), piece, quantised: None, drawn: None }
    }
}

/// Suffixes of tensors that are no parameters: rotary tables and causal masks of older versions.
const HARMLESS: [&str; 4] =
    ["rotary_emb.inv_freq", "attn.masked_bias", "attention.masked_bias", "attention.bias"];

impl WeightFiles {
    /// Finds every tensor of the decoder, with the companions of those that are quantised.
    /// A language model's files that are read as a reward model lack the score head: it is drawn
    /// from `score_seed`.
    ///
    /// # Errors
    /// If any is missing, left over, or of another shape or type: one error lists all of them.
    pub(crate) fn new(
        archive: TensorArchive,
        family: &Family,
        decoder: &Decoder,
        score_seed: Option<u64>,
    ) -> Result<Self> {
        let whole = decoder.whole();
        let spec = whole.spec();
        let mut problems = Vec::new();
        let (mut used, mut quantised) = (HashSet::new(), HashMap::new());
        let mut drawn = None;
        let mut layers = Vec::new();
        for layer in whole.layers() {
            let mut found = pieces(family, spec, layer, whole.layout(layer));
            for piece in &mut found {
                let Some(name) = locate(&archive, family, piece) else {
                    if let Some(seed) = score_seed.filter(|_| piece.part == ParamKind::ScoreWeight) {
                        drawn = Some(init_score(decoder, seed));
                        continue;
                    }
                    problems.push(format!("missing: {} {:?}", piece.name, piece.shape));
                    continue;
                };
                let found = check(&archive, &name, piece);
                if !matches!(found, Ok(None)) {
                    used.extend(companions(&name));
                }
                match found {
                    Ok(Some(how)) => _ = quantised.insert(name.clone(), how),
                    Ok(None) => {}
                    Err(problem) => problems.push(problem),
                }
                used.insert(name.clone());
                piece.name = name;
            }
            layers.push(found);
        }
        let mut left: Vec<&str> = archive.names().into_iter().filter(|name| !used.contains(*name)).collect();
        left.sort_unstable();
        for name in left {
            if let Some(problem) = left_over(&archive, family, whole, &layers, name) {
                problems.push(problem);
            }
        }
        if problems.is_empty() {
            let heads = spec.attention.heads;
            let mut held = |layer: LayerId| {
                let mut held = sources(decoder, layer, take(&mut layers[whole.index(layer)]));
                for source in &mut held {
                    source.quantised = quantised.get(&source.piece.name).copied();
                    if source.piece.part == ParamKind::ScoreWeight {
                        source.drawn = drawn.take();
                    }
                }
                held
            };
            let layers = decoder.layers().into_iter().map(&mut held).collect();
            Ok(Self { archive, layers, heads })
        } else {
            Err(ModelError::Tensors { path: archive.path().to_owned(), config: "config.json", problems })
        }
    }

    /// Fills a layer's flat buffer (`layout.len` elements); padding becomes zero. `index` is
    /// [`Decoder::index`].
    ///
    /// # Errors
    /// A weight is not finite.
    pub fn read_layer(&self, index: usize, flat: &mut [f32]) -> Result<()> {
        self.read_range(index, 0..flat.len(), flat)
    }

    /// Fills a range of a layer's flat buffer: whole tensors, and the padding between them.
    ///
    /// # Errors
    /// A weight is not finite.
    ///
    /// # Panics
    /// If the range cuts a tensor, or the buffer is not of its length.
    pub fn read_range(&self, index: usize, range: Range<usize>, flat: &mut [f32]) -> Result<()> {
        read_sources(&self.archive, &self.layers[index], self.heads, range, flat)
    }

    /// Returns the tensors, under their names in the files.
    pub(crate) fn archive(&self) -> &TensorArchive {
        &self.archive
    }

    /// Returns whether a range of a layer's flat buffer is one tensor that is stored in this
    /// format.
    pub fn is_stored(&self, index: usize, range: &Range<usize>, format: Format) -> bool {
        self.stored(index, range)
            .is_some_and(|(piece, quantised)| quantised.format(piece.cols) == Some(format))
    }

    /// Packs a tensor for which [`WeightFiles::is_stored`] is true, without unpacking it.
    pub fn pack_stored(
        &self,
        device: &Device,
        index: usize,
        range: &Range<usize>,
        packed: BytesMut,
    ) -> Result<()> {
        let (piece, quantised) = self.stored(index, range).ok_or_else(|| {
            ModelError::Invalid(format!("elements {range:?} of layer {index} are not stored in a format"))
        })?;
        quantised.pack(device, &self.archive, piece, packed)?;
        self.archive.end_reading()
    }

    fn stored(&self, index: usize, range: &Range<usize>) -> Option<(&HfTensor, Quantised)> {
        let source = self.layers[index].iter().find(|source| source.range == *range)?;
        source.quantised.filter(|_| source.block.is_none()).map(|quantised| (&source.piece, quantised))
    }

    /// Reads every layer into device memory of the given kind. A dry run only counts the memory.
    pub fn load(&self, decoder: &Decoder, device: &Device, kind: MemoryKind) -> Result<FlatWeights> {
        let mut layers = Vec::with_capacity(self.layers.len());
        for (index, layer) in decoder.layers().into_iter().enumerate() {
            let len = decoder.layout(layer).len;
            let mut flat = device.alloc(kind, 1, len, DType::F32)?;
            device.host_write(flat.view_mut(), |flat| self.read_layer(index, flat))?.transpose()?;
            layers.push(flat);
        }
        Ok(FlatWeights { layers })
    }
}

/// Fills a range of a layer's flat buffer from its tensors, in the order of their places: see
/// [`WeightFiles::read_range`].
///
/// # Errors
/// A weight is not finite.
pub(crate) fn read_sources(
    archive: &TensorArchive,
    sources: &[Source],
    heads: usize,
    range: Range<usize>,
    flat: &mut [f32],
) -> Result<()> {
    assert_eq!(flat.len(), range.len(), "a buffer of another length");
    let mut rest = flat;
    let mut at = range.start;
    let mut jobs = Vec::new();
    let is_inside = |source: &&Source| {
        let inside = range.start <= source.range.start && source.range.end <= range.end;
        let outside = source.range.end <= range.start || range.end <= source.range.start;
        assert!(inside || outside, "{:?} cuts {}", range, source.piece.name);
        inside
    };
    for source in sources.iter().filter(is_inside) {
        let (padding, after) = rest.split_at_mut(source.range.start - at);
        padding.fill(0.0);
        let (place, after) = after.split_at_mut(source.range.len());
        at = source.range.end;
        rest = after;
        jobs.push((source, place));
    }
    rest.fill(0.0);
    let read = |Source { piece, block, quantised, drawn, .. }: &Source, place: &mut [f32]| {
        if let Some(drawn) = drawn {
            return place.copy_from_slice(drawn);
        }
        if let Some(quantised) = quantised {
            return quantised.read(archive, piece, block.as_ref(), place);
        }
        let stored = archive.get(&piece.name).expect("the constructor found it");
        order::read(piece, heads, block.as_ref(), &stored.dtype, stored.bytes, place);
    };
    let not_finite = jobs.into_par_iter().find_map_first(|(source, place)| {
        read(source, place);
        // Without a branch in the loop it is as fast as memory.
        let is_finite = place.iter().fold(true, |is_finite, weight| is_finite & weight.is_finite());
        let found = place.iter().find(|weight| !is_finite && !weight.is_finite())?;
        Some((&source.piece.name, *found))
    });
    archive.end_reading()?;
    match not_finite {
        None => Ok(()),
        Some((name, weight)) => Err(ModelError::format(
            archive.path(),
            format!(
                "{name} holds {weight}, expected finite weights; the file is damaged, or was written by a run that \
                 diverged"
            ),
        )),
    }
}

/// Returns the parts of a layer's tensors that a decoder, or a tensor-parallel shard, reads.
fn sources(decoder: &Decoder, layer: LayerId, pieces: Vec<HfTensor>) -> Vec<Source> {
    let (whole, slice) = (decoder.whole(), decoder.slice());
    if slice.count == 1 {
        return pieces.into_iter().map(Source::from).collect();
    }
    let mut sources: Vec<Source> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let (param, own) = whole
            .layout(layer)
            .param(piece.part)
            .zip(decoder.layout(layer).param(piece.part))
            .expect("a piece is of a parameter, which every slice has");
        // Tensors of one parameter are stacked by rows, those of a bias by columns.
        let before = piece.range.start - param.offset;
        let (row, col) = (before / param.cols, before % param.cols);
        let block = slice.block(whole.spec(), param);
        let block = block.within(&(row..row + piece.rows), &(col..col + piece.cols));
        let start = match sources.last() {
            Some(last) if last.piece.part == piece.part => last.range.end,
            _ => own.offset,
        };
        sources.push(Source {
            range: start..start + block.len(),
            block: Some(block),
            piece,
            quantised: None,
            drawn: None,
        });
    }
    sources
}

/// Returns the name under which a tensor is stored.
fn locate(archive: &TensorArchive, family: &Family, piece: &HfTensor) -> Option<String> {
    // A folder saved from the bare model leaves the prefix off.
    let short = piece.name.strip_prefix(family.base_prefix).map(str::to_owned);
    // torch.save of a model that transformers 5 loaded has the name that the module has in memory.
    let in_memory = family.name_in_memory(&piece.name);
    let mut names = std::iter::once(piece.name.clone()).chain(short).chain(in_memory);
    names.find(|name| archive.get(name).is_some())
}

/// Returns the quantisation of a stored tensor, if any, or the problem with it.
fn check(archive: &TensorArchive, name: &str, piece: &HfTensor) -> Result<Option<Quantised>, String> {
    let quantised = Quantised::find(archive, name, piece)?;
    let Some(stored) = archive.get(name).filter(|_| quantised.is_none()) else { return Ok(quantised) };
    if let StoredType::Other(dtype) = &stored.dtype {
        return Err(format!("wrong type: {name} is {dtype}, expected f32, bf16 or f16"));
    }
    if stored.shape != piece.shape {
        return Err(format!("wrong shape: {name} is {:?}, expected {:?}", stored.shape, piece.shape));
    }
    Ok(None)
}

/// Returns the problem with a tensor that no parameter uses; `None` if it is harmless.
fn left_over(
    archive: &TensorArchive,
    family: &Family,
    decoder: &Decoder,
    layers: &[Vec<HfTensor>],
    name: &str,
) -> Option<String> {
    let is_mask = name.ends_with(".attn.bias") && archive.get(name).is_some_and(|t| t.shape.len() == 4);
    if is_mask || family.is_beside(name) || HARMLESS.iter().any(|end| name.ends_with(end)) {
        return None;
    }
    let stored = archive.get(name)?;
    // A reward model read from a language model's folder does not use its head.
    let of_head = [ParamKind::HeadWeight, ParamKind::HeadBias];
    if decoder.spec().head.is_score()
        && of_head.iter().any(|&part| family.names(part).any(|known| known == name))
    {
        return None;
    }
    if decoder.spec().head.tied && family.names(ParamKind::HeadWeight).any(|known| known == name) {
        let embedding = &layers[decoder.index(LayerId::Embedding)];
        let table = embedding.iter().find(|piece| piece.part == ParamKind::TokenTable)?;
        let equal =
            archive.get(&table.name).is_some_and(|t| t.dtype == stored.dtype && t.bytes == stored.bytes);
        return (!equal).then(|| {
            format!("left over: {name} differs from {}, but tie_word_embeddings makes them one", table.name)
        });
    }
    Some(format!("left over: {name} {:?} {}", stored.shape, stored.dtype))
}
