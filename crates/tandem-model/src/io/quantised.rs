//! Quantised matrices in folders saved by `transformers`, by bitsandbytes or as FP8.
//!
//! nf4: `X.weight` holds the codes, in any type; `X.weight.absmax`, `.nested_absmax`, `.quant_map`,
//! `.nested_quant_map` and `.quant_state.bitsandbytes__nf4` (JSON) hold scales and code book. int8:
//! `X.weight` and `X.SCB`. FP8: `X.weight` holds E4M3, and the matrix is `X.weight` times
//! `X.weight_scale_inv` (transformers' `fp8`, DeepSeek) or `X.weight_scale` (compressed-tensors): one
//! number, one per row, or one per block of 128 × 128. Scales of activations beside them are not used:
//! activations are not rounded. A bitsandbytes matrix is stored as `[out, in]`, also GPT-2's, which ordinary folders
//! store transposed.

use rayon::prelude::*;
use serde_json::Value;
use tandem_kernels::bytes::BytesMut;
use tandem_kernels::format::{NF4_BLOCK, NF4_BLOCKS};
use tandem_kernels::ops::{self, StoredFp8, StoredInt8, StoredNf4};
use tandem_kernels::{Device, Format};

use super::archive::{StoredTensor, StoredType, TensorArchive};
use super::order::widened;
use crate::families::{HfLayout, HfTensor};
use crate::layout::Block;
use crate::{ModelError, Result};

/// Elements per parallel task.
const CHUNK: usize = 1 << 17;

const ADVICE: &str = "use the unquantised model, and set compute.format";

/// Quantisation of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Quantised {
    /// Four bits a weight.
    Nf4 {
        /// Mean of the scales.
        offset: f32,
    },
    /// A byte a weight.
    Int8,
    /// An FP8 number a weight.
    Fp8 {
        /// Word of the scales' name.
        word: &'static str,
        /// Rows and columns under one scale.
        block: [usize; 2],
    },
}

/// Words of the names of FP8 scales.
const FP8_SCALES: [&str; 2] = ["weight_scale_inv", "weight_scale"];

/// Words of the names of the scales of an FP8 module's input.
const FP8_INPUTS: [&str; 2] = ["input_scale", "activation_scale"];

/// Rows and columns of a block of weights under one FP8 scale.
pub(crate) const FP8_BLOCK: usize = 128;

/// Suffixes of the JSON beside a 4-bit tensor.
const NF4_STATE: &str = ".quant_state.bitsandbytes__nf4";
const FP4_STATE: &str = ".quant_state.bitsandbytes__fp4";

/// Suffixes and types of the companions of an nf4 tensor.
const NF4_PARTS: [(&str, &str); 5] = [
    (".absmax", "u8"),
    (".nested_absmax", "f32"),
    (".quant_map", "f32"),
    (".nested_quant_map", "f32"),
    (NF4_STATE, "u8"),
];

/// Lists the possible names of a quantised tensor's companions.
pub(crate) fn companions(name: &str) -> impl Iterator<Item = String> {
    let of_nf4 = NF4_PARTS.iter().map(|(end, _)| *end).chain([FP4_STATE]);
    of_nf4
        .map(move |end| format!("{name}{end}"))
        .chain(["SCB", "weight_format"].map(move |word| sibling(name, word)))
        .chain(FP8_SCALES.into_iter().chain(FP8_INPUTS).map(move |word| sibling(name, word)))
}

impl Quantised {
    /// Returns the quantisation of a tensor, if any, or the problem with it.
    pub(crate) fn find(
        archive: &TensorArchive,
        name: &str,
        piece: &HfTensor,
    ) -> Result<Option<Self>, String> {
        let has = |name: &str| archive.get(name).is_some();
        let unsupported = |what: &str| Err(format!("unsupported: {name} {what}; {ADVICE}"));
        if has(&format!("{name}{FP4_STATE}")) {
            return unsupported("is fp4, but nf4 is the only supported 4-bit type");
        }
        let (is_nf4, is_int8) = (has(&format!("{name}{NF4_STATE}")), has(&sibling(name, "SCB")));
        let fp8 = FP8_SCALES.into_iter().find(|word| has(&sibling(name, word)));
        if !is_nf4 && !is_int8 && fp8.is_none() {
            return Ok(None);
        }
        if piece.order == HfLayout::HeadInterleaved {
            return unsupported("is quantised with its heads in another order");
        }
        if is_int8 {
            return Self::find_int8(archive, name, piece).map(Some);
        }
        if let Some(word) = fp8 {
            return Self::find_fp8(archive, name, piece, word).map(Some);
        }
        if !has(&format!("{name}.nested_absmax")) {
            return unsupported(
                "is nf4 without double quantisation, which is required (bnb_4bit_use_double_quant)",
            );
        }
        Self::find_nf4(archive, name, piece).map(Some)
    }

