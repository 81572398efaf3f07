//! Adapter folders of the `peft` library.

use std::path::{Path, PathBuf};

use super::files::AdapterFiles;
use super::peft_config::PeftConfig;
use crate::decoder::Decoder;
use crate::io::{TensorArchive, is_checkpoint, torch};
use crate::lora::AdapterConfig;
use crate::{ModelError, Result};

pub(super) const CONFIG: &str = "adapter_config.json";
/// Weight files: current, and of older versions.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
const OLD_WEIGHTS: &str = "adapter_model.bin";

/// Adapter folder: `adapter_config.json` and `adapter_model.safetensors` (or `adapter_model.bin`).
/// Folder of one of several adapters: `default` is the folder itself, others are subfolders by name.
pub struct PeftFolder {
    path: PathBuf,
    config: PeftConfig,
}

impl PeftFolder {
    /// Reads the config of a folder, and no weights.
    ///
    /// # Errors
    /// If there is no such folder, no `adapter_config.json` in it (adapters below it are listed),
    /// or the config asks for something unsupported.
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            return Err(ModelError::format(path, "no such adapter folder"));
        }
        let file = path.join(CONFIG);
        if !file.is_file() {
            let below = adapters_below(path);
            let hint = if !below.is_empty() {
                format!("; there are adapters in it: {}; name one of these folders", below.join(", "))
            } else if is_checkpoint(path) {
                "; it is a checkpoint of a run: `tandem checkpoint export` makes an adapter folder of it"
                    .to_owned()
            } else {
                String::new()
            };
            return Err(ModelError::format(path, format!("holds no {CONFIG}{hint}")));
        }
        Ok(Self { path: path.to_owned(), config: PeftConfig::read(&file)? })
    }

    /// Returns the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the adapter's configuration.
    pub fn config(&self) -> &AdapterConfig {
        &self.config.adapter
    }

    /// Returns whether it is a reward model's adapter, whose base is read by [`open_reward`](crate::ModelFolder::open_reward).
    pub fn is_of_reward_model(&self) -> bool {
        self.config.scores
    }

    /// Returns an error if the adapter was trained on random weights, which no folder holds.
    ///
    /// # Errors
    /// It was.
    pub fn check_kept_base(&self) -> Result<()> {
        if !self.config.has_random_base {
            return Ok(());
        }
        Err(ModelError::format(
            &self.path.join(CONFIG),
            "the adapter was trained on random weights (weights = \"random\"), which no model has; it is of no use beyond runs \
             with the same ones",
        ))
    }

    /// Returns the name or path of the base model, as in the config.
    pub fn base_model(&self) -> Option<&str> {
        self.config.base.as_deref()
    }

    /// Finds the folder of the base model: `base_model_name_or_path`, relative to the adapter's
    /// folder, to the one above if that holds an adapter, or as it stands.
    pub fn base_folder(&self) -> Result<PathBuf> {
        self.check_kept_base()?;
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
            .find(|f| f.join("config.json").is_file() || matches!(tandem_gguf::find(f), Ok(Some(_))));
        found.ok_or_else(|| {
            ModelError::format(
                &self.path.join(CONFIG),
                format!("names the base model {base:?}, but no model folder exists there; give its folder with --base"),
            )
        })
    }

    /// Opens the weights, and checks every name, shape and type against the decoder's adapter,
    /// which was made from [`PeftFolder::config`]. On a pipeline stage all tensors are checked, and
    /// its own are read.
    ///
    /// # Errors
    /// If there are none, the file is malformed, or tensors are missing, left over, or of another
    /// shape or type: one error lists all of them.
    ///
    /// # Panics
    /// If the decoder has no adapter.
    pub fn weights(&self, decoder: &Decoder) -> Result<AdapterFiles> {
        if self.config.scores && !decoder.spec().head.is_score() {
            let reason = "task_type is \"SEQ_CLS\": a reward model's adapter does not fit a base that is read as a language model";
            return Err(ModelError::format(&self.path.join(CONFIG), reason));
        }
        let (file, old) = (self.path.join(WEIGHTS), self.path.join(OLD_WEIGHTS));
        let archive = if file.is_file() {
            TensorArchive::open(&file)?
        } else if old.is_file() {
            torch::open(&old)?
        } else {
            let reason = format!("holds no weights; looked for {WEIGHTS} and {OLD_WEIGHTS}");
            return Err(ModelError::format(&self.path, reason));
        };
        AdapterFiles::new(archive, decoder)
    }
}

/// Lists the folders in `path` that hold adapters.
fn adapters_below(path: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| entry.path().join(CONFIG).is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}
