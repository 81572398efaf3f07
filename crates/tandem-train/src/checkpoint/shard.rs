//! The safetensors layout of one rank's file: `u64` header length, JSON header, data back to back.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::manifest::broken;
use super::{TensorShard, TensorSpec};
use crate::error::{Result, TrainError};

/// Longest header read; longer means the file is not ours.
const MAX_HEADER: u64 = 100 << 20;
/// Header entry for metadata: shapes of the tensors whose pieces the file holds.
const METADATA: &str = "__metadata__";

/// A piece in a file.
pub(super) struct Entry {
    pub tensor: TensorSpec,
    /// The columns of the tensor, usually all.
    pub columns: Range<usize>,
    /// Element range within these columns.
    pub range: Range<usize>,
    /// Bytes from the start of the file.
    pub offset: u64,
}

/// The bytes before the data, padded with spaces so that the data starts at a multiple of 8.
pub(super) fn header(pieces: &[TensorShard<'_>]) -> Vec<u8> {
    let (mut shapes, mut entries) = (Map::new(), Map::new());
    let mut offset = 0;
    for piece in pieces {
        let TensorSpec { name, shape } = &piece.tensor;
        let Range { start, end } = piece.range();
        let data_end = offset + size_of::<f32>() * piece.data.len();
        let Range { start: left, end: right } = piece.columns;
        let is_wide = (left, right) == (0, piece.tensor.columns());
        let (name, shape) = if is_wide && start == 0 && end == piece.tensor.len() {
            (name.clone(), json!(shape))
        } else {
            shapes.insert(name.clone(), json!(shape).to_string().into());
            let columns = if is_wide { String::new() } else { format!("|{left}..{right}") };
            (format!("{name}[{start}..{end}{columns}]"), json!([end - start]))
        };
        let entry = json!({"dtype": "F32", "shape": shape, "data_offsets": [offset, data_end]});
        assert!(entries.insert(name, entry).is_none(), "two pieces of one name in a checkpoint");
        offset = data_end;
    }
    let mut header = Map::new();
    if !shapes.is_empty() {
        header.insert(METADATA.to_owned(), shapes.into());
    }
    header.append(&mut entries);
    let mut text = Value::Object(header).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.append(&mut text);
    bytes
}

/// Reads a header: the pieces in the order of their data.
pub(super) fn read_header(folder: &Path, name: &str, file: &mut File) -> Result<Vec<Entry>> {
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
    let mut header: Map<String, Value> =
        serde_json::from_slice(&text).map_err(|e| bad(format!("header: {e}")))?;
    let shapes = header.shift_remove(METADATA).unwrap_or_default();
    let mut next = 0;
    let mut entries = Vec::with_capacity(header.len());
    for (name, entry) in header {
        let wrong = || bad(format!("tensor {name:?}: unexpected header entry {entry}"));
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
        let elements = elements as usize;
        let offset = 8 + length + next;
        entries.push(match piece_of(&name, &shapes, offset) {
            Some(Some(entry)) if entry.range.len() == elements => entry,
            Some(_) => return Err(wrong()),
            None => {
                let shape = shape.iter().map(|&d| d as usize).collect();
                let tensor = TensorSpec { name: name.clone(), shape };
                Entry { columns: 0..tensor.columns(), tensor, range: 0..elements, offset }
            }
        });
        next = end;
    }
    if 8 + length + next != size {
        return Err(bad(format!(
            "tensors take {next} bytes after a header of {length}, the file has {size}"
        )));
    }
    Ok(entries)
}

/// Parses a piece name into tensor, columns and elements. `None` is a whole tensor, `Some(None)` an
/// unreadable name.
fn piece_of(name: &str, shapes: &Value, offset: u64) -> Option<Option<Entry>> {
    let (tensor, place) = name.strip_suffix(']')?.rsplit_once('[')?;
    let range = |text: &str| {
        let (start, end) = text.split_once("..")?;
        Some(start.parse::<usize>().ok()?..end.parse::<usize>().ok()?)
    };
    let parse = || {
        let shape: Vec<usize> = serde_json::from_str(shapes.get(tensor)?.as_str()?).ok()?;
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        let tensor = TensorSpec { name: tensor.to_owned(), shape };
        let (place, columns) = match place.split_once('|') {
            Some((place, columns)) => (place, range(columns)?),
            None => (place, 0..tensor.columns()),
        };
        let range = range(place)?;
        let is_within = columns.start < columns.end
            && columns.end <= tensor.columns()
            && range.end <= elements / tensor.columns() * columns.len();
        is_within.then_some(Entry { tensor, columns, range, offset })
    };
    Some(parse())
}