    fn find_nf4(archive: &TensorArchive, name: &str, piece: &HfTensor) -> Result<Self, String> {
        for (end, dtype) in NF4_PARTS {
            require(archive, &format!("{name}{end}"), dtype)?;
        }
        let state_name = &format!("{name}{NF4_STATE}");
        let state = get(archive, state_name).bytes;
        let state: Value =
            serde_json::from_slice(state).map_err(|e| format!("malformed: {state_name}: {e}"))?;
        let shape = [piece.rows, piece.cols];
        if state["shape"] != Value::from(shape.as_slice()) {
            return Err(format!("wrong shape: {state_name} says {}, expected {shape:?}", state["shape"]));
        }
        let offset = state["nested_offset"].as_f64().map(|offset| offset as f32).filter(|x| x.is_finite());
        let offset =
            offset.ok_or_else(|| format!("malformed: {state_name} has no number for nested_offset"))?;
        let size = |key: &str| state[key].as_u64().unwrap_or(0) as usize;
        let found = Self::Nf4 { offset };
        let small = Small::new(archive, name, found);
        let stored = StoredNf4 {
            blocksize: size("blocksize"),
            nested_blocksize: size("nested_blocksize"),
            ..small.nf4(archive, name, offset)
        };
        stored.check(piece.rows, piece.cols).map_err(|reason| format!("unsupported: {name}: {reason}"))?;
        small.check(&format!("{name}.nested_absmax"))?;
        Ok(found)
    }

    fn find_int8(archive: &TensorArchive, name: &str, piece: &HfTensor) -> Result<Self, String> {
        let (scb, layout) = (sibling(name, "SCB"), sibling(name, "weight_format"));
        require(archive, name, "i8")?;
        require(archive, &scb, "f32")?;
        let found = archive.get(name).map(|stored| stored.shape).unwrap_or_default();
        if found != [piece.rows, piece.cols] {
            let expected = [piece.rows, piece.cols];
            return Err(format!("wrong shape: {name} is {found:?}, expected {expected:?}"));
        }
        let small = Small::new(archive, name, Self::Int8);
        let stored = small.int8(archive, name);
        stored.check(piece.rows, piece.cols).map_err(|reason| format!("wrong shape: {name}: {reason}"))?;
        small.check(&scb)?;
        match archive.get(&layout).map(|stored| stored.bytes) {
            None | Some([0]) => Ok(Self::Int8),
            Some(_) => Err(format!("unsupported: {layout} says that rows are not stored in order; {ADVICE}")),
        }
    }

    fn find_fp8(
        archive: &TensorArchive,
        name: &str,
        piece: &HfTensor,
        word: &'static str,
    ) -> Result<Self, String> {
        if piece.order != HfLayout::Rows {
            return Err(format!("unsupported: {name} is FP8 and stored as [in, out]; {ADVICE}"));
        }
        require(archive, name, "f8_e4m3")?;
        let (shape, expected) = (get(archive, name).shape, [piece.rows, piece.cols]);
        if shape != expected {
            return Err(format!("wrong shape: {name} is {shape:?}, expected {expected:?}"));
        }
        let scales = sibling(name, word);
        let stored = get(archive, &scales);
        if let StoredType::Other(_) | StoredType::Gguf(..) = stored.dtype {
            return Err(format!("wrong type: {scales} is {}, expected f32 or bf16", stored.dtype));
        }
        let [rows, cols] = expected;
        let of_blocks = expected.map(|len| len.div_ceil(FP8_BLOCK));
        let block = match stored.shape[..] {
            [] | [1] | [1, 1] => expected,
            [n] | [n, 1] if n == rows => [1, cols],
            [n, m] if [n, m] == of_blocks => [FP8_BLOCK; 2],
            _ => {
                return Err(format!(
                    "wrong shape: {scales} is {:?}, expected [1], {:?} for rows or {of_blocks:?} for blocks of \
                     {FP8_BLOCK}x{FP8_BLOCK}",
                    stored.shape,
                    [rows, 1]
                ));
            }
        };
        let found = Self::Fp8 { word, block };
        let small = Small::new(archive, name, found);
        small.fp8(archive, name, block).check(rows, cols).map_err(|e| format!("wrong shape: {name}: {e}"))?;
        small.check(&scales)?;
        Ok(found)
    }

    /// Returns the format that keeps the stored codes and scales of a matrix of `cols` columns, if
    /// there is one.
    pub(crate) const fn format(self, cols: usize) -> Option<Format> {
        match self {
            Self::Nf4 { .. } => Some(Format::Nf4),
            Self::Int8 => Some(Format::Int8),
            Self::Fp8 { block: [_, width], .. } if width >= cols => Some(Format::Fp8),
            Self::Fp8 { .. } => None,
        }
    }

    /// Reads a tensor, or a block of it, as f32.
    pub(crate) fn read(
        self,
        archive: &TensorArchive,
        piece: &HfTensor,
        block: Option<&Block>,
        out: &mut [f32],
    ) {
        let name = &piece.name;
        let small = Small::new(archive, name, self);
        let read = |first: usize, out: &mut [f32]| match self {
            Self::Nf4 { offset } => small.nf4(archive, name, offset).read(first, out),
            Self::Int8 => small.int8(archive, name).read(first, out),
            Self::Fp8 { block, .. } => small.fp8(archive, name, block).read(piece.cols, first, out),
        };
        let Some(block) = block else {
            out.par_chunks_mut(CHUNK).enumerate().for_each(|(index, out)| read(index * CHUNK, out));
            return;
        };
        let mut rest = out;
        for run in block.runs(piece.cols) {
            let (out, after) = rest.split_at_mut(run.len());
            read(run.start, out);
            rest = after;
        }
    }

