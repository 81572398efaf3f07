//! Columns of rows: their names in the files, and the check that none of the prompt is left out.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::DataError;
use crate::place::Place;
use crate::source::shapes::NamedShape;

/// Reading of a row's columns, besides the use of the rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Columns {
    /// Shape of the rows. `None`: it is recognised from the columns.
    #[serde(default)]
    pub shape: Option<NamedShape>,
    /// Columns of the files by the key that they are read as.
    #[serde(default)]
    pub names: BTreeMap<String, String>,
    /// Columns that are left out on purpose.
    #[serde(default)]
    pub ignored: Vec<String>,
    /// Whether supervised rows are the chosen sides of preferences.
    #[serde(default)]
    pub take_chosen: bool,
}

/// Keys that a column can be read as.
pub const KEYS: [&str; 26] = [
    "prompt",
    "chosen",
    "rejected",
    "completion",
    "messages",
    "conversations",
    "text",
    "margin",
    "tools",
    "chat_template_kwargs",
    "system",
    "question",
    "response",
    "instruction",
    "input",
    "output",
    "completions",
    "history",
    "human_ref_A",
    "human_ref_B",
    "labels",
    "score_A",
    "score_B",
    "answers",
    "label",
    "images",
];

/// Keys whose values are numbers, for formats that have only text.
const NUMBERS: [&str; 4] = ["margin", "labels", "score_A", "score_B"];

/// Columns that usually hold a part of the prompt.
const PROMPT_LIKE: [&str; 24] = [
    "prompt",
    "question",
    "instruction",
    "instructions",
    "input",
    "inputs",
    "query",
    "problem",
    "system",
    "system_prompt",
    "system_message",
    "context",
    "history",
    "messages",
    "conversation",
    "conversations",
    "prompt_text",
    "user_prompt",
    "user_input",
    "user_query",
    "document",
    "passage",
    "article",
    "dialogue",
];

/// Columns of inputs other than text.
const MEDIA: [&str; 8] =
    ["image", "images", "video", "videos", "audio", "audios", "pixel_values", "image_url"];

impl Columns {
    /// Returns whether `column` holds numbers where cells are text.
    pub(crate) fn is_number(&self, column: &str) -> bool {
        NUMBERS.iter().any(|key| self.names.get(*key).map_or(*key, String::as_str) == column)
    }

    /// Removes ignored columns and gives mapped ones the keys that they are read as.
    pub(crate) fn rename(&self, row: &mut Map<String, Value>, place: &Place) -> Result<(), DataError> {
        row.retain(|column, _| !self.ignored.contains(column));
        let mut renamed = Vec::new();
        for (key, column) in &self.names {
            let Some(value) = row.get(column) else {
                let found: Vec<_> = row.keys().map(|k| format!("`{k}`")).collect();
                return Err(DataError::MappedColumn {
                    place: place.clone(),
                    key: key.clone(),
                    column: column.clone(),
                    found: found.join(", "),
                });
            };
            renamed.push((key, value.clone()));
        }
        row.retain(|column, _| !self.names.values().any(|mapped| mapped == column));
        for (key, value) in renamed {
            // The file's own column of that name would be lost.
            if row.insert(key.clone(), value).is_some_and(|old| !is_nothing(&old)) {
                return Err(DataError::UnusedColumn {
                    place: place.clone(),
                    column: key.clone(),
                    why: "data.columns reads another column under its name".into(),
                    remedy: format!("add data.ignore_columns = [\"{key}\"] to leave it out"),
                });
            }
        }
        Ok(())
    }
}

/// Refuses columns that look like a part of the prompt and hold text that is not in `used`, the
/// texts that are tokenised.
pub(crate) fn check_unused(
    row: &Map<String, Value>,
    used: &[&str],
    only_media: bool,
    place: &Place,
) -> Result<(), DataError> {
    for (column, value) in row {
        let name = column.to_ascii_lowercase();
        let is_media = MEDIA.contains(&name.as_str());
        if is_nothing(value) || !(is_media || !only_media && PROMPT_LIKE.contains(&name.as_str())) {
            continue;
        }
        if is_media {
            return Err(DataError::UnusedColumn {
                place: place.clone(),
                column: column.clone(),
                why: "only text is trained on".into(),
                remedy: format!(
                    "remove such rows, or train on their text alone with data.ignore_columns = [\"{column}\"]"
                ),
            });
        }
        let mut texts = Vec::new();
        if collect_texts(value, &mut texts)
            && texts.iter().all(|text| used.iter().any(|used| used.contains(text.trim())))
        {
            continue;
        }
        let key = match name.as_str() {
            "system" | "system_prompt" | "system_message" => {
                format!(
                    "rows of `conversations` and of data.shape = \"orca\" (`system`, `question` and the completions) read it \
                     with data.columns = {{ system = \"{column}\", … }}"
                )
            }
            "messages" | "conversation" | "conversations" => {
                format!("map it with data.columns = {{ prompt = \"{column}\" }}")
            }
            "prompt" => "write it as messages where the others are, or map the columns with data.columns = { prompt = \
                         \"prompt\", completion = … }"
                .into(),
            "history" => "no key reads earlier turns: write the rows as `messages`".into(),
            "input" | "inputs" | "context" if row.contains_key("instruction") => {
                format!(
                    "map it with data.shape = \"alpaca\" and data.columns = {{ input = \"{column}\", … }}"
                )
            }
            _ => format!("map it with data.columns = {{ prompt = \"{column}\" }}"),
        };
        return Err(DataError::UnusedColumn {
            place: place.clone(),
            column: column.clone(),
            why: "it looks like a part of the prompt".into(),
            remedy: format!("{key}, or leave it out with data.ignore_columns = [\"{column}\"]"),
        });
    }
    Ok(())
}

/// Returns whether a value is absent: null, an empty text or an empty list.
pub(crate) fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.trim().is_empty(),
        Value::Array(items) => items.iter().all(is_nothing),
        _ => false,
    }
}

/// Collects the texts of a string or of messages; returns whether the value consists of them.
fn collect_texts<'a>(value: &'a Value, texts: &mut Vec<&'a str>) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => {
            texts.push(text);
            true
        }
        Value::Array(items) => items.iter().all(|item| collect_texts(item, texts)),
        Value::Object(message) => match ["content", "value", "text"].iter().find_map(|k| message.get(*k)) {
            Some(content) => collect_texts(content, texts),
            None => false,
        },
        Value::Bool(_) | Value::Number(_) => false,
    }
}
