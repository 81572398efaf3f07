//! Entries of LLaMA-Factory's `dataset_info.json`.

use serde_json::Value;

use super::data::{Form, Set};
use super::sources::beside;
use super::{Given, Translator};
use crate::config::Method;
use crate::config::draft::Remark;
use crate::config::error::{Place, Result};
use crate::config::foreign::values::{as_texts, is_off};

impl Translator<'_> {
    /// Names of LLaMA-Factory's dataset_info.json.
    pub(super) fn by_dataset_info(
        &mut self,
        given: &Given,
        folder: Option<&Given>,
        is_eval: bool,
    ) -> Result<Vec<Set>> {
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
                found.push(Set::new(self.row_name(&name), given.setting.clone()));
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
            let form = self.shape_of_entry(given, &name, entry, &path);
            let comment = format!("{name} of dataset_info.json");
            found.push(Set { path, comment, weight: 1.0, form: Some(form) });
        }
        Ok(found)
    }

    /// Shape and columns of an entry of dataset_info.json; each key without a translation is named.
    fn shape_of_entry(&mut self, given: &Given, name: &str, entry: &Value, path: &str) -> Form {
        let of_entry = format!("{name} of dataset_info.json");
        let mut form = Form { comments: [of_entry.clone(), of_entry], ..Form::default() };
        let inner = |table: &str, key: &str| {
            let text = entry.get(table).and_then(|table| table.get(key)).and_then(Value::as_str);
            text.filter(|text| !text.is_empty())
        };
        let column = |key: &str| inner("columns", key);
        let tag = |key: &str| inner("tags", key);
        let formatting = entry.get("formatting").and_then(Value::as_str).unwrap_or("alpaca");
        let has_turns = matches!(formatting, "sharegpt" | "openai");
        let has_roles = has_turns && tag("role_tag") == Some("role");
        let is_pair = matches!(self.method, Method::Dpo | Method::Reward);
        let is_labelled = self.method == Method::Kto && column("kto_tag").is_some();
        let mut read = match is_labelled {
            true => vec!["messages", "prompt", "query", "response", "system"],
            false => Vec::new(),
        };
        if self.draft.get("data.loss_on").is_some() {
            // `stage: pt` learns the texts of one column.
            let column = column("prompt").unwrap_or("instruction");
            if column != "text" {
                form.columns.insert("text".to_owned(), column.into());
            }
            self.unread_keys(given, name, entry, &["prompt"]);
            return form;
        }
        let names: &[(&str, &str)] = match has_turns {
            _ if is_labelled => &[],
            // Messages of role and content are our own; those of pairs are read as ShareGPT's.
            true if has_roles && !is_pair => &[("messages", "messages"), ("system", "system")],
            true => &[("messages", "conversations"), ("system", "system")],
            false => {
                &[("prompt", "instruction"), ("query", "input"), ("response", "output"), ("system", "system")]
            }
        };
        form.shape = match names {
            [] | [("messages", "messages"), ..] => None,
            [("messages", _), ..] => Some("sharegpt"),
            _ => Some("alpaca"),
        };
        let others = [("chosen", "chosen"), ("rejected", "rejected"), ("tools", "tools")];
        let label = [("kto_tag", "label")].into_iter().filter(|_| is_labelled);
        for (theirs, ours) in names.iter().copied().chain(others).chain(label) {
            read.push(theirs);
            if let Some(column) = column(theirs).filter(|column| *column != ours) {
                form.columns.insert(ours.to_owned(), column.into());
            }
        }
        self.unnamed_columns(&mut form, entry, names, path);
        if names.is_empty() {
            let setting = format!("{name} of dataset_info.json: kto_tag");
            let reason = "labelled rows are `prompt`, `completion` and `label` here: write them so, of turns the last as the \
                          `completion` (docs/data.md)";
            self.draft.missing.push(Remark { setting, reason: reason.to_owned() });
        }
        self.unread_keys(given, name, entry, &read);
        form
    }

    /// Columns that a shape reads and LLaMA-Factory does not, as the entry does not name them.
    fn unnamed_columns(&self, form: &mut Form, entry: &Value, names: &[(&str, &str)], path: &str) {
        let columns = entry.get("columns");
        let found = self.facts.columns(path).unwrap_or_default();
        for (theirs, ours) in names.iter().filter(|(theirs, _)| matches!(*theirs, "query" | "system")) {
            let named = columns.and_then(|columns| columns.get(*theirs)).and_then(Value::as_str);
            let is_default = *theirs == "query" && columns.is_none();
            let is_named = is_default || named.is_some_and(|column| !column.is_empty());
            let is_other = form.columns.values().any(|column| column.as_str() == Some(ours));
            if !is_named && !is_other && found.iter().any(|column| column == ours) {
                form.ignored.push((*ours).to_owned());
            }
        }
    }

    /// Names the keys of an entry of dataset_info.json that have no translation.
    fn unread_keys(&mut self, given: &Given, name: &str, entry: &Value, read: &[&str]) {
        let mut say = |key: &str, value: &Value, reason: &str| {
            let setting = format!("{name} of dataset_info.json: {key}");
            self.missing(&Given { setting, value: value.clone(), ..given.clone() }, reason);
        };
        for (key, value) in entry.as_object().into_iter().flatten().filter(|(_, value)| !is_off(value)) {
            let reason = match (key.as_str(), value.as_str()) {
                ("file_name" | "hf_hub_url" | "subset" | "split" | "ranking" | "columns" | "tags", _)
                | ("ms_hub_url" | "om_hub_url" | "script_url" | "cloud_file_name", _)
                | ("formatting", Some("alpaca" | "sharegpt" | "openai")) => continue,
                ("formatting", _) => "shapes are those of `data.shape`",
                ("num_samples", _) => {
                    "so many rows are drawn there; give a list of tables with `path` and `weight`"
                }
                ("folder", _) => "give the files of that folder with --data FILE",
                _ => "the rows' own keys say what they are (docs/data.md)",
            };
            say(key, value, reason);
        }
        let members = |key: &str| entry.get(key).and_then(Value::as_object).into_iter().flatten();
        for (key, value) in members("columns").filter(|(_, value)| !is_off(value)) {
            let reason = match key.as_str() {
                _ if read.contains(&key.as_str()) => continue,
                "history" => {
                    "earlier turns are not read from a column of their own: write the rows as `messages`"
                }
                "images" | "videos" | "audios" => "rows with images, audio or video are refused",
                "kto_tag" => "labelled rows are for method = \"kto\"",
                _ => "the rows' own keys say what they are (docs/data.md)",
            };
            say(&format!("columns.{key}"), value, reason);
        }
        let has_roles =
            entry.get("tags").and_then(|tags| tags.get("role_tag")).is_some_and(|tag| tag == "role");
        for (key, value) in members("tags").filter(|(_, value)| !is_off(value)) {
            let known: &[&str] = match (key.as_str(), has_roles) {
                ("role_tag", _) => &["from", "role"],
                ("content_tag", true) => &["content"],
                ("content_tag", false) => &["value"],
                ("user_tag", true) => &["user"],
                ("user_tag", false) => &["human", "user"],
                ("assistant_tag", true) => &["assistant"],
                ("assistant_tag", false) => &["gpt", "assistant"],
                ("observation_tag", true) => &["tool"],
                ("observation_tag", false) => &["observation", "tool"],
                ("system_tag", _) => &["system"],
                _ => &[],
            };
            if !value.as_str().is_some_and(|tag| known.contains(&tag)) {
                let reason = "turns have `role` and `content`, or `from` and `value`, with their usual names: change them in \
                              the rows";
                say(&format!("tags.{key}"), value, reason);
            }
        }
    }
}
