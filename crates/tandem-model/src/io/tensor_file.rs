//! Writer of safetensors files, tensor by tensor, from the flat buffers of layers.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};
use tandem_kernels::{DType, Element, bf16};

use super::order;
use crate::families::HfTensor;
use crate::layout::LayerId;
use crate::{ModelError, Result};

/// Callback that fills a layer's flat buffer.
pub type ReadLayer<'a> = &'a mut dyn FnMut(LayerId, &mut [f32]) -> Result<()>;

/// Flat f32 buffer of one layer at a time.
pub(crate) struct LayerReader<'a> {
    read: ReadLayer<'a>,
    flat: Vec<f32>,
    held: Option<LayerId>,
}

impl<'a> LayerReader<'a> {
    pub(crate) fn new(read: ReadLayer<'a>) -> Self {
        Self { read, flat: Vec::new(), held: None }
    }

    pub(crate) fn get(&mut self, layer: LayerId, len: usize) -> Result<&[f32]> {
        if self.held != Some(layer) {
            self.held = None;
            self.flat.clear();
            self.flat.resize(len, 0.0);
            (self.read)(layer, &mut self.flat)?;
            self.held = Some(layer);
        }
        Ok(&self.flat)
    }
}

/// Tensor of a layer to write: the layer, the length of its buffer, and the tensor's place there.
pub(crate) struct LayerTensor {
    pub(crate) layer: LayerId,
    pub(crate) len: usize,
    pub(crate) piece: HfTensor,
}

impl LayerTensor {
    pub(crate) fn bytes(&self, dtype: DType) -> u64 {
        (self.piece.range.len() * dtype.size()) as u64
    }
}

/// Tensor to write.
pub(crate) enum Tensor<'a> {
    /// Part of a layer's buffer, written in the file's type.
    Layer(LayerTensor),
    /// Tensor of another file, copied as it is.
    Copied {
        name: &'a str,
        /// Type as safetensors files name it.
        dtype: String,
        shape: Vec<usize>,
        bytes: &'a [u8],
    },
}

impl Tensor<'_> {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Layer(tensor) => &tensor.piece.name,
            Self::Copied { name, .. } => name,
        }
    }

    /// Returns the length in a file of type `dtype`.
    pub(crate) fn bytes(&self, dtype: DType) -> u64 {
        match self {
            Self::Layer(tensor) => tensor.bytes(dtype),
            Self::Copied { bytes, .. } => bytes.len() as u64,
        }
    }

    /// Returns the largest power of two up to eight that divides the length of an element in bytes.
    pub(crate) fn alignment(&self, dtype: DType) -> usize {
        match self {
            Self::Layer(_) => dtype.size(),
            Self::Copied { shape, bytes, .. } => {
                let elements: usize = shape.iter().product();
                let size = bytes.len().checked_div(elements).unwrap_or(1);
                1 << size.max(1).trailing_zeros().min(3)
            }
        }
    }
}

/// Writes a file of these tensors, and syncs it. `heads` are the model's query heads.
///
/// # Errors
/// The disk refuses, or a value is not finite.
pub(crate) fn write_tensors(
    path: &Path,
    tensors: &[Tensor],
    dtype: DType,
    heads: usize,
    layers: &mut LayerReader,
) -> Result<()> {
    let failed = |e| ModelError::io(path, e);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(failed)?);
    file.write_all(&header(tensors, dtype)).map_err(failed)?;
    for tensor in tensors {
        match tensor {
            Tensor::Layer(LayerTensor { layer, len, piece }) => {
                let flat = layers.get(*layer, *len)?;
                let flat = &flat[piece.range.clone()];
                if let Some(value) = flat.iter().find(|value| !value.is_finite()) {
                    return Err(ModelError::Invalid(format!(
                        "{}: a value of {} is {value}, so the model is of no use; training has diverged: a lower learning rate, \
                         or an earlier checkpoint, may help",
                        path.display(),
                        piece.name
                    )));
                }
                let values = order::to_hf(piece, heads, flat);
                write_values(&mut file, &values, dtype).map_err(failed)?;
            }
            Tensor::Copied { bytes, .. } => file.write_all(bytes).map_err(failed)?,
        }
    }
    let file = file.into_inner().map_err(|e| failed(e.into_error()))?;
    file.sync_all().map_err(failed)
}

/// Makes a safetensors header, length and JSON, padded so that the data starts at a multiple of
/// eight.
fn header(tensors: &[Tensor], dtype: DType) -> Vec<u8> {
    let own = match dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
    };
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.bytes(dtype);
        let (dtype, shape) = match tensor {
            Tensor::Layer(tensor) => (own, &tensor.piece.shape),
            Tensor::Copied { dtype, shape, .. } => (dtype.as_str(), shape),
        };
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        header.insert(tensor.name().to_owned(), entry);
        start = end;
    }
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    [(text.len() as u64).to_le_bytes().as_slice(), &text].concat()
}

pub(crate) fn write_values(file: &mut impl Write, values: &[f32], dtype: DType) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(dtype.size() << 16);
    for values in values.chunks(1 << 16) {
        bytes.clear();
        match dtype {
            DType::F32 => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
            DType::Bf16 => {
                bytes.extend(values.iter().flat_map(|&v| <bf16 as Element>::from_f32(v).to_le_bytes()));
            }
        }
        file.write_all(&bytes)?;
    }
    Ok(())
}
