//! Translation of other programs' files into a configuration of ours.
//!
//! Each setting is looked up in its program's table. A setting with a key of its own is converted at
//! once. The others are collected as parts, and [`Translator`] makes keys of them topic by topic,
//! with the program's own defaults where they differ from ours.

mod adapter;
mod batch;
mod compute;
mod data;
mod dataset_info;
mod logging;
mod method;
mod objective;
mod sources;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use self::sources::Sources;
use super::Program;
use super::document::{Document, at};
use super::name::{Converted, Meaning, Part};
use super::values::{as_count, as_flag, as_number, as_table, is_off, shown};
use crate::config::Method;
use crate::config::draft::{Draft, DraftKey, Remark};
use crate::config::error::{ConfigError, Place, Problem, Result};

/// Answers that the command line gives beside the files.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    /// Training method.
    pub method: Option<Method>,
    /// Model.
    pub model: Option<String>,
    /// Training rows.
    pub train: Vec<String>,
    /// Held-out rows.
    pub eval: Vec<String>,
    /// Run folder.
    pub output: Option<String>,
    /// Ranks that the other program's run had.
    pub ranks: Option<u64>,
    /// Ranks to assume where neither `ranks` nor a file says it.
    pub assumed_ranks: Option<u64>,
}

/// Facts about the files that settings name.
pub trait Facts {
    /// Returns the path or name as the new file, in its folder, would have it.
    fn path(&self, given: &str) -> String;
    /// Returns a path that is no name of the hub, as the new file, in its folder, would have it.
    fn local(&self, given: &str) -> String;
    /// Returns whether a path exists.
    fn exists(&self, given: &str) -> bool;
    /// Returns `model_type` of the model's config.json.
    fn model_type(&self, model: &str) -> Option<String>;
    /// Returns the columns of the first row.
    fn columns(&self, train: &str) -> Option<Vec<String>>;
    /// Returns the number of rows of all files.
    fn num_rows(&self, train: &[String]) -> Option<u64>;
}

/// A translated run.
#[derive(Clone, Debug)]
pub struct Translation {
    /// The configuration.
    pub draft: Draft,
    /// Programs whose settings were found.
    pub programs: Vec<Program>,
    /// Ranks of the other program's run.
    pub ranks: u64,
    /// Machines of the other program's run.
    pub machines: u64,
    /// Length of the sequences that rows were packed into, if so.
    pub packed: Option<u64>,
    /// Keys that count steps, and how often an epoch each is due.
    pub per_epoch: Vec<PerEpoch>,
}

/// A key in steps of which the other program's file says how often an epoch it is due.
#[derive(Clone, Debug)]
pub struct PerEpoch {
    /// Full key.
    pub key: String,
    /// Times in an epoch.
    pub times: u64,
    /// The setting as it was given, `name = value`.
    pub setting: String,
}

impl PerEpoch {
    /// Sets the key for epochs of so many steps.
    pub fn set(&self, draft: &mut Draft, steps: u64) {
        let every = (steps / self.times.max(1)).max(1);
        draft.set(&self.key, every as i64, format!("{}; an epoch has {steps} steps", self.setting));
    }
}

/// Reads files of other programs and translates them into one run.
///
/// `kind` names the program where the content does not. Files that settings name are read too.
///
/// # Errors
/// If a file cannot be read or recognised, a value has the wrong type, something necessary is missing,
/// or the method or the loss cannot be had. The message names file, line and setting.
pub fn translate(
    files: &[PathBuf],
    kind: Option<Program>,
    answers: &Answers,
    facts: &dyn Facts,
) -> Result<Translation> {
    Translator::new(Sources::of(files, kind)?, answers, facts)?.finish()
}

/// A setting of a part.
#[derive(Clone)]
struct Given {
    setting: String,
    value: Value,
    place: Place,
    program: Program,
}

