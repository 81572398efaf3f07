//! Files of `torch.save`: a zip of one pickle and raw storages.
//!
//! Mitchell-style `policy.pt` (`{"step_idx", "state", "metrics"}`), `pytorch_model.bin`, or any
//! bare state dict. The pickle interpreter can build nothing but tensors, containers, numbers and
//! strings: it refuses anything else by name, and runs no code of the file.

mod pickle;
mod policy;
mod zip;
mod zip_writer;

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use crate::io::archive::{Entry, StoredType, TensorArchive, map};
use crate::{ModelError, Result};
use pickle::{PickledTensor, Value};

pub use policy::write_policy;

/// Opens the state dict in a file of `torch.save`.
pub(crate) fn open(path: &Path) -> Result<TensorArchive> {
    let file = map(path)?;
    let tensors = read(&file).map_err(|reason| ModelError::format(path, reason))?;
    Ok(TensorArchive { path: path.to_owned(), files: vec![file], tensors })
}

fn read(file: &[u8]) -> Result<HashMap<String, Entry>, String> {
    let members = zip::members(file)?;
    let (pickle_name, pickle) = members
        .iter()
        .find(|(name, _)| name.ends_with("/data.pkl"))
        .ok_or("the zip holds no data.pkl: not a file of torch.save")?;
    let root = pickle_name.trim_end_matches("data.pkl");
    if let Some(order) = members.get(&format!("{root}byteorder"))
        && &file[order.clone()] != b"little"
    {
        return Err("the tensors are stored big-endian".into());
    }
    let value = pickle::load(&file[pickle.clone()])?;
    let top = value.as_dict().ok_or("the pickle holds no dictionary")?;
    let state = match top.iter().find(|(key, _)| key == "state").and_then(|(_, v)| v.as_dict()) {
        Some(state) => state,
        None => top,
    };
    let mut tensors = HashMap::new();
    for (name, value) in state {
        if let Value::Tensor(tensor) = value {
            let storage = members
                .get(&format!("{root}data/{}", tensor.storage))
                .ok_or_else(|| format!("{name} is in storage {}, which the zip lacks", tensor.storage))?;
            tensors.insert(name.clone(), entry(name, tensor, storage)?);
        }
    }
    if tensors.is_empty() {
        return Err("holds no state dict: no name leads to a tensor".into());
    }
    Ok(tensors)
}

/// Locates a tensor inside its storage.
fn entry(name: &str, tensor: &PickledTensor, storage: &Range<usize>) -> Result<Entry, String> {
    let (dtype, size) = match tensor.storage_type.as_str() {
        "FloatStorage" => (StoredType::F32, 4),
        "HalfStorage" => (StoredType::F16, 2),
        "BFloat16Storage" => (StoredType::Bf16, 2),
        // Only their sizes are checked: masks and the like, which a model may hold beside its
        // weights.
        "DoubleStorage" | "LongStorage" => (StoredType::Other(tensor.storage_type.clone()), 8),
        "IntStorage" => (StoredType::Other(tensor.storage_type.clone()), 4),
        "ShortStorage" => (StoredType::Other(tensor.storage_type.clone()), 2),
        other => (StoredType::Other(other.to_owned()), 1),
    };
    let mut expected = 1;
    for (&length, &stride) in tensor.shape.iter().zip(&tensor.stride).rev() {
        if length > 1 && stride != expected {
            return Err(format!("{name} is not stored row by row (stride {:?})", tensor.stride));
        }
        expected = expected.checked_mul(length).ok_or_else(|| format!("{name} is larger than memory"))?;
    }
    let range = tensor.offset.checked_add(expected).and_then(|end| {
        Some(
            storage.start.checked_add(tensor.offset.checked_mul(size)?)?
                ..storage.start.checked_add(end.checked_mul(size)?)?,
        )
    });
    match range {
        Some(bytes) if bytes.end <= storage.end => {
            Ok(Entry { file: 0, dtype, shape: tensor.shape.clone(), bytes })
        }
        _ => Err(format!("{name} needs {expected} elements from {}, its storage is shorter", tensor.offset)),
    }
}
