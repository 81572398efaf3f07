//! Rows: files, splits of the hub, shapes and limits.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use toml::Value as Toml;

use super::{Given, Translator};
use crate::config::Method;
use crate::config::draft::Remark;
use crate::config::error::Result;
use crate::config::foreign::Program;
use crate::config::foreign::name::Part;
use crate::config::foreign::values::{as_texts, is_off};

/// Sets that Mitchell's code names: its name, the set of the hub, its shape, and the part that is kept.
const MITCHELLS: [(&str, &str, &str, &str); 3] = [
    ("hh", "hf://Anthropic/hh-rlhf/train", "hh", "keep_end"),
    ("shp", "hf://stanfordnlp/SHP/train", "shp", "keep_start"),
    ("se", "hf://HuggingFaceH4/stack-exchange-preferences/train", "stackexchange", "keep_start"),
];

/// Ends of names of files with rows.
const ENDS: [&str; 9] = ["jsonl", "json", "ndjson", "csv", "tsv", "parquet", "arrow", "gz", "zst"];

/// Keys of a set's table that no key of ours has, and why.
const WITHOUT_KEY: [(&[&str], &str); 8] = [
    (&["fraction", "shards", "shards_idx"], "give a list of tables with `path` and `weight`"),
    (
        &[
            "roles_to_train",
            "train_on_eos",
            "train_on_eot",
            "message_field_training",
            "message_field_training_detail",
        ],
        "every turn of the assistant is scored, with its end marker (`data.loss_on`)",
    ),
    (&["columns"], "every column of a row is read; leave others out with `data.ignore_columns`"),
    (
        &["chat_template_jinja", "template_thinking_key", "split_thinking", "prompt_format"],
        "one template writes all rows: `data.chat_template`; compare with `tandem data`",
    ),
    (
        &["field_thinking", "drop_system_message", "roles"],
        "turns are given to the chat template as they are: change them in the rows",
    ),
    (&["data_dir", "revision"], "the hub's present files are read; give others with --data FILE"),
    (&["skip"], "no rows are skipped; leave them out of the file"),
    (&["input_transform", "input_format", "conversation"], "the chat template writes the text"),
];

/// Keys of a set's table that say nothing about its rows.
const WITHOUT_EFFECT: [&str; 3] = ["ds_type", "trust_remote_code", "preprocess_shards"];

/// A set of rows.
#[derive(Clone)]
pub(super) struct Set {
    pub path: String,
    /// Origin of the name.
    pub comment: String,
    /// Share of its rows that an epoch has.
    pub weight: f64,
    /// Reading of its rows, where an entry says it.
    pub form: Option<Form>,
}

/// Reading of a set's rows.
#[derive(Clone, Default)]
pub(super) struct Form {
    pub shape: Option<&'static str>,
    pub columns: toml::Table,
    pub ignored: Vec<String>,
    /// Whether Axolotl trains on every piece of a longer text.
    pub in_pieces: bool,
    /// Origins of the shape and of the columns.
    pub comments: [String; 2],
}

impl PartialEq for Form {
    fn eq(&self, other: &Self) -> bool {
        (self.shape, &self.columns, &self.ignored) == (other.shape, &other.columns, &other.ignored)
    }
}

impl Set {
    pub(super) fn new(path: String, comment: impl Into<String>) -> Self {
        Self { path, comment: comment.into(), weight: 1.0, form: None }
    }
}

