//! Adapters in folders as the `peft` library writes them.

use std::path::{Path, PathBuf};

use super::files::AdapterFiles;
use super::peft_config::PeftConfig;
use crate::decoder::Decoder;
use crate::io::TorchArchive;
use crate::io::{SafetensorsArchive, TensorArchive};
use crate::lora::AdapterConfig;
use crate::{ModelError, Result};

/// The file that makes a folder an adapter's.
pub(super) const CONFIG: &str = "adapter_config.json";
/// Its weights, as they are written, and as older versions did.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
const OLD_WEIGHTS: &str = "adapter_model.bin";

/// A folder with an adapter: `adapter_config.json` and `adapter_model.safetensors` (or `adapter_model.bin`). Several adapters lie in
/// one tree: the one called `default` in the folder itself, others below it under their names.
pub struct PeftFolder {
    path: PathBuf,
    config: PeftConfig,
}

impl PeftFolder {
    /// Reads the config of a folder. Weights are not touched.
    ///
    /// # Errors
    /// If there is no such folder, no `adapter_config.json` in it (adapters below it are listed), or the config asks for something
    /// that is not supported.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Err(ModelError::format(path, "no such adapter folder"));
        }
        let file = path.join(CONFIG);
        if !file.is_file() {
            let below = adapters_below(path);
            let hint = match below.is_empty() {
                true => String::new(),
                false => {
                    format!("; there are adapters in it: {}; name one of these folders", below.join(", "))
                }
            };
            return Err(ModelError::format(path, format!("holds no {CONFIG}{hint}")));
        }
        Ok(Self { path: path.to_owned(), config: PeftConfig::read(&file)? })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the adapter is.
    pub fn config(&self) -> &AdapterConfig {
        &self.config.adapter
    }

    /// Name or path of the base model, as it stands in the config.
    pub fn base_model(&self) -> Option<&str> {
        self.config.base.as_deref()
    }

    /// The folder of the base model: `base_model_name_or_path`, relative to the adapter's folder (or, of an adapter below
    /// another, to that one's) or as it stands.
    ///
    /// # Errors
    /// If there is no such folder with a `config.json`.
    pub fn base_folder(&self) -> Result<PathBuf> {
        let Some(base) = self.base_model() else {
            return Err(ModelError::format(
                &self.path.join(CONFIG),
                "names no base_model_name_or_path; say where the base model is (--base)",
            ));
        };
        let above = self.path.parent().filter(|parent| parent.join(CONFIG).is_file());
        let places = [Some(self.path.as_path()), above, Some(Path::new(""))];
        let found = places
            .into_iter()
            .flatten()
            .map(|place| place.join(base))
            .find(|f| f.join("config.json").is_file());
        found.ok_or_else(|| {
            ModelError::format(
                &self.path.join(CONFIG),
                format!("says that the base model is {base:?}, and no model folder is there; say where it is (--base)"),
            )
        })
    }

    /// Opens the weights and checks that they are those of the decoder's adapter, which was made of [`PeftFolder::config`]: every
    /// name, shape and type. Of a stage, all are checked, and those of its layers are read.
    ///
    /// # Errors
    /// If there are none, the file is malformed, or tensors are missing, left over, or of another shape or type: one error lists
    /// all of them.
    ///
    /// # Panics
    /// If the decoder has no adapter.
    pub fn weights(&self, decoder: &Decoder) -> Result<AdapterFiles> {
        if self.config.scores && !decoder.spec().head.is_score() {
            let reason = "task_type is \"SEQ_CLS\": it is a reward model's adapter, and its base is read as a language model";
            return Err(ModelError::format(&self.path.join(CONFIG), reason));
        }
        let (file, old) = (self.path.join(WEIGHTS), self.path.join(OLD_WEIGHTS));
        let archive: Box<dyn TensorArchive> = if file.is_file() {
            Box::new(SafetensorsArchive::open(&file)?)
        } else if old.is_file() {
            Box::new(TorchArchive::open(&old)?)
        } else {
            let reason = format!("holds no weights; looked for {WEIGHTS} and {OLD_WEIGHTS}");
            return Err(ModelError::format(&self.path, reason));
        };
        AdapterFiles::new(archive, decoder)
    }
}

/// Names of folders in `path` that hold adapters.
fn adapters_below(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| entry.path().join(CONFIG).is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
