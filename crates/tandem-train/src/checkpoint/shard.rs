//! The safetensors layout of one file of f32 tensors: `u64` header length, JSON header, data back to back.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::TensorSpec;
use super::manifest::broken;
use crate::error::{Result, TrainError};

/// Longest header read; longer means the file is not ours.
const MAX_HEADER: u64 = 100 << 20;

/// The bytes before the data, padded with spaces so that the data starts at a multiple of 8.
pub(super) fn header(tensors: &[TensorSpec]) -> Vec<u8> {
    let mut entries = Map::new();
    let mut offset = 0;
    for tensor in tensors {
        let end = offset + 4 * tensor.len();
        entries.insert(
            tensor.name.clone(),
            json!({"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, end]}),
        );
        offset = end;
    }
    let mut text = Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    bytes
}

/// Reads a header: each tensor with the offset of its data from the start of the file.
pub(super) fn read_header(folder: &Path, name: &str, file: &mut File) -> Result<Vec<(TensorSpec, u64)>> {
    let bad = |reason: String| broken(folder, format!("{name}: {reason}"));
    let io = |e| TrainError::io("read", &folder.join(name))(e);
    let size = file.metadata().map_err(io)?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| bad("shorter than a safetensors header".into()))?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER || length + 8 > size {
        return Err(bad(format!("header of {length} bytes in a file of {size}")));
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(io)?;
    let entries: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|e| bad(format!("header: {e}")))?;
    let mut next = 0;
    let mut tensors = Vec::with_capacity(entries.len());
    for (tensor, entry) in entries {
        let wrong = || bad(format!("tensor {tensor:?}: unexpected header entry {entry}"));
        let numbers = |key: &str| -> Option<Vec<u64>> {
            entry.get(key)?.as_array()?.iter().map(Value::as_u64).collect()
        };
        let (Some("F32"), Some(shape), Some(offsets)) =
            (entry.get("dtype").and_then(Value::as_str), numbers("shape"), numbers("data_offsets"))
        else {
            return Err(wrong());
        };
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).ok_or_else(wrong)?;
        let end = elements.checked_mul(4).and_then(|bytes| bytes.checked_add(next)).ok_or_else(wrong)?;
        if offsets != [next, end] {
            return Err(wrong());
        }
        let spec = TensorSpec { name: tensor.clone(), shape: shape.iter().map(|&d| d as usize).collect() };
        tensors.push((spec, 8 + length + next));
        next = end;
    }
    if 8 + length + next != size {
        return Err(bad(format!(
            "tensors take {next} bytes after a header of {length}, the file has {size}"
        )));
    }
    Ok(tensors)
}

/// Cuts the tensors, in order, into files of at most `limit` bytes of data (a larger tensor stands alone).
pub(super) fn cut(tensors: &[TensorSpec], limit: usize) -> Vec<std::ops::Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let size = 4 * tensor.len();
        if i > start && bytes + size > limit {
            shards.push(start..i);
            (start, bytes) = (i, 0);
        }
        bytes += size;
    }
    shards.push(start..tensors.len());
    shards
}
