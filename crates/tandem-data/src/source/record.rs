//! Parsed rows: text, prompt and completion, messages, or a preference.

use std::fmt;

use serde_json::{Map, Value};

use crate::error::DataError;
use crate::place::Place;
use crate::report::Reason;
use crate::source::arrow_rows::ARROW_TYPE;
use crate::source::columns::{self, Columns};
use crate::source::shapes;

/// A message: `role`, `content`, and further fields of the chat template.
pub type Message = Map<String, Value>;

/// Use of the rows. It selects the keys that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowKind {
    /// `chosen` and `rejected`, with or without `prompt`.
    Preference,
    /// As `Preference`, with an optional number `margin`: pairs for reward models, never truncated.
    Reward,
    /// `prompt` and `completion`, `messages`, or `text`.
    Supervised,
    /// `prompt` alone, for generation; judges may read the rest of the row.
    Prompt,
    /// `prompt`, `completion` and `label`: whether the completion is desirable. A pair, as for
    /// `Preference`, is two such rows. For KTO.
    Unpaired,
}

/// Plain text or a conversation.
#[derive(Clone, Debug, PartialEq)]
pub enum Text {
    /// A string.
    Plain(String),
    /// Messages, at least one.
    Chat(Vec<Message>),
}

/// The part of a row that is tokenised.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// `text`; every token is in the loss.
    Text(String),
    /// `messages`.
    Messages(Vec<Message>),
    /// `prompt` and `completion`, both plain or both conversations.
    Completion {
        /// The prompt.
        prompt: Text,
        /// The completion, which is in the loss.
        completion: Text,
    },
    /// `prompt`.
    Prompt(Text),
    /// `prompt`, `chosen`, `rejected`, all plain or all conversations; an implicit prompt is
    /// extracted.
    Preference {
        /// The common prompt.
        prompt: Text,
        /// The better response.
        chosen: Text,
        /// The worse response.
        rejected: Text,
    },
}

/// A parsed row.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// The part that is tokenised.
    pub content: Content,
    /// The shape of the row.
    pub shape: Shape,
    /// `margin`: lead that the chosen reward should have; 0 by default and for other kinds.
    pub margin: f32,
    /// `label`: whether the completion is desirable; true for other kinds.
    pub label: bool,
    /// The whole row, for [`RowKind::Prompt`].
    pub row: Option<Map<String, Value>>,
    /// `tools` for the chat template; a JSON string is parsed.
    pub tools: Option<Value>,
    /// `chat_template_kwargs`: variables for the chat template.
    pub template_kwargs: Map<String, Value>,
    /// Whether a text prompt beside conversations that contain it was ignored.
    pub prompt_ignored: bool,
    /// Key and value of the first role that [`ROLES`] lacks; the chat template may know it.
    pub unknown_role: Option<(String, String)>,
}

/// Roles that chat templates know, whether they name them or print each role as it is.
pub const ROLES: [&str; 9] =
    ["system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation"];

/// Keys and text form of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    keys: &'static str,
    chat: bool,
}

impl Shape {
    /// Returns whether a row has a chosen and a rejected completion.
    pub(crate) fn is_pair(self) -> bool {
        self.keys.contains("chosen")
    }

    /// Returns whether the row's texts are conversations.
    pub(crate) fn is_chat(self) -> bool {
        self.chat
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.keys, if self.chat { "conversations" } else { "plain text" })
    }
}

/// Keys that hold texts of a row.
pub(crate) const KNOWN_KEYS: [&str; 7] =
    ["prompt", "chosen", "rejected", "completion", "messages", "conversations", "text"];
const PREFERENCE_KEYS: &str =
    "`chosen` and `rejected` (with `prompt`, or with the prompt as their common beginning)";
const UNPAIRED_KEYS: &str = "`prompt`, `completion` and `label`, or `chosen` and `rejected`";
const SUPERVISED_KEYS: &str = "`text`, `messages`, or `prompt` and `completion`";

