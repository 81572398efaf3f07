//! The config file: typed, complete, without unknown keys.
//!
//! [`Config::load`] reads a TOML file and the `--set key=value` overrides into one tree that knows
//! the place of each value. It takes every known key out of the tree, checks its type and range, and
//! refuses the rest. A feature that is planned but missing is refused with a sentence.
//!
//! Each key is declared once, in its section's file, with the forms of `form.rs` and the macro of
//! `keys.rs`: reading, [`Config::to_toml`], [`Config::changes_since`] and [`reference_page`] all
//! follow from that declaration. A rule that involves earlier keys stands beside its key; one that
//! involves later keys stands in the section's `check`.
//!
//! A relative path is relative to the folder of its file, one given by `--set` to the current
//! directory. [`Config::to_toml`] writes absolute paths and every default, and reads back as the
//! same value.

mod adapter;
mod compute;
mod data;
mod derived;
mod distill;
mod draft;
mod environment;
mod error;
mod evaluation;
mod explain;
mod foreign;
mod form;
mod groups;
mod grpo;
mod hub;
mod judges;
mod keys;
mod logging;
mod method;
mod notes;
mod objective;
mod online;
mod optimizer;
mod page;
mod reader;
mod reference;
mod resolved;
mod schedule;
mod schema;
mod server;
mod train;
mod tree;
mod types;

use std::path::{Path, PathBuf};

use toml::Value;

pub use adapter::{AdapterSection, AdapterStart};
pub use compute::{Checkpointing, ComputeConfig, Devices, Engine, GpuSet};
pub use data::{DataConfig, DataSource, Order, Side, TemplateSource};
pub(crate) use derived::whole_format;
pub use distill::DistillConfig;
pub use draft::{Draft, DraftKey, Remark};
pub use environment::EnvironmentConfig;
pub use error::{ConfigError, Place, Problem};
pub use evaluation::{BestMetric, EvaluationConfig, SampleCount};
pub use explain::explain;
pub use foreign::{Answers, Facts, PerEpoch, Program, Translation, coming_from_page, translate};
pub use groups::ParameterGroup;
pub use grpo::{Aggregation, Baseline, GrpoConfig, ScaleRewards};
pub use hub::{Fetch, HubPart, HubUse, load_judges_fetched};
pub use judges::{JudgeKind, JudgeSection, RewardSection, load_judges};
pub use keys::{KeyRow, Resume};
pub use logging::{LoggingConfig, MlflowConfig};
pub use method::Method;
pub use online::{Algorithm, OnlineConfig, Pairs};
pub use optimizer::{AdjustLr, Optimizer};
pub use page::reference_page;
pub use reference::{ReferenceConfig, ReferenceKind, Sync};
pub use resolved::{Change, RESOLVED_HEADER};
pub use schedule::{DecayType, Shape, Span};
pub use schema::json_schema;
pub use server::{ServerConfig, ServerKind, ServerRatio, unservable};
pub(crate) use train::MAX_STEPS;
pub use train::{Length, MicroBatchSize, TrainConfig};
pub use types::{AttentionKernels, Offload, ShardedState, Sharding, SumForm};

pub use crate::objective::ObjectiveConfig;
use error::Result;
use form::{COUNT, Form, choice, custom, integer, path, path_or_name, path_value};
use hub::Lookup;
use keys::{Keys, keys};
use reader::{Entry, Section};
use tree::{Node, Places};

/// Everything a run depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Training method.
    pub method: Method,
    /// HF model folder: config, tokenizer and, unless `weights` says otherwise, weights.
    pub model: PathBuf,
    /// Initial weights.
    pub weights: Weights,
    /// Run folder.
    pub output: PathBuf,
    /// Seed of data order, random weights and sampling.
    pub seed: u64,
    /// Adapter; `None` trains the model's own weights.
    pub adapter: Option<AdapterSection>,
    /// Model that the policy is compared with.
    pub reference: ReferenceConfig,
    /// Training and evaluation rows.
    pub data: DataConfig,
    /// Generation of completions, for methods that generate and for distillation over the policy's answers.
    pub online: Option<OnlineConfig>,
    /// Divergence from a teacher, for distillation.
    pub distill: Option<DistillConfig>,
    /// Loss.
    pub objective: ObjectiveConfig,
    /// Batches, steps, optimiser, checkpoints.
    pub train: TrainConfig,
    /// Devices and arithmetic.
    pub compute: ComputeConfig,
    /// Trackers of the run.
    pub logging: LoggingConfig,
    /// Judges of generated completions.
    pub judges: Vec<JudgeSection>,
}

/// Source of the initial weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The model folder's safetensors (the key is absent).
    Folder,
    /// Random weights from `seed`, with the shapes of the folder's config.json (`"random"`).
    Random,
    /// A checkpoint file of the original DPO code, `policy.pt` (its path).
    File(PathBuf),
}