impl Given {
    fn shown(&self) -> String {
        let name = match self.setting.contains(char::is_control) {
            true => self.setting.escape_debug().to_string(),
            false => self.setting.clone(),
        };
        format!("{name} = {}", shown(&self.value))
    }

    fn wrong(&self, expected: &str) -> ConfigError {
        let problem = Problem::Value {
            key: self.setting.clone(),
            expected: expected.to_owned(),
            found: shown(&self.value),
        };
        ConfigError { place: self.place.clone(), problem }
    }

    fn conflict(&self, reason: impl Into<String>) -> ConfigError {
        let problem = Problem::Conflict { key: self.setting.clone(), reason: reason.into() };
        ConfigError { place: self.place.clone(), problem }
    }

    fn path(&self) -> Option<&Path> {
        match &self.place {
            Place::File { path, .. } => Some(path),
            _ => None,
        }
    }

    /// Whether another setting of the same meaning has the same value.
    fn agrees(&self, other: &Self) -> bool {
        let is_number = |given: &Self| as_number(&given.value);
        let is_flag = |given: &Self| as_flag(&given.value);
        self.value == other.value
            || is_number(self).is_some() && is_number(self) == is_number(other)
            || is_flag(self).is_some() && is_flag(self) == is_flag(other)
    }

    fn count(&self) -> Result<u64> {
        as_count(&self.value).ok_or_else(|| self.wrong("a whole number"))
    }

    fn number(&self) -> Result<f64> {
        as_number(&self.value).ok_or_else(|| self.wrong("a number"))
    }

    fn flag(&self) -> Result<bool> {
        as_flag(&self.value).ok_or_else(|| self.wrong("true or false"))
    }

    /// Members of a table, by name, each as a setting of its own.
    fn members(&self) -> Result<Vec<(String, Self)>> {
        let table = as_table(&self.value).ok_or_else(|| self.wrong("a table of names and values"))?;
        let member = |(name, value): (String, Value)| {
            let setting = format!("{}.{name}", self.setting);
            (name, Self { setting, value, ..self.clone() })
        };
        Ok(table.into_iter().map(member).collect())
    }

    fn text(&self) -> Result<&str> {
        self.value.as_str().ok_or_else(|| self.wrong("a text"))
    }
}

/// Whether the first of two settings of a part holds against the one behind it.
fn wins(part: Part) -> fn(&Given, &Given) -> bool {
    match part {
        // transformers takes optimiser and schedule of a DeepSpeed file that has them.
        Part::Schedule | Part::WarmupType | Part::Optimizer => {
            |known, given| known.program == Program::DeepSpeed && given.program != Program::DeepSpeed
        }
        Part::Bf16 | Part::Fp16 | Part::Checkpointing => {
            |known, given| known.path() == given.path() && !is_off(&known.value) && is_off(&given.value)
        }
        _ => |_, _| false,
    }
}

/// Whether Axolotl looks at the first of two settings before the other.
fn is_earlier_beta(known: &Given, given: &Given) -> bool {
    let order = ["trl.beta", "rl_beta", "dpo_beta", "orpo_alpha"];
    let place = |given: &Given| order.iter().position(|name| *name == given.setting);
    matches!((place(known), place(given)), (Some(known), Some(given)) if known < given)
}

struct Translator<'a> {
    /// Program of the run's settings.
    program: Program,
    programs: Vec<Program>,
    answers: &'a Answers,
    facts: &'a dyn Facts,
    parts: BTreeMap<Part, Given>,
    /// Settings that keys were set by.
    said: BTreeMap<&'static str, Given>,
    /// Parts that were made into keys or remarks.
    taken: Vec<Given>,
    /// Steps between two logs, which are those between two evaluations of transformers, too.
    logging_steps: Option<Given>,
    /// How TRL orders rows.
    sampling: Option<Given>,
    /// Axolotl's table of FSDP, which turns it on.
    fsdp_config: Option<Given>,
    draft: Draft,
    method: Method,
    /// Whether a distillation is TRL's `GKDTrainer`, not its `DistillationTrainer`.
    is_gkd: bool,
    /// Place of errors about something missing.
    file: Place,
    ranks: u64,
    machines: u64,
    packed: Option<u64>,
    per_epoch: Vec<PerEpoch>,
}