/// Records made from one row of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed {
    /// The records; some shapes make several from a row.
    pub records: Vec<Record>,
    /// The reason why there are none.
    pub dropped: Option<Reason>,
    /// Columns of the row, if any are ignored.
    pub columns: Vec<String>,
}

impl Record {
    /// Parses the JSON of one row with the trainer's own keys; errors name `place`.
    ///
    /// # Panics
    /// If the row is of a shape that makes several records or none, such as StackExchange's.
    pub fn parse(json: &[u8], kind: RowKind, place: &Place) -> Result<Self, DataError> {
        let mut parsed = Self::parse_row(json, kind, &Columns::default(), place)?;
        Ok(parsed.records.pop().expect("one row, one record"))
    }

    /// Parses the JSON of one row; errors name `place`.
    pub fn parse_row(
        json: &[u8],
        kind: RowKind,
        columns: &Columns,
        place: &Place,
    ) -> Result<Parsed, DataError> {
        // Without the end of its line, so that what is missing is told as of this line.
        let value: Value = serde_json::from_slice(json.trim_ascii_end()).map_err(|e| DataError::Json {
            place: place.clone(),
            // The parser sees one row only: its line number would mislead, its column does not.
            reason: match e.line() {
                _ if e.is_eof() => format!("{e}; a row is one whole line, or an element of one array")
                    .replace("line 1 column", "column"),
                1 => e.to_string().replace("line 1 column", "column"),
                _ => e.to_string(),
            },
        })?;
        let Value::Object(mut row) = value else {
            return Err(type_error(place, "row", "a JSON object", &value));
        };
        let names = if columns.ignored.is_empty() { Vec::new() } else { row.keys().cloned().collect() };
        columns.rename(&mut row, place)?;
        if kind == RowKind::Prompt {
            return Ok(Parsed {
                records: vec![Row { row, place, columns, unknown_role: None }.read(kind)?],
                dropped: None,
                columns: names,
            });
        }
        let takes_chosen = kind == RowKind::Supervised && columns.take_chosen;
        let kind = if takes_chosen { RowKind::Preference } else { kind };
        let pairs = kind != RowKind::Supervised;
        let rows = match shapes::convert(row, columns.shape, pairs, takes_chosen, place)? {
            Ok(rows) => rows,
            Err(reason) => return Ok(Parsed { records: Vec::new(), dropped: Some(reason), columns: names }),
        };
        let mut records = Vec::with_capacity(rows.len());
        for row in rows {
            let row = Row { row, place, columns, unknown_role: None };
            if kind == RowKind::Unpaired && row.is_pair() {
                records.extend(row.read(RowKind::Preference)?.into_labelled());
                continue;
            }
            let record = row.read(kind)?;
            records.push(if takes_chosen { record.into_chosen() } else { record });
        }
        Ok(Parsed { records, dropped: None, columns: names })
    }

    /// Makes a demonstration of a preference's chosen side.
    fn into_chosen(mut self) -> Self {
        if let Content::Preference { prompt, chosen, .. } = self.content {
            self.content = Content::Completion { prompt, completion: chosen };
        }
        self
    }

    /// Makes two labelled completions of a preference, the desirable one first.
    fn into_labelled(self) -> [Self; 2] {
        let Content::Preference { prompt, chosen, rejected } = &self.content else {
            unreachable!("a preference was read")
        };
        [(chosen, true), (rejected, false)].map(|(completion, label)| Self {
            content: Content::Completion { prompt: prompt.clone(), completion: completion.clone() },
            label,
            ..self.clone()
        })
    }

    /// Returns whether the row has a prompt without text.
    pub(crate) fn has_empty_prompt(&self) -> bool {
        match &self.content {
            Content::Completion { prompt, .. } | Content::Preference { prompt, .. } => {
                prompt.texts().iter().all(|text| text.is_empty())
            }
            Content::Text(_) | Content::Messages(_) | Content::Prompt(_) => false,
        }
    }
}

struct Row<'a> {
    row: Map<String, Value>,
    place: &'a Place,
    columns: &'a Columns,
    unknown_role: Option<(String, String)>,
}

