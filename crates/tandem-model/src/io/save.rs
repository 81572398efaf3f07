//! Writer of HF model folders that `transformers` loads.
//!
//! The folder is written under a temporary name beside its destination, synced and renamed: readers
//! only see it whole.

use std::path::Path;

use serde_json::{Map, Value, json};
use tandem_kernels::{DType, Device};

use super::archive::TensorArchive;
use super::folder::{ModelFolder, QUANTISATION};
use super::new_folder::{FURTHER_FILES, write_folder, write_json};
use super::tensor_file::{LayerReader, LayerTensor, Tensor, write_tensors};
use crate::decoder::Decoder;
use crate::families::{family_named, pieces};
use crate::layout::LayerId;
use crate::spec::Config;
use crate::weights::FlatWeights;
use crate::{ModelError, Result};

/// Default size of one weight file in bytes; a larger model gets several and an index.
pub const SHARD_BYTES: u64 = 5_000_000_000;

const GENERATION_CONFIG: &str = "generation_config.json";
/// Key of the ids that end generation.
const EOS: &str = "eos_token_id";

/// A model to write.
#[derive(Clone, Copy)]
pub struct Save<'a> {
    /// Folder whose config, tokenizer and chat template the new one gets.
    pub template: &'a ModelFolder,
    /// Decoder of the model.
    pub decoder: &'a Decoder,
    /// Type of the stored weights.
    pub dtype: DType,
    /// Largest size of one weight file in bytes, usually [`SHARD_BYTES`].
    pub shard_bytes: u64,
}

