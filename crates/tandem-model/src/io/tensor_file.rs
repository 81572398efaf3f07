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

/// Tensor to write: its layer, the length of that layer's buffer, and its place there.
pub(crate) struct Tensor {
    pub(crate) layer: LayerId,
    pub(crate) len: usize,
    pub(crate) piece: HfTensor,
}

impl Tensor {
    pub(crate) fn bytes(&self, dtype: DType) -> u64 {
        (self.piece.range.len() * dtype.size()) as u64
    }
}

/// Writes a file of these tensors, and syncs it. `heads` are the model's query heads.
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
    for Tensor { layer, len, piece } in tensors {
        let flat = layers.get(*layer, *len)?;
        let values = order::to_hf(piece, heads, &flat[piece.range.clone()]);
        write_values(&mut file, &values, dtype).map_err(failed)?;
    }
    let file = file.into_inner().map_err(|e| failed(e.into_error()))?;
    file.sync_all().map_err(failed)
}

/// Makes a safetensors header, length and JSON, padded so that the data starts at a multiple of
/// eight.
fn header(tensors: &[Tensor], dtype: DType) -> Vec<u8> {
    let name = match dtype {
        DType::F32 => "F32",
        DType::Bf16 => "BF16",
    };
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.bytes(dtype);
        let entry = json!({"dtype": name, "shape": tensor.piece.shape, "data_offsets": [start, end]});
        header.insert(tensor.piece.name.clone(), entry);
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
