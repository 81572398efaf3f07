//! Rows: files, splits of the hub, shapes and limits.

use std::path::Path;

use serde_json::Value;
use toml::Value as Toml;

use super::{Given, Translator, beside};
use crate::config::Method;
use crate::config::draft::Remark;
use crate::config::error::{Place, Result};
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

impl Translator<'_> {
    pub(super) fn data(&mut self) -> Result<()> {
        let sources = self.train_sources()?;
        match &sources[..] {
            [] => {
                return Err(
                    self.lacking("data.train", "`--data` with a file of rows or \"hf://owner/name/split\"")
                );
            }
            [(only, comment)] => self.draft.set("data.train", only.clone(), comment.clone()),
            many => {
                let paths: Vec<String> = many.iter().map(|(path, _)| path.clone()).collect();
                self.draft.set("data.train", paths, many[0].1.clone());
            }
        }
        self.eval_sources()?;
        self.limits()?;
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
        if let Some(given) = self.part(Part::Packing).filter(|given| !is_off(&given.value)) {
            self.packed = self
                .draft
                .get("data.max_length")
                .and_then(Toml::as_integer)
                .map_or(Some(1024), |n| Some(n as u64));
            self.missing(
                &given,
                "a batch there counts packed sequences, and `train.batch_size` counts rows, which is fewer tokens",
            );
        }
        Ok(())
    }

    /// Names of the training rows, as the configuration has them.
    pub(super) fn train_files(&self) -> Vec<String> {
        match self.draft.get("data.train") {
            Some(Toml::String(path)) => vec![path.clone()],
            Some(Toml::Array(paths)) => paths.iter().filter_map(Toml::as_str).map(str::to_owned).collect(),
            _ => Vec::new(),
        }
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

    fn train_sources(&mut self) -> Result<Vec<(String, String)>> {
        let (dataset, datasets) = (self.part(Part::Dataset), self.part(Part::Datasets));
        let (config, split) = (self.part(Part::DatasetConfig), self.part(Part::TrainSplit));
        let folder = self.part(Part::DatasetFolder);
        let config = config.as_ref().map(|given| given.text().map(str::to_owned)).transpose()?;
        if !self.answers.train.is_empty() {
            return Ok(self
                .answers
                .train
                .iter()
                .map(|path| (self.row_name(path), "--data".to_owned()))
                .collect());
        }
        if let Some(given) = datasets {
            return self.listed(&given);
        }
        let Some(given) = dataset else { return Ok(Vec::new()) };
        let split = split.as_ref().map_or(Ok("train"), Given::text)?.to_owned();
        if self.program == Program::LlamaFactory {
            return self.by_dataset_info(&given, folder.as_ref(), false);
        }
        let names = as_texts(&given.value).ok_or_else(|| given.wrong("the name of a set, or a file"))?;
        names
            .iter()
            .map(|name| Ok((self.named(&given, name, config.as_deref(), &split)?, given.setting.clone())))
            .collect()
    }

    fn eval_sources(&mut self) -> Result<()> {
        let (given, share) = (self.part(Part::EvalDataset), self.part(Part::EvalShare));
        let test = self.part(Part::TestSplit);
        if !self.answers.eval.is_empty() {
            let paths: Vec<String> = self.answers.eval.iter().map(|path| self.row_name(path)).collect();
            let value = if paths.len() == 1 { Toml::from(paths[0].clone()) } else { paths.into() };
            self.draft.set("data.eval", value, "--eval-data");
            return Ok(());
        }
        if let Some(share) = share.filter(|given| !is_off(&given.value)) {
            self.missing(&share, "rows are not split here; give held-out rows in `data.eval`");
        }
        let evaluates = self.parts.get(&Part::EvalStrategy).is_some_and(|given| !is_off(&given.value));
        let found = match (given, test) {
            (Some(given), _) if given.value.is_array() => self.listed(&given)?,
            (Some(given), _) if self.program == Program::LlamaFactory => {
                self.by_dataset_info(&given, None, true)?
            }
            (Some(given), _) => {
                let text = given.text()?.to_owned();
                vec![(self.named(&given, &text, None, "test")?, given.setting.clone())]
            }
            // TRL's scripts take the test split of the same set if they evaluate.
            (None, test) if evaluates && self.program == Program::Trl => {
                let split = test.as_ref().map_or(Ok("test"), Given::text)?.to_owned();
                self.other_split(&split).into_iter().collect()
            }
            (None, Some(test)) => {
                self.not_needed(&test, "eval_strategy is \"no\", so nothing is evaluated");
                Vec::new()
            }
            _ => Vec::new(),
        };
        match &found[..] {
            [] => {}
            [(only, comment)] => self.draft.set("data.eval", only.clone(), comment.clone()),
            many => {
                let paths: Vec<String> = many.iter().map(|(path, _)| path.clone()).collect();
                self.draft.set("data.eval", paths, many[0].1.clone());
            }
        }
        Ok(())
    }

    /// Another split of the training set, if that is a split of the hub.
    fn other_split(&self, split: &str) -> Option<(String, String)> {
        let files = self.train_files();
        let (set, _) = files.first().filter(|file| file.starts_with("hf://"))?.rsplit_once('/')?;
        Some((format!("{set}/{split}"), "dataset_test_split".to_owned()))
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

    fn is_file(&self, name: &str) -> bool {
        let is_data =
            Path::new(name).extension().and_then(|end| end.to_str()).is_some_and(|end| ENDS.contains(&end));
        is_data || self.facts.exists(name) || name.contains('*')
    }

    fn row_name(&self, name: &str) -> String {
        if name.starts_with("hf://") { name.to_owned() } else { self.facts.local(name) }
    }

    /// A list of sets: tables of TRL and Axolotl, or names of Mitchell's code.
    fn listed(&mut self, given: &Given) -> Result<Vec<(String, String)>> {
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
            let split = text("split").unwrap_or("train").to_owned();
            match item.get("data_files").and_then(as_texts) {
                Some(files) => {
                    for file in files {
                        found.push((self.row_name(&file), format!("{}: data_files", given.setting)));
                    }
                }
                None => {
                    let config =
                        text("name").or_else(|| text("config")).filter(|config| *config != "default");
                    let name = self.named(given, path, config, &split)?;
                    found.push((name, given.setting.clone()));
                }
            }
            self.shape_of(given, item);
        }
        Ok(found)
    }

    /// Shape and columns of a set of Axolotl.
    fn shape_of(&mut self, given: &Given, item: &Value) {
        let text = |key: &str| item.get(key).and_then(Value::as_str);
        let mut columns = toml::Table::new();
        let kind = item.get("type");
        let name = kind.and_then(Value::as_str).unwrap_or_default();
        let is_pair = self.method == Method::Dpo;
        let messages = text("field_messages");
        let maps = |key: &str| {
            item.get("message_property_mappings").and_then(|maps| maps.get(key)).and_then(Value::as_str)
        };
        let setting = format!("{}: type = {name}", given.setting);
        if name.starts_with("alpaca") {
            self.draft.set("data.shape", "alpaca", setting.clone());
        } else if name.ends_with(".intel") {
            self.draft.set("data.shape", "orca", setting.clone());
        } else if maps("role") == Some("from") || name == "sharegpt" {
            self.draft.set("data.shape", "sharegpt", setting.clone());
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
        ];
        for (field, ours) in fields {
            let inner = kind.and_then(|kind| kind.get(field)).and_then(Value::as_str);
            if let Some(column) = text(field).or(inner).filter(|column| *column != ours) {
                columns.insert(ours.into(), column.into());
            }
        }
        if let Some(field) = text("field").filter(|field| *field != "text") {
            columns.insert("text".into(), field.into());
        }
        if !columns.is_empty() {
            self.draft.set("data.columns", columns, format!("{}: fields", given.setting));
        }
        let is_ours = matches!(name, "" | "completion" | "sharegpt") || name.starts_with("chat_template");
        if !is_ours {
            let setting = format!("{}: type", given.setting);
            let kind = Given { setting, value: name.into(), ..given.clone() };
            self.missing(&kind, "Axolotl writes such rows with a text of its own, here the chat template does: compare with `tandem data`");
        }
        for (key, value) in kind.and_then(Value::as_object).into_iter().flatten() {
            if !fields.iter().any(|(field, _)| field == key) && !is_off(value) {
                let setting = format!("{}: type.{key}", given.setting);
                let inner = Given { setting, value: value.clone(), ..given.clone() };
                self.missing(&inner, "name the columns in `data.columns`; the chat template writes the text");
            }
        }
        let unused = [
            "fraction",
            "shards",
            "roles_to_train",
            "train_on_eos",
            "roles",
            "prompt_format",
            "preprocess_shards",
        ];
        for key in unused {
            if let Some(value) = item.get(key).filter(|value| !is_off(value)) {
                let inner = Given {
                    setting: format!("{}: {key}", given.setting),
                    value: value.clone(),
                    ..given.clone()
                };
                self.missing(
                    &inner,
                    "give a list of tables with `path` and `weight`; every assistant's turn is scored",
                );
            }
        }
    }

    fn mitchells(&mut self, given: &Given) -> Result<Vec<(String, String)>> {
        let names = as_texts(&given.value).ok_or_else(|| given.wrong("a list of sets"))?;
        let mut found = Vec::new();
        for name in &names {
            let Some((_, path, shape, truncation)) = MITCHELLS.iter().find(|(known, ..)| known == name)
            else {
                return Err(given
                    .conflict(format!("{name:?} is none of hh, shp, se; give the rows with --data FILE")));
            };
            found.push(((*path).to_owned(), given.shown()));
            if names.len() == 1 {
                self.draft.set("data.shape", *shape, given.shown());
                self.draft.set("data.truncation", *truncation, format!("as for {name} there"));
                if self.method == Method::Sft {
                    self.draft.set("data.take", "chosen", "its SFT learns the chosen completions");
                }
            }
        }
        Ok(found)
    }

    /// Names of LLaMA-Factory's dataset_info.json.
    fn by_dataset_info(
        &mut self,
        given: &Given,
        folder: Option<&Given>,
        is_eval: bool,
    ) -> Result<Vec<(String, String)>> {
        let names = as_texts(&given.value).ok_or_else(|| given.wrong("names of sets"))?;
        let folder = match folder {
            Some(folder) => folder.text()?.to_owned(),
            None => "data".to_owned(),
        };
        let own = match &given.place {
            Place::File { path, .. } => beside(path, &folder),
            Place::Set { .. } => folder.into(),
        };
        let file = own.join("dataset_info.json");
        let info: Option<Value> = tandem_files::read(&file, tandem_files::MAX_CONFIG)
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok());
        let mut found = Vec::new();
        for name in names {
            if self.facts.exists(&name) {
                found.push((self.row_name(&name), given.setting.clone()));
                continue;
            }
            let Some(entry) = info.as_ref().and_then(|info| info.get(&name)) else {
                let flag = if is_eval { "--eval-data" } else { "--data" };
                return Err(given.conflict(format!(
                    "{name:?} is a name of {}, which does not have it or is not here; give the rows with {flag} FILE",
                    file.display()
                )));
            };
            let text = |key: &str| entry.get(key).and_then(Value::as_str);
            let split = text("split").unwrap_or("train");
            let path = match (text("file_name"), text("hf_hub_url")) {
                (Some(file), _) => self.facts.local(&own.join(file).to_string_lossy()),
                (None, Some(set)) => match text("subset") {
                    Some(subset) => format!("hf://{set}/{subset}/{split}"),
                    None => format!("hf://{set}/{split}"),
                },
                _ => {
                    return Err(given.conflict(format!(
                        "{name:?} names no file and no set of the hub; give --data FILE"
                    )));
                }
            };
            found.push((path, format!("{name} of dataset_info.json")));
            if !is_eval {
                self.shape_of_entry(&name, entry);
            }
        }
        Ok(found)
    }

    /// Shape and columns of an entry of dataset_info.json.
    fn shape_of_entry(&mut self, name: &str, entry: &Value) {
        if self.draft.get("data.loss_on").is_some() {
            // `stage: pt` learns the texts of one column.
            let column =
                entry.get("columns").and_then(|columns| columns.get("prompt")).and_then(Value::as_str);
            let column = column.unwrap_or("instruction");
            if column != "text" {
                let mapped = toml::Table::from_iter([("text".to_owned(), column.into())]);
                self.draft.set("data.columns", mapped, format!("{name} of dataset_info.json"));
            }
            return;
        }
        let formatting = entry.get("formatting").and_then(Value::as_str).unwrap_or("alpaca");
        let shape = match formatting {
            "sharegpt" => "sharegpt",
            _ => "alpaca",
        };
        let tags = entry.get("tags").and_then(|tags| tags.get("role_tag")).and_then(Value::as_str);
        let names = match (shape, tags) {
            // Messages of role and content are our own.
            ("sharegpt", Some("role")) => [("messages", "messages"), ("system", "system")].to_vec(),
            ("sharegpt", _) => [("messages", "conversations"), ("system", "system")].to_vec(),
            _ => {
                [("prompt", "instruction"), ("query", "input"), ("response", "output"), ("system", "system")]
                    .to_vec()
            }
        };
        if !(shape == "sharegpt" && tags == Some("role")) {
            self.draft.set("data.shape", shape, format!("{name} of dataset_info.json"));
        }
        let mut columns = toml::Table::new();
        let pairs = [("chosen", "chosen"), ("rejected", "rejected")];
        for (theirs, ours) in names.into_iter().chain(pairs) {
            let column = entry.get("columns").and_then(|columns| columns.get(theirs)).and_then(Value::as_str);
            if let Some(column) = column.filter(|column| *column != ours) {
                columns.insert(ours.into(), column.into());
            }
        }
        if !columns.is_empty() {
            self.draft.set("data.columns", columns, format!("{name} of dataset_info.json"));
        }
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

    fn limits(&mut self) -> Result<()> {
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
            self.draft.set(
                "data.train_rows",
                given.count()? as i64,
                format!("{}, of each set there", given.shown()),
            );
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
