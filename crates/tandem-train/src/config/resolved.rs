//! The resolved config as TOML: every key, every default, absolute paths.

use std::fmt::Write;
use std::path::Path;

use toml::Value;

use tandem_data::row::{LossOn, Truncation};
use tandem_kernels::StateForm;

use super::types::{Offload, Shape, Sharding, SumForm};
use super::{
    AdapterSection, AdapterStart, Algorithm, Config, DataSource, Length, MicroBatch, Optimizer,
    ReferenceKind, ServerConfig, Sync, Warmup, Weights, judges, server,
};
use crate::objective::Divergence;
use crate::size;
use tandem_model::{AdapterKind, Targets};

/// Keys and values of one table, in the order they are written.
pub(super) type Entries = Vec<(&'static str, Value)>;

impl Config {
    /// The config file that yields exactly this config, wherever it is put: paths are absolute and defaults written out.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        let tables = self.tables().into_iter().map(|(table, entries)| (format!("[{table}]"), entries));
        let judges = self.judges.iter().map(|judge| ("[[judges]]".to_owned(), judges::entries(judge)));
        for (header, entries) in tables.chain(judges) {
            if entries.is_empty() {
                continue;
            }
            if header != "[]" {
                let _ = write!(text, "\n{header}\n");
            }
            for (key, value) in entries {
                let _ = writeln!(text, "{key} = {value}");
            }
        }
        text
    }

    /// Every table in the order it is written, the root first under the empty name.
    pub(super) fn tables(&self) -> Vec<(&'static str, Entries)> {
        vec![
            ("", self.root_entries()),
            ("adapter", self.adapter_entries()),
            ("reference", self.reference_entries()),
            ("data", self.data_entries()),
            ("online", self.online_entries()),
            ("online.server", self.server().map(server::entries).unwrap_or_default()),
            ("objective", self.objective_entries()),
            ("train", self.train_entries()),
            ("compute", self.compute_entries()),
        ]
    }

    fn root_entries(&self) -> Entries {
        let mut out: Entries = vec![("method", self.method.name().into()), ("model", path(&self.model))];
        match &self.weights {
            Weights::Folder => {}
            Weights::Random => out.push(("weights", "random".into())),
            Weights::File(file) => out.push(("weights", path(file))),
        }
        out.push(("output", path(&self.output)));
        out.push(("seed", integer(self.seed)));
        out
    }

    fn reference_entries(&self) -> Entries {
        let mut out: Entries = vec![("kind", self.reference.kind.name().into())];
        out.extend(self.reference.model.as_deref().map(|model| ("model", path(model))));
        out.extend(self.reference.adapter.as_deref().map(|adapter| ("adapter", path(adapter))));
        if self.reference.kind == ReferenceKind::Sync {
            let Sync { steps, alpha } = self.reference.sync;
            out.extend([("sync_steps", integer(steps)), ("sync_alpha", alpha.into())]);
        }
        out
    }

    /// Nothing, without an adapter.
    fn adapter_entries(&self) -> Entries {
        let Some(AdapterSection { start, dropout }) = &self.adapter else { return Vec::new() };
        let mut out: Entries = vec![("dropout", (*dropout).into())];
        match start {
            AdapterStart::Folder(folder) => out.push(("start", path(folder))),
            AdapterStart::New(adapter) => {
                let names = |names: &[String]| Value::Array(names.iter().map(|n| n.clone().into()).collect());
                out.extend([
                    ("kind", name(&AdapterKind::NAMES, adapter.kind)),
                    ("rank", integer(adapter.rank as u64)),
                    ("alpha", adapter.alpha.into()),
                    ("rslora", adapter.rank_stabilized.into()),
                ]);
                out.push(match &adapter.targets {
                    Targets::AllLinear => ("targets", "all-linear".into()),
                    Targets::Names(targets) => ("targets", names(targets)),
                    Targets::Pattern(pattern) => ("targets", pattern.clone().into()),
                });
                if !adapter.modules_to_save.is_empty() {
                    out.push(("modules_to_save", names(&adapter.modules_to_save)));
                }
            }
        }
        out
    }

    fn data_entries(&self) -> Entries {
        let data = &self.data;
        let mut out: Entries = vec![("train", sources(&data.train))];
        if !data.eval.is_empty() {
            out.push(("eval", sources(&data.eval)));
        }
        out.push(("max_length", integer(data.max_length as u64)));
        let truncation = match data.truncation {
            Truncation::KeepStart => "keep_start",
            Truncation::KeepEnd => "keep_end",
        };
        if !matches!(self.method, super::Method::Reward | super::Method::Online) {
            out.push(("truncation", truncation.into()));
        }
        out.push(("order", data.order.name().into()));
        out.extend(data.cache.as_deref().map(|cache| ("cache", path(cache))));
        out.push(("share_prefix", data.share_prefix.into()));
        if self.method == super::Method::Sft {
            let loss_on = match data.loss_on {
                LossOn::Answer => "answer",
                LossOn::All => "all",
            };
            out.push(("loss_on", loss_on.into()));
        }
        out
    }

    fn asks_reference(&self) -> bool {
        self.online.as_ref().is_some_and(|online| online.algorithm.asks_reference())
    }

    /// The server that answers, if one does.
    pub fn server(&self) -> Option<&ServerConfig> {
        self.online.as_ref()?.server.as_ref()
    }

    fn online_entries(&self) -> Entries {
        let Some(online) = &self.online else { return Vec::new() };
        let mut out: Entries = vec![("algorithm", online.algorithm.name().into())];
        match online.algorithm {
            Algorithm::Dpo => {}
            Algorithm::Xpo { alpha } => out.push(("alpha", alpha.into())),
            Algorithm::NashMd { mixture } => out.push(("mixture", mixture.into())),
        }
        out.extend([
            ("answers", integer(online.num_answers as u64)),
            ("pairs", name(&super::Pairs::NAMES, online.pairs)),
            ("max_new_tokens", integer(online.max_new_tokens as u64)),
            ("temperature", online.temperature.into()),
            ("top_k", integer(online.top_k.unwrap_or(0) as u64)),
            ("top_p", online.top_p.into()),
            ("min_p", online.min_p.into()),
            ("repetition_penalty", online.repetition_penalty.into()),
            ("stop", Value::Array(online.stop.iter().map(|text| text.clone().into()).collect())),
            ("steps_per_round", integer(online.steps_per_round)),
            ("overlap", online.overlap.into()),
            ("replay_size", integer(online.replay_size as u64)),
            ("replay_per_step", integer(online.replay_per_step as u64)),
            ("samples_every", integer(online.samples_every.unwrap_or(0))),
        ]);
        if online.server.is_none() {
            out.push(("max_batch", integer(online.max_batch as u64)));
        }
        out
    }

    fn objective_entries(&self) -> Entries {
        let objective = &self.objective;
        if self.method == super::Method::Reward {
            let centring = objective.center_rewards_coefficient;
            return centring.map(|c| ("center_rewards_coefficient", c.into())).into_iter().collect();
        }
        let loss = match &objective.terms[..] {
            [only] if only.weight == 1.0 => Value::from(only.loss.name),
            terms => Value::Table(terms.iter().map(|t| (t.loss.name.into(), t.weight.into())).collect()),
        };
        // Nash-MD has one loss and no choices.
        let is_nash = objective.terms.is_empty();
        let mut out: Entries = if is_nash { Vec::new() } else { vec![("loss", loss)] };
        if self.method == super::Method::Sft {
            return out;
        }
        let betas: Vec<Value> = objective.betas().map(Value::from).collect();
        out.push(("beta", if betas.len() == 1 { objective.beta.into() } else { Value::Array(betas) }));
        out.extend(objective.beta_every.map(|steps| ("beta_every", integer(steps))));
        if is_nash {
            return out;
        }
        if objective.terms.iter().any(|t| t.loss.smoothing != crate::objective::Smoothing::Unused) {
            out.push(("label_smoothing", objective.label_smoothing.into()));
        }
        if !self.asks_reference() {
            out.push(("reference_free", objective.reference_free.into()));
        }
        out.push(("f_divergence_type", objective.divergence.name().into()));
        if let Divergence::Alpha(alpha) = objective.divergence {
            out.push(("f_alpha_divergence_coef", alpha.into()));
        }
        if objective.terms.iter().any(|t| t.loss.name == "discopop") {
            out.push(("discopop_tau", objective.discopop_tau.into()));
        }
        out
    }

    fn train_entries(&self) -> Entries {
        let train = &self.train;
        let or_zero = |x: Option<u64>| integer(x.unwrap_or(0));
        let mut out: Entries = vec![
            ("batch_size", integer(train.batch_size as u64)),
            match train.micro_batch {
                MicroBatch::Tokens(n) => ("micro_batch_tokens", integer(n as u64)),
                MicroBatch::Rows(n) => ("micro_batch_size", integer(n as u64)),
            },
            match train.length {
                Length::Steps(n) => ("steps", integer(n)),
                Length::Epochs(x) => ("epochs", x.into()),
            },
            ("optimizer", train.optimizer.name().into()),
            ("learning_rate", train.learning_rate.into()),
        ];
        match train.optimizer {
            Optimizer::AdamW { beta1, beta2, eps } => {
                out.push(("betas", Value::Array(vec![beta1.into(), beta2.into()])));
                out.push(("eps", eps.into()));
            }
            Optimizer::RmsProp { alpha, eps } => {
                out.push(("alpha", alpha.into()));
                out.push(("eps", eps.into()));
            }
        }
        out.extend([
            ("optimizer_state", name(&StateForm::NAMES, train.optimizer_state)),
            ("schedule", name(&Shape::NAMES, train.schedule)),
            match train.warmup {
                Warmup::Steps(n) => ("warmup_steps", integer(n)),
                Warmup::Ratio(x) => ("warmup_ratio", x.into()),
            },
            ("max_grad_norm", train.max_grad_norm.unwrap_or(0.0).into()),
            ("weight_decay", train.weight_decay.into()),
            ("save_every", or_zero(train.save_every)),
            ("async_checkpoints", train.async_checkpoints.into()),
            ("eval_every", or_zero(train.eval_every)),
            ("keep", or_zero(train.keep.map(|n| n as u64))),
            ("max_skipped", integer(train.max_skipped)),
            ("record_rows", train.record_rows.into()),
        ]);
        out
    }

    fn compute_entries(&self) -> Entries {
        let compute = &self.compute;
        let mut out: Entries = vec![
            ("devices", compute.devices.name().into()),
            ("dtype", compute.dtype.map_or("auto", tandem_kernels::DType::name).into()),
            ("tf32", compute.tf32.into()),
            ("format", compute.format.map_or("auto", tandem_kernels::Format::name).into()),
            ("threads", integer(compute.threads.unwrap_or(0) as u64)),
            ("reduction", name(&SumForm::NAMES, compute.reduction)),
            ("sharding", name(&Sharding::NAMES, compute.sharding)),
            ("replicate", integer(compute.replicate as u64)),
            ("tensor", integer(compute.tensor as u64)),
            ("pipeline", integer(compute.pipeline as u64)),
            ("checkpointing", name(&super::Checkpointing::NAMES, compute.checkpointing)),
            ("engine", name(&super::compute::Engine::NAMES, compute.engine)),
            ("deadline", integer(compute.deadline)),
            ("offload", name(&Offload::NAMES, compute.offload)),
            ("offload_activations", compute.offload_activations.into()),
        ];
        out.extend(compute.offload_dir.as_deref().map(|folder| ("offload_dir", path(folder))));
        out.extend(compute.memory.map(|bytes| ("memory", size::exact(bytes).into())));
        out
    }
}

/// TOML integers are i64; every count was read from one or fits by its range.
pub(super) fn integer(x: u64) -> Value {
    Value::Integer(x as i64)
}

/// Paths come from TOML strings joined to the current directory, so they are UTF-8 wherever that is.
pub(super) fn path(path: &Path) -> Value {
    Value::String(path.to_string_lossy().into_owned())
}

pub(super) fn name<T: PartialEq>(names: &[(&'static str, T)], value: T) -> Value {
    let (name, _) = names.iter().find(|(_, v)| *v == value).expect("every value has a name");
    (*name).into()
}

fn sources(sources: &[DataSource]) -> Value {
    match sources {
        [only] => path(&only.path),
        many => Value::Array(many.iter().map(|s| path(&s.path)).collect()),
    }
}