impl Row<'_> {
    /// Returns whether a row of labelled completions is a pair instead.
    fn is_pair(&self) -> bool {
        self.has("chosen") && self.has("rejected") && !self.has("completion")
    }

    fn read(mut self, kind: RowKind) -> Result<Record, DataError> {
        let row = (kind == RowKind::Prompt).then(|| self.row.clone());
        let tools = self.tools()?;
        let template_kwargs = match self.row.remove("chat_template_kwargs") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(kwargs)) => kwargs,
            Some(other) => return Err(type_error(self.place, "chat_template_kwargs", "an object", &other)),
        };
        let margin = match self.row.remove("margin").filter(|_| kind == RowKind::Reward) {
            None | Some(Value::Null) => 0.0,
            Some(value) => match value.as_f64() {
                Some(margin) if (margin as f32).is_finite() => margin as f32,
                Some(_) => return Err(type_error(self.place, "margin", "a number that f32 holds", &value)),
                None => return Err(type_error(self.place, "margin", "a number", &value)),
            },
        };
        let label = if kind == RowKind::Unpaired { self.label()? } else { true };
        let mut prompt_ignored = false;
        let (content, keys) = match kind {
            RowKind::Preference | RowKind::Reward if self.has("chosen") && self.has("rejected") => {
                self.preference(&mut prompt_ignored)?
            }
            RowKind::Supervised | RowKind::Unpaired if self.has("completion") && self.has("prompt") => {
                if kind == RowKind::Supervised {
                    self.check_unlabelled("`prompt`, `completion`")?;
                }
                let (prompt, completion) = (self.text("prompt")?, self.text("completion")?);
                self.same_kind("completion", &prompt, &completion)?;
                (Content::Completion { prompt, completion }, "prompt, completion")
            }
            RowKind::Supervised if self.has("messages") => {
                self.check_unlabelled("`messages`")?;
                (Content::Messages(self.messages("messages")?), "messages")
            }
            RowKind::Supervised if self.has("conversations") => {
                (Content::Messages(self.messages("conversations")?), "messages")
            }
            RowKind::Supervised if self.has("text") => match self.text("text")? {
                Text::Plain(text) => (Content::Text(text), "text"),
                Text::Chat(messages) => (Content::Messages(messages), "messages"),
            },
            RowKind::Prompt if self.has("prompt") => (Content::Prompt(self.text("prompt")?), "prompt"),
            _ => return Err(self.missing(kind)),
        };
        let chat = match &content {
            Content::Text(_) => false,
            Content::Messages(_) => true,
            Content::Prompt(prompt)
            | Content::Completion { prompt, .. }
            | Content::Preference { prompt, .. } => {
                matches!(prompt, Text::Chat(_))
            }
        };
        if kind != RowKind::Prompt {
            self.check_mapped()?;
        }
        columns::check_unused(&self.row, &content.texts(), kind == RowKind::Prompt, self.place)?;
        let shape = Shape { keys, chat };
        let unknown_role = self.unknown_role;
        Ok(Record {
            content,
            shape,
            margin,
            label,
            row,
            tools,
            template_kwargs,
            prompt_ignored,
            unknown_role,
        })
    }

    /// Takes `tools`: a list of objects, of which each or all may be a text of JSON.
    fn tools(&mut self) -> Result<Option<Value>, DataError> {
        let decoded = |value: Value| match value {
            Value::String(json) => serde_json::from_str(&json).map_err(|e| DataError::Json {
                place: self.place.clone(),
                reason: format!("inside `tools`: {e}"),
            }),
            other => Ok(other),
        };
        let tools = match self.row.remove("tools").map(decoded).transpose()? {
            None | Some(Value::Null) => return Ok(None),
            Some(Value::Array(tools)) => tools,
            Some(other) => return Err(type_error(self.place, "tools", "a list of objects", &other)),
        };
        let tools = tools.into_iter().map(decoded).collect::<Result<Vec<_>, _>>()?;
        match tools.iter().position(|tool| !tool.is_object()) {
            Some(i) => Err(type_error(self.place, &format!("tools[{i}]"), "an object", &tools[i])),
            None => Ok(Some(tools.into())),
        }
    }

    fn preference(&mut self, prompt_ignored: &mut bool) -> Result<(Content, &'static str), DataError> {
        let (chosen, rejected) = (self.text("chosen")?, self.text("rejected")?);
        self.same_kind("rejected", &chosen, &rejected)?;
        if self.has("prompt") {
            let prompt = self.text("prompt")?;
            if let (Text::Plain(text), Text::Chat(_)) = (&prompt, &chosen) {
                // Like other columns that are not used, it must be in those that are.
                self.row.insert("prompt".into(), text.as_str().into());
                *prompt_ignored = true;
            } else {
                self.same_kind("chosen", &prompt, &chosen)?;
                return Ok((Content::Preference { prompt, chosen, rejected }, "prompt, chosen, rejected"));
            }
        }
        let (prompt, chosen, rejected) = match (chosen, rejected) {
            (Text::Plain(chosen), Text::Plain(rejected)) => {
                let at = common_text(&chosen, &rejected);
                let [a, b] = [chosen.split_at(at.0), rejected.split_at(at.1)];
                (Text::Plain(a.0.into()), Text::Plain(a.1.into()), Text::Plain(b.1.into()))
            }
            (Text::Chat(mut chosen), Text::Chat(mut rejected)) => {
                let at = common_messages(&chosen, &rejected);
                if at == 0 {
                    let hint = match *prompt_ignored {
                        true => {
                            "`prompt` is a text: make it a list of messages, as `chosen` and `rejected` are"
                        }
                        false => "add a `prompt` key, or begin both with the same messages",
                    };
                    return Err(DataError::Keys {
                        place: self.place.clone(),
                        expected: "of a prompt",
                        found: "`chosen` and `rejected` that have no message in common".into(),
                        hint: Some(hint.into()),
                    });
                }
                let answer = chosen.split_off(at);
                (Text::Chat(chosen), Text::Chat(answer), Text::Chat(rejected.split_off(at)))
            }
            _ => unreachable!("both were checked to have one form"),
        };
        Ok((Content::Preference { prompt, chosen, rejected }, "chosen, rejected"))
    }

    /// Refuses a column that `data.columns` maps to a key which nothing reads.
    fn check_mapped(&self) -> Result<(), DataError> {
        let is_left = |key: &&String| self.row.get(*key).is_some_and(|value| !columns::is_nothing(value));
        match self.columns.names.keys().find(is_left) {
            None => Ok(()),
            Some(key) => Err(DataError::UnusedColumn {
                place: self.place.clone(),
                column: self.columns.names[key].clone(),
                why: format!("data.columns maps it to `{key}`, which such rows are not read by"),
                remedy: format!("remove `{key}` from data.columns, or map another key"),
            }),
        }
    }

    /// Takes `label`: a boolean, 0 or 1, or such a text of a table.
    fn label(&mut self) -> Result<bool, DataError> {
        let Some(found) = self.row.remove("label") else { return Err(self.missing(RowKind::Unpaired)) };
        let label = match &found {
            Value::Null => {
                self.row.insert("label".into(), Value::Null);
                return Err(self.missing(RowKind::Unpaired));
            }
            Value::Bool(label) => Some(*label),
            Value::Number(number) => match number.as_f64() {
                Some(0.0) => Some(false),
                Some(1.0) => Some(true),
                _ => None,
            },
            Value::String(text) => match text.to_ascii_lowercase().as_str() {
                "false" | "0" => Some(false),
                "true" | "1" => Some(true),
                _ => None,
            },
            _ => None,
        };
        label.ok_or_else(|| type_error(self.place, "label", "true or false", &found))
    }

    /// Refuses rows that say whether a completion, which stands under `keys`, is good or bad.
    fn check_unlabelled(&self, keys: &'static str) -> Result<(), DataError> {
        // A number beside messages may be the label of a classification.
        let is_pair = self.has("completion");
        let label = ["label", "kto_tag"].into_iter().find(|key| self.has(key)).unwrap_or("label");
        let is_label = match self.row.get(label) {
            Some(Value::Bool(_)) => true,
            Some(_) if !is_pair => false,
            Some(Value::Number(label)) => label.as_f64().is_some_and(|x| x == 0.0 || x == 1.0),
            Some(Value::String(label)) => {
                matches!(label.to_ascii_lowercase().as_str(), "true" | "false" | "0" | "1")
            }
            _ => false,
        };
        if is_label { Err(DataError::Labelled { place: self.place.clone(), keys, label }) } else { Ok(()) }
    }

    /// Returns whether a key is present and not null; tables converted from columns have nulls for
    /// absent keys.
    fn has(&self, key: &str) -> bool {
        self.row.get(key).is_some_and(|v| !v.is_null())
    }

    fn text(&mut self, key: &str) -> Result<Text, DataError> {
        match self.row.get(key) {
            Some(Value::String(_)) => match self.row.remove(key) {
                Some(Value::String(text)) => Ok(Text::Plain(text)),
                _ => unreachable!("just seen"),
            },
            Some(Value::Array(_)) => self.messages(key).map(Text::Chat),
            other => Err(type_error(
                self.place,
                key,
                "a string or a list of messages",
                other.unwrap_or(&Value::Null),
            )),
        }
    }

    fn messages(&mut self, key: &str) -> Result<Vec<Message>, DataError> {
        const EXPECTED: &str = "a non-empty list of messages { role, content }";
        let value = self.row.remove(key).unwrap_or_default();
        let Value::Array(items) = value else { return Err(type_error(self.place, key, EXPECTED, &value)) };
        if items.is_empty() {
            return Err(type_error(self.place, key, EXPECTED, &Value::Array(items)));
        }
        items.into_iter().enumerate().map(|(i, item)| self.message(item, &format!("{key}[{i}]"))).collect()
    }

    fn message(&mut self, item: Value, key: &str) -> Result<Message, DataError> {
        let Value::Object(found) = item else {
            return Err(type_error(self.place, key, "a message { role, content }", &item));
        };
        // Null means absent, but in a message that calls a tool: templates ask whether its content is `none`. `from`
        // and `value` are ShareGPT's names.
        let is_there = |(name, value): &(String, Value)| name == "content" || !value.is_null();
        let mut message: Message = found.into_iter().filter(is_there).collect();
        if !message.contains_key("role") && message.contains_key("from") {
            let mut turn = Value::Object(message);
            shapes::turn(&mut turn, key, self.place)?;
            let Value::Object(converted) = turn else { unreachable!("it stays an object") };
            message = converted;
        }
        let role = message.get("role").unwrap_or(&Value::Null);
        let Value::String(role) = role else {
            return Err(type_error(self.place, &format!("{key}.role"), "a string", role));
        };
        if !ROLES.contains(&role.as_str()) {
            self.unknown_role.get_or_insert_with(|| (format!("{key}.role"), role.clone()));
        }
        match message.get("content") {
            Some(Value::Array(parts)) => {
                if let Some(part) = parts.iter().find_map(media_part) {
                    return Err(DataError::UnusedColumn {
                        place: self.place.clone(),
                        column: format!("{key}.content"),
                        why: format!("it has a part of type {part:?}, and only text is trained on"),
                        remedy: "remove such rows".into(),
                    });
                }
                let is_without_text = |part: &Value| part["type"] == "text" && !part["text"].is_string();
                match parts.iter().position(is_without_text) {
                    None => Ok(message),
                    Some(index) => {
                        let key = format!("{key}.content[{index}].text");
                        Err(type_error(self.place, &key, "a string", &parts[index]["text"]))
                    }
                }
            }
            Some(Value::String(_)) => Ok(message),
            Some(other) if !other.is_null() => {
                Err(type_error(self.place, &format!("{key}.content"), "a string", other))
            }
            // A call of a tool has no content.
            _ if ["tool_calls", "function_call"]
                .iter()
                .any(|call| message.get(*call).is_some_and(|call| !columns::is_nothing(call))) =>
            {
                Ok(message)
            }
            _ => {
                let others = message.keys().filter(|name| !["role", "content"].contains(&name.as_str()));
                let others: Vec<_> = others.map(|name| format!("`{name}`")).collect();
                Err(DataError::NoContent {
                    place: self.place.clone(),
                    key: key.to_owned(),
                    found: if others.is_empty() { "`role` alone".into() } else { others.join(", ") },
                })
            }
        }
    }

    fn same_kind(&self, key: &'static str, first: &Text, second: &Text) -> Result<(), DataError> {
        let (expected, found) = match (first, second) {
            (Text::Plain(_), Text::Chat(_)) => ("a string, as the keys before it", "a list of messages"),
            (Text::Chat(_), Text::Plain(_)) => ("a list of messages, as the keys before it", "a string"),
            _ => return Ok(()),
        };
        Err(DataError::Type { place: self.place.clone(), key: key.into(), expected, found: found.into() })
    }

    fn missing(&self, kind: RowKind) -> DataError {
        let expected = match kind {
            RowKind::Preference | RowKind::Reward => PREFERENCE_KEYS,
            RowKind::Supervised => SUPERVISED_KEYS,
            RowKind::Unpaired => UNPAIRED_KEYS,
            RowKind::Prompt => "`prompt`",
        };
        let nearest = self.row.keys().filter(|k| !KNOWN_KEYS.contains(&k.as_str())).find_map(|found| {
            let known = KNOWN_KEYS.iter().filter(|k| !self.has(k));
            let best =
                known.map(|k| (strsim::jaro_winkler(found, k), k)).max_by(|a, b| a.0.total_cmp(&b.0))?;
            (best.0 > 0.85).then(|| format!("did you mean `{}` where it says `{found}`?", best.1))
        });
        let other_kind = match kind {
            RowKind::Preference if self.columns.take_chosen => {
                Some("data.take = \"chosen\" needs preferences: remove it for other rows".to_string())
            }
            RowKind::Supervised if self.has("chosen") => {
                Some(
                    "these are preferences, which method = \"dpo\" trains on; data.take = \"chosen\" trains on the chosen side"
                        .to_string(),
                )
            }
            RowKind::Preference | RowKind::Reward if self.has("completion") && self.has("label") => {
                Some("these are labelled completions, which method = \"kto\" trains on".to_string())
            }
            RowKind::Preference | RowKind::Reward
                if self.has("messages") || self.has("text") || self.has("completion") =>
            {
                Some("these are demonstrations, which method = \"sft\" trains on".to_string())
            }
            RowKind::Prompt if self.has("messages") => {
                Some("a `prompt` may be a list of messages: rename `messages`".to_string())
            }
            _ => None,
        };
        let mapped = || {
            let keys: &[_] = match kind {
                RowKind::Preference | RowKind::Reward => &["prompt", "chosen", "rejected"],
                RowKind::Supervised => &["prompt", "completion"],
                RowKind::Unpaired => &["prompt", "completion", "label"],
                RowKind::Prompt => &["prompt"],
            };
            let keys: Vec<_> = keys.iter().map(|key| format!("{key} = \"…\"")).collect();
            format!("other columns are read with data.columns = {{ {} }}", keys.join(", "))
        };
        let is_null = |value: &Value| if value.is_null() { " (null)" } else { "" };
        let keys: Vec<_> = self.row.iter().map(|(key, value)| format!("`{key}`{}", is_null(value))).collect();
        let found = if keys.is_empty() { "none".to_string() } else { keys.join(", ") };
        DataError::Keys {
            place: self.place.clone(),
            expected,
            found,
            hint: nearest.or(other_kind).or_else(|| (!keys.is_empty()).then(mapped)),
        }
    }
}