    /// Packs a tensor: codes and scales as they are stored.
    pub(crate) fn pack(
        self,
        device: &Device,
        archive: &TensorArchive,
        piece: &HfTensor,
        packed: BytesMut,
    ) -> Result<()> {
        let (name, small) = (&piece.name, Small::new(archive, &piece.name, self));
        match self {
            Self::Nf4 { offset } => {
                let stored = small.nf4(archive, name, offset);
                ops::pack_stored_nf4(device, &stored, piece.rows, piece.cols, packed)?;
            }
            Self::Int8 => {
                let stored = small.int8(archive, name);
                ops::pack_stored_int8(device, &stored, piece.rows, piece.cols, packed)?;
            }
            Self::Fp8 { block, .. } => {
                let stored = small.fp8(archive, name, block);
                if stored.has_nan() {
                    return Err(ModelError::format(
                        archive.path(),
                        format!("{name} holds NaN, expected finite weights; the file is damaged"),
                    ));
                }
                ops::pack_stored_fp8(device, &stored, piece.rows, piece.cols, packed)?;
            }
        }
        Ok(())
    }
}

/// Scales and code book of a quantised tensor, copied because files need not align them for f32.
struct Small {
    /// Scales of nf4's scales, int8's largest magnitudes by row, or FP8's scales.
    scales: Vec<f32>,
    quant_map: Vec<f32>,
    nested_quant_map: Vec<f32>,
}

impl Small {
    fn new(archive: &TensorArchive, name: &str, quantised: Quantised) -> Self {
        let read = |name: &str| {
            let (numbers, _) = get(archive, name).bytes.as_chunks::<4>();
            numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
        };
        match quantised {
            Quantised::Nf4 { .. } => Self {
                scales: read(&format!("{name}.nested_absmax")),
                quant_map: read(&format!("{name}.quant_map")),
                nested_quant_map: read(&format!("{name}.nested_quant_map")),
            },
            Quantised::Int8 => Self {
                scales: read(&sibling(name, "SCB")),
                quant_map: Vec::new(),
                nested_quant_map: Vec::new(),
            },
            Quantised::Fp8 { word, .. } => {
                let StoredTensor { dtype, shape, bytes } = get(archive, &sibling(name, word));
                let scales = widened(&dtype, bytes, 0..shape.iter().product());
                Self { scales, quant_map: Vec::new(), nested_quant_map: Vec::new() }
            }
        }
    }

    /// Refuses scales, which are stored under `name`, that are not finite.
    fn check(&self, name: &str) -> Result<(), String> {
        match self.scales.iter().find(|scale| !scale.is_finite()) {
            None => Ok(()),
            Some(scale) => Err(format!("not finite: {name} holds {scale}")),
        }
    }

    fn nf4<'a>(&'a self, archive: &'a TensorArchive, name: &str, offset: f32) -> StoredNf4<'a> {
        StoredNf4 {
            weight: get(archive, name).bytes,
            absmax: get(archive, &format!("{name}.absmax")).bytes,
            quant_map: &self.quant_map,
            nested_absmax: &self.scales,
            nested_quant_map: &self.nested_quant_map,
            nested_offset: offset,
            blocksize: NF4_BLOCK,
            nested_blocksize: NF4_BLOCKS,
        }
    }

    fn int8<'a>(&'a self, archive: &'a TensorArchive, name: &str) -> StoredInt8<'a> {
        StoredInt8 { weight: get(archive, name).bytes, scb: &self.scales }
    }

    fn fp8<'a>(&'a self, archive: &'a TensorArchive, name: &str, block: [usize; 2]) -> StoredFp8<'a> {
        StoredFp8 { weight: get(archive, name).bytes, scales: &self.scales, block }
    }
}

/// Returns the name of another tensor of the same module.
fn sibling(name: &str, word: &str) -> String {
    let module = name.strip_suffix("weight").unwrap_or(name);
    format!("{module}{word}")
}

/// Returns a tensor that was found before.
fn get<'a>(archive: &'a TensorArchive, name: &str) -> StoredTensor<'a> {
    archive.get(name).unwrap_or_else(|| unreachable!("{name} was looked for before"))
}

/// Checks that the tensor exists and has this type.
fn require(archive: &TensorArchive, name: &str, dtype: &str) -> Result<(), String> {
    match archive.get(name).map(|stored| stored.dtype) {
        None => Err(format!("missing: {name}")),
        Some(StoredType::F32) if dtype == "f32" => Ok(()),
        Some(StoredType::Other(found)) if found == dtype => Ok(()),
        Some(found) => Err(format!("wrong type: {name} is {found}, expected {dtype}")),
    }
}