impl Save<'_> {
    /// Writes `destination`, replacing a folder of that name. `read` fills the flat f32 buffer of
    /// each layer, in the order of [`Decoder::layers`].
    ///
    /// # Errors
    /// If the disk refuses (nothing is left behind, and an older folder stays whole) or `read`
    /// fails.
    pub fn write(
        &self,
        destination: &Path,
        read: &mut dyn FnMut(LayerId, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        write_folder(destination, &mut |folder| {
            self.template.copy_files(&FURTHER_FILES, folder)?;
            self.template.copy_tokenizer(folder)?;
            self.write_config(folder)?;
            self.write_weights(folder, read)
        })
    }

    /// Writes weights in the memory of `device`, as [`Save::write`].
    pub fn write_resident(&self, destination: &Path, device: &Device, weights: &FlatWeights) -> Result<()> {
        self.write(destination, &mut |layer, flat| {
            let from = weights.layers[self.decoder.index(layer)].view();
            device.host_read(from, |from| flat.copy_from_slice(from))?;
            Ok(())
        })
    }

    fn write_config(&self, folder: &Path) -> Result<()> {
        let mut config = self.template.config().as_map().clone();
        self.add_eos(folder, &mut config)?;
        // Written weights are not quantised, even if the template's are.
        config.remove(QUANTISATION);
        let dtype = match self.dtype {
            DType::F32 => "float32",
            DType::Bf16 => "bfloat16",
        };
        // transformers 4 calls it torch_dtype; 5 reads both.
        let key = if config.contains_key("torch_dtype") { "torch_dtype" } else { "dtype" };
        config.insert(key.into(), dtype.into());
        // A merged adapter may have untied the head from the table, and where a vision–language model's
        // config has no such key, versions of transformers differ.
        let tied = self.decoder.spec().head.tied;
        if tied != self.template.spec().head.tied || self.template.family().sees() {
            config.insert("tie_word_embeddings".into(), tied.into());
        }
        if self.decoder.spec().head.is_score() {
            self.name_classifier(&mut config);
        }
        write_json(&folder.join("config.json"), &Value::Object(config))
    }

    /// Adds the tokenizer's EOS to the ids that end generation, if it is none of them: before them in
    /// `generation_config.json`, and alone in `config.json`, as transformers' `align_special_tokens`. Without a
    /// `generation_config.json` all are in `config.json`.
    fn add_eos(&self, folder: &Path, config: &mut Map<String, Value>) -> Result<()> {
        let Some(eos) = self.template.eos().filter(|_| !self.decoder.spec().head.is_score()) else {
            return Ok(());
        };
        let path = folder.join(GENERATION_CONFIG);
        let generation = path.is_file().then(|| Config::read(&path)).transpose()?;
        let mut ids = generation.as_ref().map(Config::eos_token_ids).transpose()?.unwrap_or_default();
        for config in [self.template.config(), &self.template.config().text_config()?] {
            if ids.is_empty() {
                ids = config.eos_token_ids()?;
            }
        }
        if ids.contains(&eos) {
            return Ok(());
        }
        ids.insert(0, eos);
        let all = if ids.len() == 1 { json!(eos) } else { json!(ids) };
        match generation {
            Some(generation) => {
                let mut generation = generation.as_map().clone();
                generation.insert(EOS.into(), all);
                write_json(&path, &Value::Object(generation))?;
                config.insert(EOS.into(), eos.into());
            }
            None => _ = config.insert(EOS.into(), all),
        }
        Ok(())
    }

    /// Declares a sequence classifier with one label and its padding token, without which
    /// `transformers` scores one text at a time.
    fn name_classifier(&self, config: &mut Map<String, Value>) {
        config.insert("architectures".into(), json!([self.template.family().scorer_class()]));
        config.remove("num_labels");
        config.insert("id2label".into(), json!({"0": "LABEL_0"}));
        config.insert("label2id".into(), json!({"LABEL_0": 0}));
        if let Some(pad) = self.decoder.spec().head.pad() {
            config.insert("pad_token_id".into(), pad.into());
        }
    }

    fn write_weights(
        &self,
        folder: &Path,
        read: &mut dyn FnMut(LayerId, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        let source = self.template.family().sees().then(|| self.template.archive()).transpose()?;
        let mut tensors: Vec<_> = stored(self.decoder).into_iter().map(Tensor::Layer).collect();
        if let Some(source) = &source {
            tensors.extend(self.copied(source)?);
        }
        // Wide elements first: every tensor is then aligned. The order is else as it was.
        tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.alignment(self.dtype)));
        let shards = self.cut(&tensors);
        let heads = self.decoder.spec().attention.heads;
        let mut layers = LayerReader::new(read);
        for (index, shard) in shards.iter().enumerate() {
            let path = folder.join(shard_name(index, shards.len()));
            write_tensors(&path, shard, self.dtype, heads, &mut layers)?;
        }
        if shards.len() > 1 {
            self.write_index(folder, &shards)?;
        }
        Ok(())
    }

    /// Lists the tensors beside the text model, by name.
    fn copied<'a>(&self, source: &'a TensorArchive) -> Result<Vec<Tensor<'a>>> {
        let mut names = source.names();
        names.retain(|name| self.template.family().is_beside(name));
        names.sort_unstable();
        let copy = |name: &'a str| {
            let stored = source.get(name).expect("the archive lists it");
            let dtype = stored.dtype.in_safetensors().ok_or_else(|| {
                let reason = format!("tensor {name} is {}, which safetensors files have not", stored.dtype);
                ModelError::format(source.path(), reason)
            })?;
            Ok(Tensor::Copied { name, dtype, shape: stored.shape, bytes: stored.bytes })
        };
        names.into_iter().map(copy).collect()
    }

    /// Divides the tensors, in order, into files of at most `shard_bytes`; a larger tensor has one
    /// to itself.
    fn cut<'t, 'a>(&self, tensors: &'t [Tensor<'a>]) -> Vec<&'t [Tensor<'a>]> {
        let (mut shards, mut start, mut bytes) = (Vec::new(), 0, 0);
        for (i, tensor) in tensors.iter().enumerate() {
            let size = tensor.bytes(self.dtype);
            if i > start && bytes + size > self.shard_bytes {
                shards.push(&tensors[start..i]);
                (start, bytes) = (i, 0);
            }
            bytes += size;
        }
        shards.push(&tensors[start..]);
        shards
    }

    fn write_index(&self, folder: &Path, shards: &[&[Tensor]]) -> Result<()> {
        let mut map = Map::new();
        let mut total = 0;
        for (index, shard) in shards.iter().enumerate() {
            for tensor in *shard {
                map.insert(tensor.name().to_owned(), shard_name(index, shards.len()).into());
                total += tensor.bytes(self.dtype);
            }
        }
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        write_json(&folder.join("model.safetensors.index.json"), &index)
    }
}

/// Lists every tensor of a decoder with its layer.
pub(crate) fn stored(decoder: &Decoder) -> Vec<LayerTensor> {
    let spec = decoder.spec();
    let family = family_named(spec.family).expect("specs come from families");
    let mut tensors = Vec::new();
    for layer in decoder.layers() {
        let layout = decoder.layout(layer);
        let tensor = |piece| LayerTensor { layer, len: layout.len, piece };
        tensors.extend(pieces(family, spec, layer, layout).into_iter().map(tensor));
    }
    tensors
}

fn shard_name(index: usize, count: usize) -> String {
    match count {
        1 => "model.safetensors".into(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}
