//! Named tensors in memory-mapped files: pages are read when they are needed.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::Deserialize;
use tandem_files::{MAX_TABLE, Map};
use tandem_gguf::{Gguf, Mapped, Quant, Transform};

use crate::families::Family;
use crate::layout::ParamKind;
use crate::{ModelError, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StoredType {
    /// 32-bit float.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Tensor of a GGUF file, in blocks or in the order of llama.cpp.
    Gguf(Quant, Transform),
    /// Any other type, by name: none of weights.
    Other(String),
}

impl StoredType {
    /// Returns the name in safetensors files; `None` of a GGUF file's types and torch's own.
    pub(crate) fn in_safetensors(&self) -> Option<String> {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => Some(self.to_string().to_uppercase()),
            Self::Other(name) if !name.ends_with("Storage") => Some(name.to_uppercase()),
            Self::Gguf(..) | Self::Other(_) => None,
        }
    }
}

impl std::fmt::Display for StoredType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::F16 => f.write_str("f16"),
            Self::Bf16 => f.write_str("bf16"),
            Self::Gguf(quant, _) => quant.fmt(f),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// Tensor in a file, row-major, little-endian.
#[derive(Clone, Debug)]
pub(crate) struct StoredTensor<'a> {
    pub(crate) dtype: StoredType,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: &'a [u8],
}

/// Maps a file into memory.
pub(crate) fn map(path: &Path) -> Result<Map> {
    tandem_files::open(path).and_then(Map::new).map_err(|e| ModelError::io(path, e))
}

/// `model.safetensors.index.json`. Other keys, as sizes, say nothing that the files do not.
#[derive(Deserialize)]
struct Index {
    /// File of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Named tensors in the files of a model or an adapter.
pub(crate) struct TensorArchive {
    /// The file or folder, for messages.
    pub(super) path: PathBuf,
    pub(super) files: Vec<Map>,
    pub(super) tensors: HashMap<String, Entry>,
}

/// Place of a tensor in its file.
pub(super) struct Entry {
    pub(super) file: usize,
    pub(super) dtype: StoredType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: Range<usize>,
}

impl TensorArchive {
    /// Opens a single safetensors file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut archive = Self { path: path.to_owned(), files: Vec::new(), tensors: HashMap::new() };
        archive.add(path)?;
        Ok(archive)
    }

    /// Opens a GGUF file, whose tensors get HF's names.
    pub(crate) fn open_gguf(gguf: &Gguf) -> Result<Self> {
        let path = gguf.path();
        let file = map(path)?;
        let mut tensors = HashMap::new();
        for Mapped { name, info, transform } in gguf.mapped()? {
            let dtype = match (info.quant, transform) {
                (Quant::F32, Transform::None) => StoredType::F32,
                (Quant::F16, Transform::None) => StoredType::F16,
                (Quant::Bf16, Transform::None) => StoredType::Bf16,
                (quant, transform) => StoredType::Gguf(quant, transform),
            };
            // The header was checked against the length that the file had then.
            if info.bytes.end > file.len() {
                return Err(ModelError::format(
                    path,
                    format!("became shorter than its tensor {}", info.name),
                ));
            }
            tensors.insert(name, Entry { file: 0, dtype, shape: info.shape, bytes: info.bytes });
        }
        Ok(Self { path: path.to_owned(), files: vec![file], tensors })
    }

    /// Opens the files that a `model.safetensors.index.json` lists.
    pub(crate) fn open_index(index: &Path) -> Result<Self> {
        let text = tandem_files::read(index, MAX_TABLE).map_err(|e| ModelError::io(index, e))?;
        let Index { weight_map: map } = serde_json::from_slice(&text)
            .map_err(|e| ModelError::format(index, format!("not an index: {e}")))?;
        let folder = index.parent().unwrap_or(Path::new("."));
        let mut archive = Self { path: folder.to_owned(), files: Vec::new(), tensors: HashMap::new() };
        let mut shards: Vec<&str> = map.values().map(String::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        for shard in &shards {
            let is_within = |part| matches!(part, Component::Normal(_));
            if shard.is_empty() || !Path::new(shard).components().all(is_within) {
                let reason = format!("names the file {shard:?}, expected one within the folder");
                return Err(ModelError::format(index, reason));
            }
            archive.add(&folder.join(shard))?;
        }
        for (name, shard) in &map {
            let found = archive.tensors.get(name).map(|entry| shards[entry.file]);
            if found != Some(shard) {
                let reason = format!("names {shard:?} as the file of {name}, which is not in it");
                return Err(ModelError::format(index, reason));
            }
        }
        Ok(archive)
    }

    /// Returns the file or folder, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Lists every name, in no particular order.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    /// Returns whether there is a tensor of this part, under the name in files or in memory.
    pub(crate) fn holds(&self, family: &Family, part: ParamKind) -> bool {
        let mut names = family.names(part).flat_map(|name| [family.name_in_memory(&name), Some(name)]);
        names.any(|name| name.is_some_and(|name| self.tensors.contains_key(&name)))
    }

    pub(crate) fn get(&self, name: &str) -> Option<StoredTensor<'_>> {
        let entry = self.tensors.get(name)?;
        let bytes = &self.files[entry.file][entry.bytes.clone()];
        Some(StoredTensor { dtype: entry.dtype.clone(), shape: entry.shape.clone(), bytes })
    }

    /// Ends a stretch of reading: drops the pages read so far from memory, where they would count beside
    /// the tensors made from them.
    ///
    /// # Errors
    /// A file has become shorter meanwhile.
    pub(crate) fn end_reading(&self) -> Result<()> {
        self.files.iter().for_each(Map::release);
        self.files.iter().try_for_each(Map::check).map_err(|e| ModelError::io(&self.path, e))
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let map = map(path)?;
        let (header, metadata) =
            SafeTensors::read_metadata(&map).map_err(|e| ModelError::format(path, explain(&e, map.len())))?;
        let start = 8 + header;
        for (name, info) in metadata.tensors() {
            let dtype = match info.dtype {
                Dtype::F32 => StoredType::F32,
                Dtype::F16 => StoredType::F16,
                Dtype::BF16 => StoredType::Bf16,
                other => StoredType::Other(format!("{other:?}").to_lowercase()),
            };
            let bytes = start + info.data_offsets.0..start + info.data_offsets.1;
            let entry = Entry { file: self.files.len(), dtype, shape: info.shape.clone(), bytes };
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(ModelError::format(path, format!("holds {name}, which another shard holds too")));
            }
        }
        self.files.push(map);
        Ok(())
    }
}

/// Explains the problem with a safetensors file of `len` bytes.
fn explain(error: &SafeTensorError, len: usize) -> String {
    match error {
        SafeTensorError::MetadataIncompleteBuffer => format!(
            "the file has {len} bytes, but its header describes another length; it was probably cut short while copying"
        ),
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            format!(
                "the file has {len} bytes and ends inside its header; it was probably cut short while copying"
            )
        }
        other => format!("not a safetensors file: {other:?}"),
    }
}