impl Content {
    /// Returns every text that is tokenised.
    fn texts(&self) -> Vec<&str> {
        match self {
            Self::Text(text) => vec![text],
            Self::Messages(messages) => message_texts(messages),
            Self::Prompt(prompt) => prompt.texts(),
            Self::Completion { prompt, completion } => [prompt.texts(), completion.texts()].concat(),
            Self::Preference { prompt, chosen, rejected } => {
                [prompt.texts(), chosen.texts(), rejected.texts()].concat()
            }
        }
    }
}

impl Text {
    fn texts(&self) -> Vec<&str> {
        match self {
            Self::Plain(text) => vec![text],
            Self::Chat(messages) => message_texts(messages),
        }
    }
}

fn message_texts(messages: &[Message]) -> Vec<&str> {
    messages.iter().filter_map(|message| message.get("content")).flat_map(content_texts).collect()
}

fn content_texts(content: &Value) -> Vec<&str> {
    match content {
        Value::String(text) => vec![text],
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => Vec::new(),
    }
}

/// Returns the type of a content part that is not text.
fn media_part(part: &Value) -> Option<&str> {
    part["type"].as_str().filter(|kind| {
        ["image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio"]
            .contains(kind)
    })
}

fn type_error(place: &Place, key: &str, expected: &'static str, found: &Value) -> DataError {
    let name = shapes::describe(found);
    if let Some(kind) = found.get(ARROW_TYPE).and_then(Value::as_str) {
        let found = format!("a value of Arrow's type {kind}");
        return DataError::Type { place: place.clone(), key: key.into(), expected, found };
    }
    let mut text = found.to_string();
    if let Some((end, _)) = text.char_indices().nth(60) {
        text.truncate(end);
        text.push('…');
    }
    let found = if found.is_null() { name.to_string() } else { format!("{name}: {text}") };
    DataError::Type { place: place.clone(), key: key.into(), expected, found }
}