impl<'a> Translator<'a> {
    fn new(mut sources: Sources, answers: &'a Answers, facts: &'a dyn Facts) -> Result<Self> {
        // Launchers come first, so that the run's own settings win.
        let order = |program| match program {
            Program::Accelerate => 0,
            Program::DeepSpeed => 1,
            _ => 2,
        };
        sources.documents.sort_by_key(|document| order(document.program));
        let Some(last) = sources.documents.last() else {
            let path = sources.seen.first().map_or(Path::new(""), PathBuf::as_path);
            return Err(at(
                path,
                None,
                "the command has no settings: no option of it and no file that it names",
            ));
        };
        let file = Place::File { path: last.path.clone(), line: None };
        let mut programs: Vec<_> = sources.documents.iter().map(|document| document.program).collect();
        programs.dedup();
        let mut translator = Self {
            // Launchers alone have the defaults of TRL's scripts.
            program: if order(last.program) == 2 { last.program } else { Program::Trl },
            programs,
            answers,
            facts,
            parts: BTreeMap::new(),
            said: BTreeMap::new(),
            taken: Vec::new(),
            logging_steps: sources.given("logging_steps"),
            sampling: sources.given("train_sampling_strategy"),
            fsdp_config: sources.given("fsdp_config").filter(|given| {
                given.program == Program::Axolotl && given.value.is_object() && !is_off(&given.value)
            }),
            draft: Draft::default(),
            method: Method::Sft,
            is_gkd: sources.is_gkd(),
            file,
            ranks: 1,
            machines: 1,
            packed: None,
            per_epoch: Vec::new(),
        };
        for document in &sources.documents {
            let settings: Vec<_> =
                document.settings.iter().map(|(name, value)| (name.clone(), value)).collect();
            translator.collect(document, &settings)?;
        }
        for setting in &sources.left_out {
            let reason = "it stands for arguments which no file tells; set what they set".to_owned();
            translator.draft.missing.push(Remark { setting: setting.clone(), reason });
        }
        translator.method = translator.find_method(&sources)?;
        Ok(translator)
    }

