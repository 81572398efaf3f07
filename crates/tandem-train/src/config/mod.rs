//! The config file: typed, complete, with nothing unknown in it.
//!
//! [`Config::load`] reads a TOML file and the `--set key=value` overrides into one tree that remembers where each value was
//! written, takes every known key out of it with its type and range checked, and refuses what is left. The result cannot hold
//! a value this version does not act on: what is planned but not there yet is refused with a sentence.
//!
//! Relative paths are relative to the file they stand in; a relative path given by `--set` is relative to the current
//! directory, where the person who typed it was standing. [`Config::to_toml`] writes absolute paths and every default, and
//! reads back as the same value.

mod adapter;
mod compute;
mod data;
mod derived;
mod error;
mod judges;
mod objective;
mod online;
mod reader;
mod reference;
mod resolved;
mod resume;
mod server;
mod train;
mod tree;
mod types;

use std::fmt;
use std::path::{Path, PathBuf};

pub use adapter::{AdapterSection, AdapterStart};
pub use compute::{Checkpointing, ComputeConfig, Devices, Engine, GpuSet};
pub use data::{DataConfig, DataSource, Order};
pub(crate) use derived::whole_format;
pub use error::{ConfigError, Place, Problem};
pub use judges::{JudgeKind, JudgeSection, RewardSection, load_judges};
pub use online::{Algorithm, OnlineConfig, Pairs};
pub use reference::{ReferenceConfig, ReferenceKind, Sync};
pub use resume::Change;
pub use server::{ServerConfig, ServerKind, unservable};
pub use train::{Length, MicroBatch, Optimizer, TrainConfig, Warmup};
pub use types::{Offload, Shape, ShardedState, Sharding, SumForm};

pub use crate::objective::ObjectiveConfig;
use reader::Section;

/// Everything a run depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// What kind of training.
    pub method: Method,
    /// An HF model folder: config, tokenizer and, unless `weights` says otherwise, weights.
    pub model: PathBuf,
    /// Which weights to start from.
    pub weights: Weights,
    /// The run folder.
    pub output: PathBuf,
    /// Seed of the data order and of random weights.
    pub seed: u64,
    /// What trains, if it is not the model's own weights.
    pub adapter: Option<AdapterSection>,
    /// What the policy is compared with.
    pub reference: ReferenceConfig,
    /// Training and evaluation rows.
    pub data: DataConfig,
    /// How answers are generated, where rows are prompts alone.
    pub online: Option<OnlineConfig>,
    /// What is minimised.
    pub objective: ObjectiveConfig,
    /// Batches, steps, optimiser, checkpoints.
    pub train: TrainConfig,
    /// Devices and arithmetic.
    pub compute: ComputeConfig,
    /// Who scores what the model generates.
    pub judges: Vec<JudgeSection>,
}

/// The kind of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Supervised fine-tuning: likelihood of the answers.
    Sft,
    /// Direct preference optimisation and its family.
    Dpo,
    /// A reward model from preferences.
    Reward,
    /// Preferences between answers that the policy itself gives while it trains: Online DPO.
    Online,
}

impl Method {
    /// The name in the config.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sft => "sft",
            Self::Dpo => "dpo",
            Self::Reward => "reward",
            Self::Online => "online",
        }
    }

    /// Whether what it minimises is of pairs of answers, against a reference.
    pub const fn has_reference(self) -> bool {
        matches!(self, Self::Dpo | Self::Online)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where the starting weights come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The model folder's safetensors (the key is absent).
    Folder,
    /// Drawn from `seed` by the shapes in the folder's config.json (`weights = "random"`).
    Random,
    /// A checkpoint file of the original DPO code, `policy.pt` (`weights = "path/to/policy.pt"`).
    File(PathBuf),
}