/// Returns where two texts diverge, in bytes of each, as TRL 1.16's `extract_prompt`: at the first
/// different character or the space before it, or before the shorter text's last character. TRL
/// inspects the last character of `chosen` if the first ones differ; that bug is not repeated.
fn common_text(chosen: &str, rejected: &str) -> (usize, usize) {
    let mut previous = None;
    let mut pairs = chosen.char_indices().zip(rejected.chars()).peekable();
    while let Some(((at, a), b)) = pairs.next() {
        if a != b {
            // Both agree so far, so the offset is the same in both.
            let at = if previous == Some(' ') { at - 1 } else { at };
            return (at, at);
        }
        if pairs.peek().is_none() {
            return (at, at);
        }
        previous = Some(a);
    }
    (0, 0)
}

/// Returns the number of messages in the common prompt, by the same rule.
fn common_messages(chosen: &[Message], rejected: &[Message]) -> usize {
    let shorter = chosen.len().min(rejected.len());
    (0..shorter).find(|&i| chosen[i] != rejected[i]).unwrap_or(shorter.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str, kind: RowKind) -> Record {
        let place = Place { path: "f".into(), line: 1 };
        Record::parse(json.as_bytes(), kind, &place).unwrap()
    }

    fn refusal(json: &str, kind: RowKind) -> String {
        let place = Place { path: "f".into(), line: 1 };
        Record::parse(json.as_bytes(), kind, &place).unwrap_err().to_string()
    }

    /// Expected parts are what `trl.data_utils.extract_prompt` of trl 1.16 returns.
    #[test]
    fn an_implicit_prompt_is_cut_as_in_trl() {
        for (chosen, rejected, prompt) in [
            ("The same start", "The same end", "The same"),
            ("ab", "ac", "a"),
            ("same", "same", "sam"),
            ("ab", "abcd", "a"),
            ("abcd", "ab", "a"),
            ("日本 a", "日本 b", "日本"),
            ("a  b", "a  c", "a "),
            ("a", "b", ""),
        ] {
            let row = serde_json::json!({"chosen": chosen, "rejected": rejected}).to_string();
            let plain = |text: &str| Text::Plain(text.into());
            let expected = Content::Preference {
                prompt: plain(prompt),
                chosen: plain(&chosen[prompt.len()..]),
                rejected: plain(&rejected[prompt.len()..]),
            };
            assert_eq!(parse(&row, RowKind::Preference).content, expected, "{chosen:?}, {rejected:?}");
        }
        // TRL inspects `chosen[-1]` if the first characters differ, and would cut these before
        // their last one.
        let found = parse(r#"{"chosen": "x ", "rejected": "y "}"#, RowKind::Preference).content;
        assert!(
            matches!(found, Content::Preference { prompt: Text::Plain(prompt), .. } if prompt.is_empty())
        );
    }

    #[test]
    fn a_text_prompt_beside_conversations_that_hold_it_is_ignored() {
        let turns = |answer: &str| serde_json::json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]);
        let row = serde_json::json!({"prompt": "q", "chosen": turns("a"), "rejected": turns("b")});
        let record = parse(&row.to_string(), RowKind::Preference);
        assert!(record.prompt_ignored);
        let Content::Preference { prompt: Text::Chat(prompt), chosen: Text::Chat(chosen), .. } =
            record.content
        else {
            panic!("{:?}", record.content);
        };
        assert_eq!((prompt.len(), prompt[0]["content"].as_str()), (1, Some("q")));
        assert_eq!((chosen.len(), chosen[0]["content"].as_str()), (1, Some("a")));
        let other = serde_json::json!({"prompt": "other", "chosen": turns("a"), "rejected": turns("b")});
        let error = refusal(&other.to_string(), RowKind::Preference);
        assert!(error.contains("the column `prompt` is not used"), "{error}");
    }

    #[test]
    fn tools_are_a_list_of_objects() {
        let with = |tools: &str| {
            format!(r#"{{"messages": [{{"role": "user", "content": "q"}}], "tools": {tools}}}"#)
        };
        let tools = |json: &str| parse(&with(json), RowKind::Supervised).tools;
        let one = Some(serde_json::json!([{"name": "f"}]));
        assert_eq!(tools(r#"[{"name": "f"}]"#), one);
        assert_eq!(tools(r#"["{\"name\": \"f\"}"]"#), one);
        assert_eq!(tools("[]"), Some(serde_json::json!([])));
        assert_eq!(tools(r#""null""#), None);
        for (json, expected) in [
            (r#"{"name": "f"}"#, "`tools` should be a list of objects, found an object: {\"name\":\"f\"}"),
            (
                r#""{\"name\": \"f\"}""#,
                "`tools` should be a list of objects, found an object: {\"name\":\"f\"}",
            ),
            ("[[]]", "`tools[0]` should be an object, found a list: []"),
            (r#"[{}, "f"]"#, "not valid JSON: inside `tools`: "),
        ] {
            let error = refusal(&with(json), RowKind::Supervised);
            assert!(error.contains(expected), "{json}: {error}");
        }
    }

    #[test]
    fn older_names_null_columns_and_tools_in_a_string_are_understood() {
        let row = r#"{"text": null, "conversations": [{"from": "user", "value": "q", "weight": null}],
            "tools": "[{\"name\": \"f\"}]", "chat_template_kwargs": null}"#;
        let record = parse(row, RowKind::Supervised);
        let Content::Messages(messages) = record.content else { panic!("{:?}", record.content) };
        assert_eq!(serde_json::json!(messages), serde_json::json!([{"role": "user", "content": "q"}]));
        assert_eq!(record.tools, Some(serde_json::json!([{"name": "f"}])));
        assert!(record.template_kwargs.is_empty());
    }

    #[test]
    fn a_null_content_stays_where_a_tool_is_called() {
        let row = r#"{"messages": [{"role": "user", "content": "q", "name": null},
            {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]}"#;
        let Content::Messages(messages) = parse(row, RowKind::Supervised).content else { panic!("messages") };
        assert_eq!(messages[0].len(), 2);
        assert_eq!(messages[1].get("content"), Some(&Value::Null));
        assert_eq!(messages[2].get("content"), None);
    }

    #[test]
    fn rows_with_the_keys_of_both_kinds_are_read_for_the_method() {
        let row =
            r#"{"prompt": "p", "chosen": "a", "rejected": "b", "completion": "c", "text": "t", "score": 1}"#;
        assert!(matches!(parse(row, RowKind::Preference).content, Content::Preference { .. }));
        assert!(matches!(parse(row, RowKind::Supervised).content, Content::Completion { .. }));
    }
}