impl Translator<'_> {
    pub(super) fn data(&mut self) -> Result<()> {
        // `stage: pt` alone has set it so far.
        let is_pretraining =
            self.program == Program::LlamaFactory && self.draft.get("data.loss_on").is_some();
        let folder = self.part(Part::DatasetFolder);
        let is_mixture = self.parts.contains_key(&Part::Datasets);
        let sets = self.train_sources(folder.as_ref())?;
        if sets.is_empty() {
            return Err(
                self.lacking("data.train", "`--data` with a file of rows or \"hf://owner/name/split\"")
            );
        }
        self.set_rows("data.train", &sets);
        self.set_form(&sets);
        let eval = self.eval_sources(folder.as_ref(), is_mixture)?;
        self.set_rows("data.eval", &eval);
        self.compare_forms(&sets, &eval);
        self.limits(sets.len(), eval.len())?;
        self.longer_rows(&sets, is_pretraining);
        self.order()?;
        self.chat_template();
        if let Some(given) = self.part(Part::TextColumn) {
            self.text_column(&given)?;
        }
        if self.method == Method::Sft {
            self.loss_mask()?;
        }
        for part in [Part::CompletionOnly, Part::AssistantOnly, Part::TrainOnPrompt] {
            if let Some(given) = self.part(part) {
                self.not_needed(&given, "`data.loss_on` says it");
            }
        }
        let packing = self.part(Part::Packing);
        let is_packed = packing.as_ref().map_or(is_pretraining, |given| !is_off(&given.value));
        if is_packed {
            self.packed = self
                .draft
                .get("data.max_length")
                .and_then(Toml::as_integer)
                .map_or(Some(1024), |n| Some(n as u64));
            let reason = match is_pretraining {
                true => {
                    "texts are joined there and cut into pieces of cutoff_len, which a batch counts; `train.batch_size` counts \
                     rows, which is fewer tokens, and `data.max_length` keeps the beginning of a longer text: split such texts"
                }
                false => {
                    "a batch there counts packed sequences, and `train.batch_size` counts rows, which is fewer tokens"
                }
            };
            let setting =
                packing.map_or("packing, the default of stage = pt".to_owned(), |given| given.shown());
            self.draft.missing.push(Remark { setting, reason: reason.to_owned() });
        }
        let mut seen = BTreeSet::new();
        self.draft.missing.retain(|remark| seen.insert((remark.setting.clone(), remark.reason.clone())));
        Ok(())
    }

    /// Says what becomes of rows beyond the limit where the other program does something else.
    fn longer_rows(&mut self, sets: &[Set], is_pretraining: bool) {
        let is_given = self.draft.get("data.truncation").is_some();
        match (self.program, self.method) {
            (Program::LlamaFactory, method) if !is_pretraining => {
                let limit = self.draft.get("data.max_length").map_or(String::new(), ToString::to_string);
                let reason = match method {
                    Method::Reward => "a longer text is cut there; here its row is dropped",
                    _ => {
                        "of a longer row prompt and answer are both cut there; here its end is cut, and a row whose prompt alone \
                         fills the limit is dropped"
                    }
                };
                let remark = Remark { setting: format!("cutoff_len = {limit}"), reason: reason.to_owned() };
                self.draft.missing.push(remark);
            }
            (Program::Axolotl, Method::Sft | Method::Dpo) => {
                let in_pieces = |set: &&Set| set.form.as_ref().is_some_and(|form| form.in_pieces);
                let pieces = sets.iter().filter(in_pieces).count();
                let mut comment = Vec::new();
                if !is_given && pieces < sets.len() {
                    comment
                        .push("Axolotl leaves out longer rows (excess_length_strategy); here they are cut");
                }
                if pieces > 0 {
                    comment.push("of a longer completion Axolotl trains on every piece, here on the first");
                }
                if !comment.is_empty() {
                    self.draft.set("data.truncation", "keep_start", comment.join("; "));
                }
            }
            (Program::Axolotl, Method::Kto) if !is_given => {
                let setting = "excess_length_strategy".to_owned();
                let reason =
                    "Axolotl leaves out longer rows by default; here their completions are cut".to_owned();
                self.draft.missing.push(Remark { setting, reason });
            }
            _ => {}
        }
    }

    /// Names of the training rows, as the configuration has them.
    pub(super) fn train_files(&self) -> Vec<String> {
        let path = |source: &Toml| source.get("path").unwrap_or(source).as_str().map(str::to_owned);
        match self.draft.get("data.train") {
            Some(Toml::Array(paths)) => paths.iter().filter_map(path).collect(),
            Some(one) => path(one).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Whether an epoch has a share of some file's rows.
    pub(super) fn has_weights(&self) -> bool {
        let sources = self.draft.get("data.train").and_then(Toml::as_array);
        sources.is_some_and(|sources| sources.iter().any(Toml::is_table))
    }

    fn set_rows(&mut self, key: &str, sets: &[Set]) {
        let [first, ..] = sets else { return };
        let value: Toml = if sets.iter().any(|set| set.weight != 1.0) {
            let table = |set: &Set| {
                let path = ("path".to_owned(), Toml::from(set.path.clone()));
                Toml::Table([path, ("weight".to_owned(), set.weight.into())].into_iter().collect())
            };
            Toml::Array(sets.iter().map(table).collect())
        } else if sets.len() == 1 {
            first.path.clone().into()
        } else {
            sets.iter().map(|set| set.path.clone()).collect::<Vec<_>>().into()
        };
        self.draft.set(key, value, first.comment.clone());
    }

    /// Shape and columns, which hold for the rows of all sets.
    fn set_form(&mut self, sets: &[Set]) {
        let Some((first, form)) = sets.iter().find_map(|set| Some((set, set.form.as_ref()?))) else { return };
        if let Some(other) = sets.iter().find(|set| set.form.as_ref().is_some_and(|other| other != form)) {
            let reason = "their rows have other shapes or columns, and `data.shape` and `data.columns` hold for all: without \
                          the two, each row is read by the names of its columns; rename them, and compare with `tandem data`";
            let setting = format!("{} and {}", first.path, other.path);
            self.draft.missing.push(Remark { setting, reason: reason.to_owned() });
            return;
        }
        let Form { shape, columns, ignored, comments: [of_shape, of_columns], .. } = form.clone();
        if let Some(shape) = shape {
            self.draft.set("data.shape", shape, of_shape);
        }
        if !columns.is_empty() {
            self.draft.set("data.columns", columns, of_columns);
        }
        if !ignored.is_empty() {
            self.draft.set("data.ignore_columns", ignored, "not what its entry names");
        }
    }

    /// Says where held-out rows would need another shape or other columns than the training rows.
    fn compare_forms(&mut self, sets: &[Set], eval: &[Set]) {
        let form = sets.iter().find_map(|set| set.form.as_ref());
        let is_other = |set: &&Set| set.form.is_some() && set.form.as_ref() != form;
        let Some(other) = eval.iter().find(is_other).filter(|_| form.is_some()) else { return };
        let reason = "its rows have another shape or other columns than the training rows, and `data.shape` and `data.columns` \
                      hold for both: rename its columns";
        self.draft.missing.push(Remark { setting: other.path.clone(), reason: reason.to_owned() });
    }

    /// The chat template: TRL takes it from a tokenizer, too, in a folder or on the hub.
    fn chat_template(&mut self) {
        let Some(given) = self.draft.get("data.chat_template").and_then(Toml::as_str).map(str::to_owned)
        else {
            return;
        };
        let (path, file) = (Path::new(&given), Path::new(&given).join("chat_template.jinja"));
        if file.is_file() {
            let template = self.facts.local(&file.to_string_lossy());
            self.draft.set("data.chat_template", template, format!("of {given}"));
        } else if path.is_dir() || (is_hub_name(&given) && !self.facts.exists(&given)) {
            self.draft.remove("data.chat_template");
            let setting = format!("chat_template_path = {given}");
            let reason = "the template of another tokenizer is a file here: `data.chat_template`".to_owned();
            self.draft.missing.push(Remark { setting, reason });
        }
    }

    /// The column of texts, which TRL reads where there are no messages and no prompt.
    fn text_column(&mut self, given: &Given) -> Result<()> {
        let name = given.text()?;
        let columns =
            self.train_files().first().and_then(|file| self.facts.columns(file)).unwrap_or_default();
        let has = |name: &str| columns.iter().any(|column| column == name);
        if self.method != Method::Sft || name == "text" || has("messages") || has("prompt") {
            self.not_needed(given, "the rows' own keys say what they are");
            return Ok(());
        }
        let mapped = toml::Table::from_iter([("text".to_owned(), name.into())]);
        self.draft.set("data.columns", mapped, given.shown());
        if has("text") {
            self.draft.set("data.ignore_columns", vec!["text".to_owned()], "not what TRL reads");
        }
        Ok(())
    }

    fn train_sources(&mut self, folder: Option<&Given>) -> Result<Vec<Set>> {
        let (dataset, datasets) = (self.part(Part::Dataset), self.part(Part::Datasets));
        let (config, split) = (self.part(Part::DatasetConfig), self.part(Part::TrainSplit));
        let config = config.as_ref().map(|given| given.text().map(str::to_owned)).transpose()?;
        if !self.answers.train.is_empty() {
            return Ok(self
                .answers
                .train
                .iter()
                .map(|path| Set::new(self.row_name(path), "--data"))
                .collect());
        }
        if let Some(given) = datasets {
            return self.listed(&given, false);
        }
        let Some(given) = dataset else { return Ok(Vec::new()) };
        let split = split.as_ref().map_or(Ok("train"), Given::text)?.to_owned();
        if self.program == Program::LlamaFactory {
            return self.by_dataset_info(&given, folder, false);
        }
        let names = as_texts(&given.value).ok_or_else(|| given.wrong("the name of a set, or a file"))?;
        names
            .iter()
            .map(|name| {
                Ok(Set::new(self.named(&given, name, config.as_deref(), &split)?, given.setting.clone()))
            })
            .collect()
    }

    fn eval_sources(&mut self, folder: Option<&Given>, is_mixture: bool) -> Result<Vec<Set>> {
        let (given, share) = (self.part(Part::EvalDataset), self.part(Part::EvalShare));
        let test = self.part(Part::TestSplit);
        if !self.answers.eval.is_empty() {
            let set = |path: &String| Set::new(self.row_name(path), "--eval-data");
            return Ok(self.answers.eval.iter().map(set).collect());
        }
        if let Some(share) = share.filter(|given| !is_off(&given.value)) {
            self.missing(&share, "rows are not split here; give held-out rows in `data.eval`");
        }
        let evaluates = self.parts.get(&Part::EvalStrategy).is_some_and(|given| !is_off(&given.value));
        Ok(match (given, test) {
            (Some(given), _) if given.value.is_array() => self.listed(&given, true)?,
            (Some(given), _) if self.program == Program::LlamaFactory => {
                self.by_dataset_info(&given, folder, true)?
            }
            (Some(given), _) => {
                let text = given.text()?.to_owned();
                vec![Set::new(self.named(&given, &text, None, "test")?, given.setting.clone())]
            }
            // TRL's scripts take the test split of the same set if they evaluate, and of a mixture a share.
            (None, test) if evaluates && self.program == Program::Trl && !is_mixture => {
                let split = test.as_ref().map_or(Ok("test"), Given::text)?.to_owned();
                self.other_split(&split).into_iter().collect()
            }
            (None, Some(test)) => {
                let reason = match is_mixture && evaluates {
                    true => "a mixture has no test split of its own; give held-out rows in `data.eval`",
                    false => "eval_strategy is \"no\", so nothing is evaluated",
                };
                self.not_needed(&test, reason);
                Vec::new()
            }
            _ => Vec::new(),
        })
    }

    /// Another split of the training set, if that is a split of the hub.
    fn other_split(&self, split: &str) -> Option<Set> {
        let files = self.train_files();
        let (set, _) = files.first().filter(|file| file.starts_with("hf://"))?.rsplit_once('/')?;
        Some(Set::new(format!("{set}/{split}"), "dataset_test_split"))
    }

    /// A file, or a split of the hub.
    fn named(&self, given: &Given, name: &str, config: Option<&str>, split: &str) -> Result<String> {
        if name.starts_with("hf://") || self.is_file(name) {
            return Ok(self.row_name(name));
        }
        match config {
            _ if !is_hub_name(name) => Err(given.conflict(format!(
                "{name:?} is no file here and no name of the hub; give the rows with --data FILE"
            ))),
            Some(config) => Ok(format!("hf://{name}/{config}/{split}")),
            None => Ok(format!("hf://{name}/{split}")),
        }
    }

    pub(super) fn is_file(&self, name: &str) -> bool {
        let is_data =
            Path::new(name).extension().and_then(|end| end.to_str()).is_some_and(|end| ENDS.contains(&end));
        is_data || self.facts.exists(name) || name.contains('*')
    }

    pub(super) fn row_name(&self, name: &str) -> String {
        if name.starts_with("hf://") { name.to_owned() } else { self.facts.local(name) }
    }

    /// A list of sets: tables of TRL and Axolotl, or names of Mitchell's code.
    fn listed(&mut self, given: &Given, is_eval: bool) -> Result<Vec<Set>> {
        if self.program == Program::Mitchell {
            return self.mitchells(given);
        }
        let items = given.value.as_array().ok_or_else(|| given.wrong("a list of sets"))?;
        let mut found = Vec::new();
        for item in items {
            let text = |key: &str| item.get(key).and_then(Value::as_str);
            let Some(path) = text("path").or_else(|| text("id")).or_else(|| item.as_str()) else {
                return Err(given.wrong("a list of tables with `path`"));
            };
            // Axolotl looks for held-out rows under "test" first.
            let default = if is_eval && self.program == Program::Axolotl { "test" } else { "train" };
            let split = text("split").unwrap_or(default).to_owned();
            let form = self.shape_of(given, item);
            let weight = self.weight_of(given, item)?;
            let comment = if weight == 1.0 {
                given.setting.clone()
            } else {
                format!("{}; a share there is drawn by chance", given.setting)
            };
            let mut add = |path: String, comment: String| {
                found.push(Set { path, comment, weight, form: Some(form.clone()) });
            };
            let is_local = match item.get("data_files").and_then(as_texts) {
                Some(files) => {
                    for file in files {
                        add(self.row_name(&file), format!("{}: data_files", given.setting));
                    }
                    true
                }
                None => {
                    let config =
                        text("name").or_else(|| text("config")).filter(|config| *config != "default");
                    let split = split.split_once('[').map_or(&*split, |(split, _)| split);
                    let name = self.named(given, path, config, split)?;
                    let is_local = !name.starts_with("hf://");
                    add(name, comment);
                    is_local
                }
            };
            let is_part = split.contains('[') || is_local && !is_eval && split != "train";
            if is_part {
                let setting = format!("{}: {path}: split", given.setting);
                let part = Given { setting, value: split.into(), ..given.clone() };
                self.missing(&part, "all rows are read; `data.train_rows` takes the first of them");
            }
        }
        // A weight of 0 takes no row.
        found.retain(|set| set.weight > 0.0);
        Ok(found)
    }

    /// Share of a set's rows that an epoch has.
    fn weight_of(&self, given: &Given, item: &Value) -> Result<f64> {
        let Some(weight) = item.get("weight").filter(|weight| !weight.is_null()) else { return Ok(1.0) };
        let setting = format!("{}: weight", given.setting);
        let weight = Given { setting, value: weight.clone(), ..given.clone() };
        match weight.number()? {
            share if (0.0..=1.0).contains(&share) => Ok(share),
            _ => Err(weight.wrong("a share from 0 to 1")),
        }
    }

    /// Shape and columns of a set of TRL or Axolotl; each key without a translation is named.
    fn shape_of(&mut self, given: &Given, item: &Value) -> Form {
        let text = |key: &str| item.get(key).and_then(Value::as_str);
        let kind = item.get("type");
        let name = kind.and_then(Value::as_str).unwrap_or_default();
        let mut form = Form { in_pieces: name == "completion", ..Form::default() };
        let is_pair = self.method == Method::Dpo;
        let messages = text("field_messages");
        let mappings = item.get("message_property_mappings").and_then(Value::as_object);
        let maps = |key: &str| {
            let of_table = mappings.and_then(|maps| maps.get(key)).and_then(Value::as_str);
            of_table.or_else(|| text(&format!("message_field_{key}")))
        };
        form.comments = [format!("{}: type = {name}", given.setting), format!("{}: fields", given.setting)];
        let columns = &mut form.columns;
        if name.starts_with("alpaca") {
            form.shape = Some("alpaca");
        } else if name.ends_with(".intel") {
            form.shape = Some("orca");
        } else if maps("role") == Some("from") || name == "sharegpt" {
            form.shape = Some("sharegpt");
            // `type: chat_template` has another default.
            let messages = messages.or((name != "sharegpt").then_some("messages"));
            if let Some(field) = messages.filter(|field| *field != "conversations") {
                columns.insert("conversations".into(), field.into());
            }
        } else if let Some(field) = messages {
            let ours = if is_pair { "prompt" } else { "messages" };
            if field != ours {
                columns.insert(ours.into(), field.into());
            }
        }
        let fields = [
            ("field_prompt", "prompt"),
            ("field_chosen", "chosen"),
            ("field_rejected", "rejected"),
            ("field_system", "system"),
            ("field_tools", "tools"),
            ("field", "text"),
        ];
        for (field, ours) in fields {
            let inner = kind.and_then(|kind| kind.get(field)).and_then(Value::as_str);
            if let Some(column) = text(field).or(inner).filter(|column| *column != ours) {
                columns.insert(ours.into(), column.into());
            }
        }
        let of_set = |name: &str, value: Value| Given {
            setting: format!("{}: {name}", given.setting),
            value,
            ..given.clone()
        };
        let is_ours = matches!(name, "" | "completion" | "sharegpt") || name.starts_with("chat_template");
        if !is_ours {
            self.missing(
                &of_set("type", name.into()),
                "Axolotl writes such rows with a text of its own, here the chat template does: compare with `tandem data`",
            );
        }
        for (key, value) in kind.and_then(Value::as_object).into_iter().flatten() {
            if !fields.iter().any(|(field, _)| field == key) && !is_off(value) {
                self.missing(
                    &of_set(&format!("type.{key}"), value.clone()),
                    "name the columns in `data.columns`; the chat template writes the text",
                );
            }
        }
        let turn = [maps("role"), maps("content")].map(Option::unwrap_or_default);
        if !matches!(turn, ["" | "role", "" | "content"] | ["from", "value"] | ["from", ""]) {
            let turn = of_set("message_property_mappings", turn.join(", ").into());
            self.missing(
                &turn,
                "turns have `role` and `content`, or `from` and `value`: rename them in the rows",
            );
        }
        for (property, column) in mappings.into_iter().flatten() {
            if !matches!(property.as_str(), "role" | "content") && column != property {
                let mapped = of_set(&format!("message_property_mappings.{property}"), column.clone());
                self.missing(&mapped, "the template reads a turn's own keys: rename them in the rows");
            }
        }
        let is_read = |key: &str| {
            matches!(key, "path" | "id" | "split" | "data_files" | "name" | "config" | "type" | "weight")
                || matches!(key, "message_property_mappings" | "message_field_role" | "message_field_content")
                || key == "field_messages"
                || fields.iter().any(|(field, _)| *field == key)
                || WITHOUT_EFFECT.contains(&key)
        };
        for (key, value) in item.as_object().into_iter().flatten() {
            if is_read(key) || is_off(value) {
                continue;
            }
            let inner = of_set(key, value.clone());
            if let Some((_, reason)) = WITHOUT_KEY.iter().find(|(names, _)| names.contains(&key.as_str())) {
                self.missing(&inner, *reason);
                continue;
            }
            match (key.as_str(), value.as_str()) {
                ("chat_template", Some("tokenizer_default")) => {
                    self.not_needed(&inner, "the model's own chat template is used");
                }
                ("chat_template", Some("jinja")) => {}
                ("chat_template", _) => {
                    self.missing(
                        &inner,
                        "its templates are not here; give this one as a file in `data.chat_template`",
                    );
                }
                _ => self.draft.unknown.push(Remark { setting: inner.shown(), reason: String::new() }),
            }
        }
        form
    }

    fn mitchells(&mut self, given: &Given) -> Result<Vec<Set>> {
        let names = as_texts(&given.value).ok_or_else(|| given.wrong("a list of sets"))?;
        let mut found = Vec::new();
        let mut parts: Vec<&str> = Vec::new();
        for name in &names {
            let Some((_, path, shape, truncation)) = MITCHELLS.iter().find(|(known, ..)| known == name)
            else {
                return Err(given
                    .conflict(format!("{name:?} is none of hh, shp, se; give the rows with --data FILE")));
            };
            found.push(Set::new((*path).to_owned(), given.shown()));
            parts.push(truncation);
            if names.len() == 1 {
                self.draft.set("data.shape", *shape, given.shown());
            }
        }
        if self.method == Method::Sft {
            self.draft.set("data.take", "chosen", "its SFT learns the chosen completions");
        }
        match parts[..] {
            [first, ..] if parts.iter().all(|part| *part == first) => {
                self.draft.set("data.truncation", first, format!("as for {} there", names.join(", ")));
            }
            _ => {
                let reason = "long rows of hh keep their end there and those of others their beginning, and `data.truncation` \
                              holds for all";
                self.missing(given, reason);
            }
        }
        Ok(found)
    }

    /// The order of rows, which the sampler of GRPO and RLOO alone takes from this setting.
    fn order(&mut self) -> Result<()> {
        let Some(given) = self.part(Part::Shuffle) else { return Ok(()) };
        if self.method == Method::Grpo && !given.flag()? {
            self.draft.set("data.order", "sequential", given.shown());
        } else {
            self.not_needed(&given, "every epoch has a new order here, as the trainer's sampler gives");
        }
        Ok(())
    }

    fn limits(&mut self, num_sets: usize, num_eval: usize) -> Result<()> {
        let default = match (self.program, self.method) {
            (Program::LlamaFactory, _) => Some(2048),
            (Program::Axolotl | Program::Mitchell, _) | (_, Method::Online) => Some(512),
            _ => None,
        };
        if let (Some(tokens), None) = (default, self.draft.get("data.max_length")) {
            self.draft.set("data.max_length", tokens, self.default_of());
        }
        if self.method == Method::Grpo && self.draft.get("online.max_new_tokens").is_none() {
            self.draft.set("online.max_new_tokens", 512, self.default_of());
        }
        let is_unlimited = self.method == Method::Grpo || self.method == Method::Distill && !self.is_gkd;
        if is_unlimited && self.program == Program::Trl && self.draft.get("data.max_length").is_none() {
            let new = self.draft.get("online.max_new_tokens").and_then(Toml::as_integer).unwrap_or(512);
            let tokens = new.saturating_add(512).max(1024);
            self.draft.set(
                "data.max_length",
                tokens,
                "TRL has no limit; rows with longer prompts are dropped here",
            );
        }
        if self.program == Program::Mitchell && self.draft.get("data.max_prompt_length").is_none() {
            let remark = format!("{}; longer prompts are dropped here, cut there", self.default_of());
            self.draft.set("data.max_prompt_length", 256, remark);
        }
        if let Some(given) = self.part(Part::MaxRows).filter(|given| !is_off(&given.value)) {
            let rows = given.count()? as i64;
            if num_sets > 1 || num_eval > 1 {
                let reason = "it limits each set there, and `data.train_rows` and `data.eval_rows` all of them together: give \
                              lists of tables with `path` and `weight`";
                self.missing(&given, reason);
            }
            if num_sets == 1 {
                self.draft.set("data.train_rows", rows, format!("{}, of each set there", given.shown()));
            }
            if num_eval == 1 {
                self.draft.set("data.eval_rows", rows, format!("{}, of each set there", given.shown()));
            }
        }
        Ok(())
    }

    /// Tokens that enter the loss of SFT.
    fn loss_mask(&mut self) -> Result<()> {
        let on_prompt = self.part(Part::TrainOnPrompt);
        let (completion, assistant) = (self.part(Part::CompletionOnly), self.part(Part::AssistantOnly));
        if let Some(given) = on_prompt {
            if given.flag()? {
                self.draft.set("data.loss_on", "all", given.shown());
            } else {
                self.not_needed(&given, "`data.loss_on` is \"answer\" unless given");
            }
            return Ok(());
        }
        if self.program != Program::Trl {
            return Ok(());
        }
        let flag = |given: &Option<Given>| given.as_ref().map(Given::flag).transpose();
        let (is_completion, is_assistant) = (flag(&completion)?, flag(&assistant)?);
        let columns = self.train_files().first().and_then(|file| self.facts.columns(file));
        let has =
            |name: &str| columns.as_ref().is_some_and(|columns| columns.iter().any(|column| column == name));
        let has_completion = has("prompt") && has("completion");
        match (is_completion, is_assistant) {
            (Some(false), _) if has_completion || columns.is_none() => {
                let given = completion.expect("it has a value");
                self.draft.set("data.loss_on", "all", given.shown());
            }
            (Some(true), _) | (_, Some(true)) => {
                for given in [completion, assistant].into_iter().flatten() {
                    self.not_needed(&given, "`data.loss_on` is \"answer\" unless given");
                }
            }
            _ if has_completion => {}
            _ if columns.is_some() => {
                self.draft.set(
                    "data.loss_on",
                    "all",
                    "TRL trains on every token of such rows (assistant_only_loss is off)",
                );
            }
            _ => {
                let setting = "assistant_only_loss is off".to_owned();
                let reason = "if the rows are `messages` or `text`, TRL trains on every token: set `data.loss_on = \"all\"`";
                self.draft.missing.push(Remark { setting, reason: reason.to_owned() });
            }
        }
        Ok(())
    }
}

/// `owner/name`, as the hub has it.
fn is_hub_name(text: &str) -> bool {
    let mut parts = text.split('/');
    let is_part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    matches!((parts.next(), parts.next(), parts.next()), (Some(owner), Some(name), None) if is_part(owner) && is_part(name))
}
