//! Writing a model as an ordinary HF folder, which `transformers` loads.
//!
//! The folder is made under a temporary name beside its destination, synced and renamed: whoever sees it sees it whole.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tandem_kernels::{DType, Element, bf16};

use crate::decoder::Decoder;
use crate::families::{Piece, family_named, pieces};
use crate::folder::ModelFolder;
use crate::layout::LayerId;
use crate::order;
use crate::resident::FlatWeights;
use crate::{ModelError, Result};

/// Files that go with a model and are copied as they are.
const COMPANIONS: [&str; 11] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// Bytes of weights in one file, beyond which there are several and an index; what `save_pretrained` used for long.
pub const SHARD_BYTES: u64 = 5_000_000_000;

/// What to write.
#[derive(Clone, Copy)]
pub struct Save<'a> {
    /// The folder whose config, tokenizer and chat template the new one gets.
    pub template: &'a ModelFolder,
    /// The model.
    pub decoder: &'a Decoder,
    /// Type of the stored weights.
    pub dtype: DType,
    /// Bytes of weights in one file; [`SHARD_BYTES`] unless there is a reason.
    pub shard_bytes: u64,
}

impl Save<'_> {
    /// Writes `destination`, replacing a folder of that name. `read` fills the flat f32 buffer of each layer, which
    /// come in the order of [`Decoder::layers`].
    ///
    /// # Errors
    /// If the disk refuses (nothing is left behind and an older folder stays whole) or `read` fails.
    pub fn write(
        &self,
        destination: &Path,
        read: &mut dyn FnMut(LayerId, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let name = destination.file_name().and_then(|n| n.to_str());
        let name = name.ok_or_else(|| ModelError::format(destination, "not a name for a folder"))?;
        let parent = destination.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(|e| ModelError::io(parent, e))?;
        let beside = |word: &str| parent.join(format!(".{name}.{word}-{}", std::process::id()));
        let unfinished = Unfinished(beside("writing"));
        let folder = &unfinished.0;
        _ = fs::remove_dir_all(folder);
        fs::create_dir(folder).map_err(|e| ModelError::io(folder, e))?;
        self.write_config(folder)?;
        self.copy_companions(folder)?;
        self.write_weights(folder, read)?;
        sync(folder)?;
        // A rename does not replace a folder that holds something: the old one steps aside first.
        let old = beside("old");
        let replaces = destination.exists();
        if replaces {
            _ = fs::remove_dir_all(&old);
            fs::rename(destination, &old).map_err(|e| ModelError::io(destination, e))?;
        }
        if let Err(error) = fs::rename(folder, destination) {
            if replaces {
                _ = fs::rename(&old, destination);
            }
            return Err(ModelError::io(destination, error));
        }
        if replaces {
            _ = fs::remove_dir_all(&old);
        }
        sync(parent)
    }

    /// As [`Save::write`], of weights that lie in CPU memory.
    ///
    /// # Errors
    /// As [`Save::write`].
    pub fn write_resident(&self, destination: &Path, weights: &FlatWeights) -> Result<()> {
        self.write(destination, &mut |layer, flat| {
            flat.copy_from_slice(weights.layers[self.decoder.index(layer)].view().as_slice());
            Ok(())
        })
    }

    fn write_config(&self, folder: &Path) -> Result<()> {
        let mut config = self.template.config().as_map().clone();
        let dtype = match self.dtype {
            DType::F32 => "float32",
            DType::Bf16 => "bfloat16",
        };
        // transformers 4 calls it torch_dtype; 5 reads both.
        let key = if config.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        config.insert(key.into(), dtype.into());
        write_json(&folder.join("config.json"), &Value::Object(config))
    }

    fn copy_companions(&self, folder: &Path) -> Result<()> {
        for name in COMPANIONS {
            let source = self.template.path().join(name);
            if source.is_file() {
                let copy = folder.join(name);
                // Written anew rather than `fs::copy`: a read-only source must not make a read-only copy.
                let bytes = fs::read(&source).map_err(|e| ModelError::io(&source, e))?;
                write_file(&copy, &bytes)?;
            }
        }
        Ok(())
    }

    fn write_weights(
        &self,
        folder: &Path,
        read: &mut dyn FnMut(LayerId, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let tensors = stored(self.decoder);
        let shards = self.cut(&tensors);
        let (mut flat, mut held) = (Vec::new(), None);
        for (index, shard) in shards.iter().enumerate() {
            let path = folder.join(shard_name(index, shards.len()));
            let failed = |e| ModelError::io(&path, e);
            let mut file = BufWriter::with_capacity(1 << 20, File::create(&path).map_err(failed)?);
            file.write_all(&self.header(shard)).map_err(failed)?;
            for (layer, piece) in *shard {
                if held != Some(*layer) {
                    flat.clear();
                    flat.resize(self.decoder.layout(*layer).len, 0.0);
                    read(*layer, &mut flat)?;
                    held = Some(*layer);
                }
                let values =
                    order::to_hf(piece, self.decoder.spec().attention.heads, &flat[piece.range.clone()]);
                write_values(&mut file, &values, self.dtype).map_err(failed)?;
            }
            let file = file.into_inner().map_err(|e| failed(e.into_error()))?;
            file.sync_all().map_err(failed)?;
        }
        if shards.len() > 1 {
            self.write_index(folder, &shards)?;
        }
        Ok(())
    }

    /// Cuts the tensors, in their order, into files of at most `shard_bytes` (a larger tensor has one to itself).
    fn cut<'t>(&self, tensors: &'t [(LayerId, Piece)]) -> Vec<&'t [(LayerId, Piece)]> {
        let (mut shards, mut start, mut bytes) = (Vec::new(), 0, 0);
        for (i, (_, piece)) in tensors.iter().enumerate() {
            let size = self.bytes(piece);
            if i > start && bytes + size > self.shard_bytes {
                shards.push(&tensors[start..i]);
                (start, bytes) = (i, 0);
            }
            bytes += size;
        }
        shards.push(&tensors[start..]);
        shards
    }

    fn bytes(&self, piece: &Piece) -> u64 {
        (piece.range.len() * self.dtype.size()) as u64
    }

    /// Length and JSON of a safetensors header, padded so that the data starts on a multiple of eight.
    fn header(&self, tensors: &[(LayerId, Piece)]) -> Vec<u8> {
        let dtype = match self.dtype {
            DType::F32 => "F32",
            DType::Bf16 => "BF16",
        };
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut start = 0;
        for (_, piece) in tensors {
            let end = start + self.bytes(piece);
            let entry = json!({"dtype": dtype, "shape": piece.shape, "data_offsets": [start, end]});
            header.insert(piece.name.clone(), entry);
            start = end;
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        [(text.len() as u64).to_le_bytes().as_slice(), &text].concat()
    }

    fn write_index(&self, folder: &Path, shards: &[&[(LayerId, Piece)]]) -> Result<()> {
        let mut map = Map::new();
        let mut total = 0;
        for (index, shard) in shards.iter().enumerate() {
            for (_, piece) in *shard {
                map.insert(piece.name.clone(), shard_name(index, shards.len()).into());
                total += self.bytes(piece);
            }
        }
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        write_json(&folder.join("model.safetensors.index.json"), &index)
    }
}