    /// Sorts the settings of a document into keys, parts and remarks.
    fn collect(&mut self, document: &Document, settings: &[(String, &Value)]) -> Result<()> {
        for (name, value) in settings {
            // `trl` hands options of its launcher on.
            let is_trl = document.program == Program::Trl;
            let found = document.program.find(name);
            let found = found.or_else(|| Program::Accelerate.find(name).filter(|_| is_trl));
            let has_inner = || {
                let prefix = format!("{name}.");
                document.program.known().any(|known| known.names.iter().any(|name| name.starts_with(&prefix)))
            };
            match value {
                Value::Null if name == "max_length" => {
                    self.draft.set("data.max_length", 1 << 24, "max_length = null: no row is cut");
                }
                Value::Null => {}
                Value::Object(entries)
                    if found.is_none_or(|found| !matches!(found.meaning, Meaning::Key { .. }))
                        && has_inner() =>
                {
                    let inner: Vec<_> =
                        entries.iter().map(|(key, value)| (format!("{name}.{key}"), value)).collect();
                    self.collect(document, &inner)?;
                }
                _ => {
                    let given = Given {
                        setting: name.clone(),
                        value: (*value).clone(),
                        place: document.place(name),
                        program: document.program,
                    };
                    self.take(given, found.map(|found| found.meaning))?;
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, given: Given, meaning: Option<Meaning>) -> Result<()> {
        let is_auto =
            given.value == "auto" && matches!(given.program, Program::DeepSpeed | Program::Accelerate);
        match meaning {
            _ if is_auto => {}
            None => self.draft.unknown.push(Remark { setting: given.shown(), reason: String::new() }),
            Some(Meaning::NotNeeded(reason)) => self.not_needed(&given, reason),
            Some(Meaning::Missing(_)) if is_off(&given.value) => {
                self.not_needed(&given, "it is off here too");
            }
            Some(Meaning::Missing(reason)) => self.missing(&given, reason),
            Some(Meaning::Part { part, .. }) => {
                let kept = match self.parts.get(&part).cloned() {
                    // A switch and its table, or a file and its name, go together.
                    Some(known) if !matches!(part, Part::UseAdapter | Part::DeepSpeed) => {
                        self.choose(known, given, wins(part))
                    }
                    _ => given,
                };
                self.parts.insert(part, kept);
            }
            Some(Meaning::Key { key, convert, .. }) => match convert(&given.value) {
                Converted::Value(_) | Converted::Changed(..) if !self.is_chosen(key, &given) => {}
                Converted::Value(value) => {
                    let is_same_name = key.rsplit('.').next() == Some(&given.setting);
                    let comment = if is_same_name { String::new() } else { given.shown() };
                    self.draft.set(key, value, comment);
                }
                Converted::Changed(value, why) => {
                    self.draft.set(key, value, format!("{}: {why}", given.shown()));
                }
                Converted::Same(why) => self.not_needed(&given, why),
                Converted::Missing(why) => self.missing(&given, why),
                Converted::Wrong(expected) => return Err(given.wrong(expected)),
            },
        }
        Ok(())
    }

    /// Returns the one of two settings with the same meaning that holds, and tells of the other.
    fn choose(&mut self, known: Given, given: Given, known_wins: fn(&Given, &Given) -> bool) -> Given {
        let (kept, lost) = if known_wins(&known, &given) { (known, given) } else { (given, known) };
        if !kept.agrees(&lost) {
            let is_same_file = kept.program == lost.program && kept.path() == lost.path();
            match is_same_file && !is_off(&lost.value) {
                true => {
                    let reason = format!("`{}` says the same otherwise, and is taken", kept.shown());
                    self.missing(&lost, reason);
                }
                false => self.not_needed(&lost, format!("`{}` wins", kept.shown())),
            }
        }
        kept
    }

    /// Whether a setting decides about a key that another setting may have set.
    fn is_chosen(&mut self, key: &'static str, given: &Given) -> bool {
        let chosen = match self.said.get(key).cloned() {
            Some(known) => self.choose(known, given.clone(), is_earlier_beta),
            None => given.clone(),
        };
        let is_chosen = chosen.setting == given.setting && chosen.program == given.program;
        self.said.insert(key, chosen);
        is_chosen
    }

    fn finish(mut self) -> Result<Translation> {
        // A guess has set it with a comment.
        if self.draft.get("method").and_then(toml::Value::as_str) != Some(self.method.name()) {
            self.draft.set("method", self.method.name(), "");
        }
        self.model()?;
        self.data()?;
        self.sliced_splits();
        self.objective()?;
        self.reference()?;
        self.batch()?;
        self.kto_order();
        self.length()?;
        self.optimizer()?;
        self.schedule()?;
        self.saves()?;
        self.adapter()?;
        self.compute()?;
        self.logging()?;
        self.drop_what_does_not_apply();
        let rest: Vec<_> = std::mem::take(&mut self.parts).into_values().collect();
        for given in rest {
            self.not_needed(&given, "another setting says it already, or its value is that of the default");
        }
        for given in self.unmentioned() {
            self.not_needed(&given, "it is off here too");
        }
        let Self { draft, programs, ranks, machines, packed, per_epoch, .. } = self;
        Ok(Translation { draft, programs, ranks, machines, packed, per_epoch })
    }

    fn part(&mut self, part: Part) -> Option<Given> {
        let given = self.parts.remove(&part)?;
        self.taken.push(given.clone());
        Some(given)
    }

    /// Settings that are off and that neither a key nor a remark mentions.
    fn unmentioned(&mut self) -> Vec<Given> {
        let mut taken = std::mem::take(&mut self.taken);
        let Draft { keys, not_needed, missing, .. } = &self.draft;
        taken.retain(|given| {
            let is_of = |key: &DraftKey| {
                key.comment.contains(&given.setting) || key.key.rsplit('.').next() == Some(&given.setting)
            };
            is_off(&given.value)
                && !keys.iter().any(is_of)
                && !not_needed.iter().chain(missing).any(|remark| remark.setting == given.shown())
        });
        taken
    }

    fn not_needed(&mut self, given: &Given, reason: impl Into<String>) {
        self.draft.not_needed.push(Remark { setting: given.shown(), reason: reason.into() });
    }

    fn missing(&mut self, given: &Given, reason: impl Into<String>) {
        self.draft.missing.push(Remark { setting: given.shown(), reason: reason.into() });
    }

    /// The error for something that no file says; `give` names the flag.
    fn lacking(&self, key: &str, give: &str) -> ConfigError {
        let problem = Problem::Missing { key: key.to_owned(), expected: give.to_owned() };
        ConfigError { place: self.file.clone(), problem }
    }

    /// A comment that names the program whose default a value is.
    fn default_of(&self) -> String {
        format!("{}'s default", self.program.title())
    }

    /// Tells of splits of the hub as `train[:20%]`.
    fn sliced_splits(&mut self) {
        for (key, rows) in [("data.train", "data.train_rows"), ("data.eval", "data.eval_rows")] {
            let Some(value) = self.draft.get(key) else { continue };
            let alone = std::slice::from_ref(value);
            let items = value.as_array().map_or(alone, Vec::as_slice);
            let path = |item: &toml::Value| {
                let path = item.as_str().or_else(|| item.get("path")?.as_str())?;
                (path.starts_with("hf://") && path.contains('[')).then(|| path.to_owned())
            };
            let sliced: Vec<_> = items.iter().filter_map(path).collect();
            for setting in sliced {
                let reason =
                    format!("only whole splits are read; write it without the brackets, and give `{rows}`");
                self.draft.missing.push(Remark { setting, reason });
            }
        }
    }

    fn model(&mut self) -> Result<()> {
        let given = self.draft.get("model").and_then(toml::Value::as_str).map(str::to_owned);
        let comment = self
            .draft
            .keys
            .iter()
            .find(|key| key.key == "model")
            .map_or(String::new(), |key| key.comment.clone());
        let (model, comment) = match (&self.answers.model, given) {
            (Some(model), _) => (model.clone(), "--model".to_owned()),
            (None, Some(model)) => (model, comment),
            (None, None) => return Err(self.lacking("model", "`--model` with a folder or a name of the hub")),
        };
        self.draft.set("model", self.facts.path(&model), comment);
        for key in ["weights", "adapter.start", "reference.adapter", "reference.model"] {
            let text = self.draft.get(key).and_then(toml::Value::as_str).filter(|text| *text != "random");
            if let Some(path) = text.map(|text| self.facts.path(text)) {
                let comment = self
                    .draft
                    .keys
                    .iter()
                    .find(|known| known.key == key)
                    .map_or(String::new(), |key| key.comment.clone());
                self.draft.set(key, path, comment);
            }
        }
        let output = self.draft.get("output").and_then(toml::Value::as_str).map(str::to_owned);
        let (output, comment) = match (&self.answers.output, output) {
            (Some(output), _) => (output.clone(), String::new()),
            (None, Some(output)) => (output, "output_dir".to_owned()),
            (None, None) => (format!("runs/{}", self.method), "the run's folder".to_owned()),
        };
        self.draft.set("output", self.facts.local(&output), comment);
        if self.draft.get("seed").is_none() && self.program == Program::Mitchell {
            self.draft.set("seed", 0, self.default_of());
        }
        Ok(())
    }

    /// Removes keys that the method or other keys exclude, with a remark.
    fn drop_what_does_not_apply(&mut self) {
        let reasons: Vec<_> = self.draft.keys.iter().map(|key| self.without_effect(key)).collect();
        let mut kept = Vec::new();
        for (key, reason) in std::mem::take(&mut self.draft.keys).into_iter().zip(reasons) {
            let Some(reason) = reason else {
                kept.push(key);
                continue;
            };
            let reason = format!("`{}` has no effect {reason}", key.key);
            let setting = if key.comment.is_empty() { key.key } else { key.comment };
            self.draft.not_needed.push(Remark { setting, reason });
        }
        self.draft.keys = kept;
    }

    /// Returns the setting that leaves a key without effect, if there is one: "with …" or "without …".
    fn without_effect(&self, key: &DraftKey) -> Option<String> {
        let (method, name) = (self.method, key.key.as_str());
        let value = |name: &str| self.draft.get(name);
        let text = |name: &str| value(name).and_then(toml::Value::as_str);
        let is_of_method = match name {
            "data.truncation" | "data.loss_on" => {
                matches!(method, Method::Sft | Method::Dpo | Method::Distill)
            }
            "objective.center_rewards_coefficient" => method == Method::Reward,
            _ if name.starts_with("objective.") => method.has_reference() && method != Method::Distill,
            _ if name.starts_with("reference.") => method.has_reference(),
            _ if name.starts_with("online.") => method.generates() || value("distill.lmbda").is_some(),
            _ if name.starts_with("grpo.") => method == Method::Grpo,
            _ if name.starts_with("distill.") => method == Method::Distill,
            _ => true,
        };
        if !is_of_method {
            return Some(format!("with method = \"{method}\""));
        }
        // Constants of other losses and optimisers, which TRL ignores.
        let optimizer = text("train.optimizer").unwrap_or("adamw");
        let of_optimizer = |takers: &[&str]| (takers.contains(&optimizer), format!("with \"{optimizer}\""));
        let of_loss = |loss: &str| {
            let is_there = match value("objective.loss") {
                Some(toml::Value::Table(terms)) => terms.contains_key(loss),
                _ => text("objective.loss") == Some(loss),
            };
            (is_there, format!("without the loss \"{loss}\""))
        };
        let (has_effect, beside) = match name {
            "train.betas" => of_optimizer(&["adamw", "lion", "schedule_free_adamw", "muon"]),
            // transformers gives Adam's constants to no other optimiser.
            "train.eps" if key.comment.contains("adam_epsilon") => {
                of_optimizer(&["adamw", "schedule_free_adamw", "muon"])
            }
            "train.eps" => of_optimizer(&["adamw", "rmsprop", "schedule_free_adamw", "muon"]),
            "objective.discopop_tau" => of_loss("discopop"),
            "objective.simpo_gamma" => of_loss("simpo"),
            "objective.f_alpha_divergence_coef" => {
                let divergence = text("objective.f_divergence_type");
                (divergence == Some("alpha_divergence"), "without \"alpha_divergence\"".to_owned())
            }
            "objective.center_rewards_coefficient" => (key.value.as_float() != Some(0.0), "at 0".to_owned()),
            "grpo.scale_rewards" => {
                let order = text("grpo.aggregation");
                (order != Some("normalize_then_sum"), "with \"normalize_then_sum\"".to_owned())
            }
            "grpo.use_bias_correction_kl" => {
                let beta = value("objective.beta").and_then(toml::Value::as_float);
                (beta.is_some_and(|beta| beta != 0.0), "without objective.beta".to_owned())
            }
            _ => return None,
        };
        (!has_effect).then_some(beside)
    }
}