impl Config {
    /// Reads `path` and applies `overrides`, each `key=value` with a dotted key
    /// (`train.learning_rate=1e-3`). The value is TOML; text that is not TOML is a string.
    ///
    /// # Errors
    /// If the file cannot be read or is not TOML, a key is unknown, missing or contradicts another,
    /// or a value has the wrong type, is out of range or not supported yet. The message names file
    /// and line (or the override), key, what was expected and what was found.
    pub fn load<S: AsRef<str>>(path: &Path, overrides: &[S]) -> Result<Self> {
        let text = tandem_files::read_text(path, tandem_files::MAX_CONFIG)
            .map_err(|source| ConfigError::unreadable(path, &source))?;
        Self::parse(&text, path, overrides, &Lookup::default())
    }

    /// Reads the text of a resolved config; `path` is named in errors.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn from_text(text: &str, path: &Path) -> Result<Self> {
        Self::parse::<&str>(text, path, &[], &Lookup::default())
    }

    /// Returns this config with `overrides`, as [`Config::load`] takes them.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn with<S: AsRef<str>>(&self, overrides: &[S]) -> Result<Self> {
        Self::parse(&self.to_toml(), &self.output.join("config.toml"), overrides, &Lookup::default())
    }

    fn parse<S: AsRef<str>>(text: &str, path: &Path, overrides: &[S], lookup: &Lookup) -> Result<Self> {
        let mut tree = Node::parse(text, path)?;
        for text in overrides {
            tree.set(text.as_ref())?;
        }
        let places = Places::new(&tree, path);
        if places.has("train.checkpointing") {
            let reason = "it was renamed to `compute.checkpointing`; use that name";
            return Err(places.conflict("train.checkpointing", reason));
        }
        if !text.starts_with(RESOLVED_HEADER) {
            foreign::check(&tree)?;
        }
        let tables = tree.tables();
        let mut keys = Keys::Read(Section::root(tree, path, text.starts_with(RESOLVED_HEADER), lookup));
        // The table of a missing key may be there under another name.
        let config = Self::visit(None, &mut keys).map_err(|error| match error.problem {
            Problem::Missing { .. } => explain::unknown_table(&tables).unwrap_or(error),
            _ => error,
        })?;
        keys.finish()?;
        online::check(&config, &places)?;
        evaluation::check(&config, &places)?;
        optimizer::check(&config, &places)?;
        reference::check(&config, &places)?;
        judges::check(&config.judges, &places)?;
        objective::check(&config, &places)?;
        distill::check(&config, &places)?;
        config.refuse_own_output(&places)?;
        config.refuse_lost_base(&places)?;
        config.refuse_rising_rate(&places)?;
        if config.method == Method::Distill {
            // A teacher is named even if it is the policy's own start.
            return Ok(config);
        }
        let reference = config.reference.without_policy(&config.model, config.adapter.as_ref());
        Ok(Self { reference, ..config })
    }

    /// Visits all keys. A section follows those that its defaults and rules depend on.
    fn visit(now: Option<&Self>, keys: &mut Keys) -> Result<Self> {
        keys! { let keys, now;
            /// Training method: supervised fine-tuning, direct preference optimisation,
            /// [KTO](losses.md#labelled-completions), a [reward model](reward.md), [Online
            /// DPO](online.md), [GRPO](grpo.md), or [distillation](distill.md).
            method = choice(Method::all().map(|method| (method.name(), method)).collect::<Vec<_>>())
                // The reference page lists the tables of an online run, which are all.
                .or(Method::Online)
                .required_if(true, "how to train: \"sft\", \"dpo\", \"kto\", \"reward\", \"online\", \"grpo\" or \"distill\""),
                now.method;
            /// A folder with `config.json`, the tokenizer's files and, unless `weights` says
            /// otherwise, safetensors. Or a [GGUF file](formats.md#gguf). Or a [name of the
            /// hub](hub.md): `"owner/name"` or `"owner/name@revision"`; an existing folder comes
            /// first.
            model = path_or_name(HubPart::Model).required("an HF model folder"), now.model.clone();
            /// Initial weights. `"random"`: random weights from `seed`. A path: a `policy.pt` of the
            /// original DPO code, not for an adapter's base.
            weights = weights().or(Weights::Folder).shown("the folder's"), now.weights.clone();
            /// The run folder. A folder that holds a run is refused without `--resume` or
            /// `--overwrite`.
            output = path().required("the folder the run writes").free(), now.output.clone();
            /// Seed of data order, random weights and sampling.
            seed = integer(COUNT).or(42), now.seed;
        }
        let adapter = keys.optional_table("adapter", now.map(|now| &now.adapter), AdapterSection::visit)?;
        let data =
            keys.table("data", now.map(|now| &now.data), |now, keys| DataConfig::visit(now, keys, method))?;
        let grpo = now.and_then(|now| now.online.as_ref()?.algorithm.grpo());
        let grpo = grpo::visit(grpo, keys, method)?;
        let distill = distill::visit(now.and_then(|now| now.distill.as_ref()), keys, method)?;
        let own_answers = distill.filter(DistillConfig::generates);
        let online = if method.generates() || own_answers.is_some() {
            let now = now.and_then(|now| now.online.as_ref());
            let answers_eval = method.generates() && !data.eval.is_empty();
            Some(keys.table("online", now, |now, keys| {
                OnlineConfig::visit(now, keys, data.max_length, &output, grpo, own_answers, answers_eval)
            })?)
        } else {
            let otherwise = if method == Method::Distill { ", or set distill.lmbda above 0" } else { "" };
            let reason =
                format!("method = \"{method}\" generates nothing; remove the [online] table{otherwise}");
            keys.refuse("online", &reason)?;
            None
        };
        let algorithm = online.as_ref().map_or(Algorithm::Dpo, |online| online.algorithm);
        let objective = keys.table("objective", now.map(|now| &now.objective), |now, keys| {
            let grpo = online.as_ref().and_then(OnlineConfig::policy_gradient);
            let objective = objective::visit(now, keys, method, algorithm, grpo)?;
            Ok(ObjectiveConfig { distill: distill.map(|distill| distill.options()), ..objective })
        })?;
        let reference = keys.table("reference", now.map(|now| &now.reference), |now, keys| {
            let unused = objective::without_reference(&objective, method);
            ReferenceConfig::visit(now, keys, method, &objective, unused.as_deref(), adapter.as_ref())
        })?;
        let train = keys.table("train", now.map(|now| &now.train), |now, keys| {
            TrainConfig::visit(now, keys, method, !data.eval.is_empty())
        })?;
        let compute = keys.table("compute", now.map(|now| &now.compute), |now, keys| {
            // A teacher is frozen too.
            ComputeConfig::visit(now, keys, adapter.is_some() || distill.is_some())
        })?;
        let logging = keys.table("logging", now.map(|now| &now.logging), |now, keys| {
            LoggingConfig::visit(now, keys, &output)
        })?;
        let has_environment = online.as_ref().is_some_and(|online| online.environment.is_some());
        let judges = judges::visit(now.map(|now| &now.judges), keys, method, has_environment)?;
        Ok(Self {
            method,
            model,
            weights,
            output,
            seed,
            adapter,
            reference,
            data,
            online,
            distill,
            objective,
            train,
            compute,
            logging,
            judges,
        })
    }

    /// Returns how often a run takes a step on the same rows before it goes on.
    pub fn steps_per_batch(&self) -> u64 {
        self.online.as_ref().map_or(1, OnlineConfig::num_iterations)
    }

    /// Returns the steps of a run over so many rows.
    pub fn total_steps(&self, num_rows: usize) -> u64 {
        let steps = self.train.length.total_steps(num_rows, self.train.batch_size);
        match self.train.length {
            Length::Steps(_) => steps,
            Length::Epochs(_) => steps.saturating_mul(self.steps_per_batch()),
        }
    }

    /// Server that generates instead of this process.
    pub fn server(&self) -> Option<&ServerConfig> {
        self.online.as_ref()?.server.as_ref()
    }

    /// Refuses an adapter on weights that the folder of its base does not have.
    fn refuse_lost_base(&self, places: &Places) -> Result<()> {
        if self.adapter.is_none() || !matches!(self.weights, Weights::File(_)) {
            return Ok(());
        }
        let reason = format!(
            "the adapter's folder would name the base model {}, which has other weights; make a folder of its config.json, its \
             tokenizer's files and this file as policy.pt, give it as `model`, and remove `weights`",
            self.model.display()
        );
        Err(places.conflict("weights", reason))
    }

    /// Refuses a polynomial schedule that does not fall, `lr_end` being the default.
    fn refuse_rising_rate(&self, places: &Places) -> Result<()> {
        let rate = self.train.learning_rate;
        match self.train.schedule {
            Shape::Polynomial { lr_end, .. } if rate <= lr_end => {
                let reason = format!(
                    "\"polynomial\" falls to train.lr_end = {lr_end:e}, which is not below train.learning_rate = {rate:e}; lower \
                     train.lr_end (0 ends at 0), or raise train.learning_rate"
                );
                Err(places.conflict("train.schedule", reason))
            }
            _ => Ok(()),
        }
    }

    /// Refuses to read a model from a folder that the run will write.
    fn refuse_own_output(&self, places: &Places) -> Result<()> {
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
        let own = ["final", "checkpoints"].map(|own| self.output.join(own));
        let is_own = |path: &&PathBuf| own.iter().any(|own| path.starts_with(own));
        match inputs.into_iter().find(|(_, input)| input.as_ref().is_some_and(is_own)) {
            None => Ok(()),
            Some((key, _)) => Err(places.conflict(
                key,
                format!("this run writes to that folder ({}); change `output`", self.output.display()),
            )),
        }
    }
}

fn weights<'a>() -> Form<'a, Weights> {
    let read = |entry: Entry| match entry.is_string("random") {
        true => Ok(Weights::Random),
        false => entry.path().map(Weights::File),
    };
    custom("`\"random\"` or path", read, |weights: &Weights| match weights {
        Weights::Folder => None,
        Weights::Random => Some(Value::from("random")),
        Weights::File(path) => Some(path_value(path)),
    })
}

#[cfg(test)]
mod tests;