impl Config {
    /// Reads `path` and applies `overrides`, each `key=value` with a dotted key (`train.learning_rate=1e-3`); the value is
    /// TOML, and text that is not TOML is taken as a string.
    ///
    /// # Errors
    /// If the file cannot be read or is not TOML, a key is unknown, missing or contradicts another, or a value has the wrong
    /// type, is out of range or not supported yet. The message names file and line (or the override), key, what was
    /// expected and what was found.
    pub fn load<S: AsRef<str>>(path: &Path, overrides: &[S]) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::unreadable(path, &source))?;
        let mut tree = tree::Node::parse(&text, path)?;
        for text in overrides {
            tree.set(text.as_ref())?;
        }
        Self::from_tree(tree, path)
    }

    /// This config with `overrides`, as [`Config::load`] takes them.
    ///
    /// # Errors
    /// As there.
    pub fn with<S: AsRef<str>>(&self, overrides: &[S]) -> Result<Self, ConfigError> {
        let path = self.output.join("config.toml");
        let mut tree = tree::Node::parse(&self.to_toml(), &path)?;
        for text in overrides {
            tree.set(text.as_ref())?;
        }
        Self::from_tree(tree, &path)
    }

    fn from_tree(tree: tree::Node, path: &Path) -> Result<Self, ConfigError> {
        let mut root = Section::root(tree, path)?;
        let methods = [Method::Sft, Method::Dpo, Method::Reward, Method::Online];
        let method = root
            .required("method", "how to train: \"sft\", \"dpo\", \"reward\" or \"online\"")?
            .one_of(&methods.map(|method| (method.name(), method)))?;
        let model = root.required("model", "an HF model folder")?.path()?;
        let weights = match root.take("weights") {
            None => Weights::Folder,
            Some(entry) if entry.is_string("random") => Weights::Random,
            Some(entry) => Weights::File(entry.path()?),
        };
        let output = root.required("output", "the folder the run writes")?.path()?;
        let seed = root.take("seed").map_or(Ok(42), |e| e.integer(0..=i64::MAX as u64))?;
        let adapter = root.take("adapter").map(|entry| adapter::parse(entry.section()?)).transpose()?;
        let adapts = adapter.is_some();
        let data = data::parse(root.section("data")?, method)?;
        // What is wrong with it is told after what stands before it.
        let compute = compute::parse(root.section("compute")?, method, adapts);
        let around = online::Around {
            method,
            max_length: data.max_length,
            output: &output,
            adapter: adapter.as_ref(),
            tensor: compute.as_ref().map_or(1, |compute| compute.tensor),
        };
        let online = online::parse(root.take("online"), || root.section("online"), &around)?;
        let algorithm = online.as_ref().map_or(Algorithm::Dpo, |online| online.algorithm);
        let objective = objective::parse(root.section("objective")?, method, algorithm)?;
        let config = Self {
            method,
            weights,
            output,
            seed,
            reference: reference::parse(
                root.section("reference")?,
                method,
                &objective,
                &model,
                adapter.as_ref(),
            )?,
            adapter,
            data,
            online,
            train: train::parse(root.section("train")?)?,
            compute: compute?,
            judges: judges::parse(judges::under(method, &mut root)?)?,
            objective,
            model,
        };
        root.finish()?;
        config.refuse_own_output(path)?;
        Ok(config)
    }

    /// A run must not read a model from where it will write one.
    fn refuse_own_output(&self, file: &Path) -> Result<(), ConfigError> {
        let weights = match &self.weights {
            Weights::File(path) => Some(path),
            Weights::Folder | Weights::Random => None,
        };
        let inputs = [
            ("model", Some(&self.model)),
            ("weights", weights),
            ("reference.model", self.reference.model.as_ref()),
            ("reference.adapter", self.reference.adapter.as_ref()),
            ("adapter.start", self.adapter.as_ref().and_then(AdapterSection::folder)),
        ];
        for (key, input) in inputs {
            if input.is_some_and(|input| {
                ["final", "checkpoints"].iter().any(|own| input.starts_with(self.output.join(own)))
            }) {
                let reason = format!(
                    "it lies in what this run writes ({}); give the run another `output`",
                    self.output.display()
                );
                let place = Place::File { path: file.to_path_buf(), line: None };
                return Err(ConfigError {
                    place,
                    problem: Problem::Conflict { key: key.to_string(), reason },
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