/// Removes its folder when dropped, unless that was renamed away.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// Every tensor in HF's names and order of elements, for tests and for tools that look at weights.
///
/// # Panics
/// If the weights do not lie in CPU memory.
pub fn to_hf_tensors(decoder: &Decoder, weights: &FlatWeights) -> Vec<(String, Vec<f32>)> {
    let heads = decoder.spec().attention.heads;
    let tensors = stored(decoder).into_iter().map(|(layer, piece)| {
        let flat: &[f32] = weights.layers[decoder.index(layer)].view().as_slice();
        let values = order::to_hf(&piece, heads, &flat[piece.range.clone()]);
        (piece.name, values)
    });
    tensors.collect()
}

/// Every tensor of a decoder with its layer.
fn stored(decoder: &Decoder) -> Vec<(LayerId, Piece)> {
    let spec = decoder.spec();
    let family = family_named(spec.family).expect("specs come from families");
    let layers = decoder.layers().into_iter();
    layers
        .flat_map(|layer| {
            pieces(family, spec, layer, decoder.layout(layer)).into_iter().map(move |piece| (layer, piece))
        })
        .collect()
}

fn shard_name(index: usize, count: usize) -> String {
    match count {
        1 => "model.safetensors".into(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}

fn write_values(file: &mut impl Write, values: &[f32], dtype: DType) -> std::io::Result<()> {
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

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("JSON values print");
    write_file(path, (text + "\n").as_bytes())
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| ModelError::io(path, e))
}

/// Makes the folder's entries durable.
fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| ModelError::io(folder, e))
}
