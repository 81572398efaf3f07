//! Shapes of published data sets, converted to `prompt`, `chosen` and `rejected`, or to `prompt` and
//! `completion`.
//!
//! The texts of HH, SHP and StackExchange are those of `get_dataset` in Mitchell's
//! direct-preference-optimization: a prompt is `\n\nHuman: …\n\nAssistant:`, a response begins with
//! a space.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::DataError;
use crate::place::Place;
use crate::report::Reason;
use crate::source::columns::is_nothing;

/// Most bytes of the texts of all pairs that a row makes.
const MAX_PAIRS: usize = 256 << 20;

/// Shape of the rows of a published data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NamedShape {
    /// `conversations` of `{ from, value }`, with an optional `system`; for preferences also
    /// `chosen` and `rejected`, one such message each.
    ShareGpt,
    /// `instruction`, `input` and `output`, or `chosen` and `rejected`.
    Alpaca,
    /// `system`, `question`, and `chosen` and `rejected`, or `response`.
    Orca,
    /// `instruction` and `completions` of `{ response, overall_score }`: the best and the worst.
    UltraFeedback,
    /// Transcripts `\n\nHuman: … \n\nAssistant: …` in `chosen` and `rejected`.
    Hh,
    /// `history`, `human_ref_A`, `human_ref_B`, `labels`, `score_A`, `score_B`; pairs whose scores
    /// have a ratio below 2 are dropped.
    Shp,
    /// `question` and `answers` of `{ text, pm_score }`: a pair for every two answers.
    StackExchange,
}

impl NamedShape {
    /// Names in a configuration.
    pub const NAMES: [(&str, Self); 7] = [
        ("sharegpt", Self::ShareGpt),
        ("alpaca", Self::Alpaca),
        ("orca", Self::Orca),
        ("ultrafeedback", Self::UltraFeedback),
        ("hh", Self::Hh),
        ("shp", Self::Shp),
        ("stackexchange", Self::StackExchange),
    ];

    fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(_, shape)| *shape == self).map_or("", |(name, _)| name)
    }

    /// Returns whether a row is preferences and nothing else.
    fn is_preference(self) -> bool {
        matches!(self, Self::UltraFeedback | Self::Hh | Self::Shp | Self::StackExchange)
    }
}

/// Rows made from one row of a file, or the reason why there are none.
pub(crate) type Converted = Result<Vec<Map<String, Value>>, Reason>;

const HUMAN: &str = "\n\nHuman:";
const ASSISTANT: &str = "\n\nAssistant:";

/// Converts a row. `pairs`: preferences are wanted; `best_only`: of them, one with the best response.
pub(crate) fn convert(
    row: Map<String, Value>,
    shape: Option<NamedShape>,
    pairs: bool,
    best_only: bool,
    place: &Place,
) -> Result<Converted, DataError> {
    let Some(named) = shape.or_else(|| recognise(&row, pairs)) else { return Ok(Ok(vec![row])) };
    let mut reader = ShapeReader { row, shape: named, place };
    let has_pair = reader.row.contains_key("chosen") && reader.row.contains_key("rejected");
    if !pairs && (named.is_preference() || named == NamedShape::ShareGpt && has_pair) {
        return Err(reader.refuse(
            "these are preferences, which method = \"dpo\" trains on; data.take = \"chosen\" trains on the chosen side",
        ));
    }
    match named {
        NamedShape::ShareGpt => reader.sharegpt(pairs),
        NamedShape::Alpaca => reader.alpaca(pairs),
        NamedShape::Orca => reader.orca(pairs),
        NamedShape::UltraFeedback => return reader.ultrafeedback(),
        NamedShape::Hh => reader.hh(),
        NamedShape::Shp => return reader.shp(),
        NamedShape::StackExchange => return reader.stack_exchange(best_only),
    }?;
    Ok(Ok(vec![reader.row]))
}

/// Returns the shape that a row's columns show; `None` for the trainer's own keys.
fn recognise(row: &Map<String, Value>, pairs: bool) -> Option<NamedShape> {
    let has = |key: &str| row.get(key).is_some_and(|v| !v.is_null());
    let text = |key: &str| row.get(key).and_then(Value::as_str);
    let texts = text("chosen").is_some() && text("rejected").is_some();
    let is_transcript = |key| text(key).is_some_and(|t: &str| t.starts_with(HUMAN) && t.contains(ASSISTANT));
    // An empty list has the shape too: its row gives no pair.
    let list_with = |key: &str, field: &str| {
        let items = row.get(key).and_then(Value::as_array);
        items.is_some_and(|items| items.first().is_none_or(|item| item.get(field).is_some()))
    };
    if has("history") && has("human_ref_A") && has("human_ref_B") {
        return Some(NamedShape::Shp);
    }
    if has("question") && list_with("answers", "pm_score") {
        return Some(NamedShape::StackExchange);
    }
    if has("instruction") && list_with("completions", "response") {
        return Some(NamedShape::UltraFeedback);
    }
    if pairs {
        return match () {
            () if has("prompt") => None,
            () if is_transcript("chosen") && is_transcript("rejected") => Some(NamedShape::Hh),
            () if has("conversations") && has("chosen") => Some(NamedShape::ShareGpt),
            () if texts && has("question") => Some(NamedShape::Orca),
            () if texts && has("instruction") => Some(NamedShape::Alpaca),
            () => None,
        };
    }
    let own = has("messages") || has("text") || (has("prompt") && has("completion"));
    match () {
        () if own => None,
        () if has("conversations") => Some(NamedShape::ShareGpt),
        () if has("instruction") && has("output") => Some(NamedShape::Alpaca),
        () if has("question") && has("response") => Some(NamedShape::Orca),
        () => None,
    }
}

struct ShapeReader<'a> {
    row: Map<String, Value>,
    shape: NamedShape,
    place: &'a Place,
}

impl ShapeReader<'_> {
    fn refuse(&self, reason: impl Into<String>) -> DataError {
        DataError::NotOfShape { place: self.place.clone(), shape: self.shape.name(), reason: reason.into() }
    }

    /// Takes a text.
    fn text(&mut self, key: &str) -> Result<String, DataError> {
        match self.row.remove(key) {
            Some(Value::String(text)) => Ok(text),
            None | Some(Value::Null) => {
                let keys: Vec<_> = self.row.keys().map(|k| format!("`{k}`")).collect();
                Err(self.refuse(format!(
                    "`{key}` is missing, found {}; data.columns maps columns to keys",
                    keys.join(", ")
                )))
            }
            Some(other) => {
                let found = describe(&other);
                self.row.insert(key.into(), other);
                Err(self.refuse(format!("`{key}` should be a string, found {found}")))
            }
        }
    }

    /// Takes a text that may be absent or empty.
    fn optional_text(&mut self, key: &str) -> Result<Option<String>, DataError> {
        match self.row.get(key) {
            Some(value) if !is_nothing(value) => self.text(key).map(Some),
            _ => {
                self.row.remove(key);
                Ok(None)
            }
        }
    }

    fn list(&mut self, key: &str) -> Result<Vec<Value>, DataError> {
        match self.row.remove(key) {
            Some(Value::Array(items)) => Ok(items),
            other => {
                let found = describe(&other.unwrap_or_default());
                Err(self.refuse(format!("`{key}` should be a list, found {found}")))
            }
        }
    }

    fn number(&mut self, key: &str) -> Result<f64, DataError> {
        let value = self.row.remove(key).unwrap_or_default();
        number(&value)
            .ok_or_else(|| self.refuse(format!("`{key}` should be a number, found {}", describe(&value))))
    }

    fn set(&mut self, key: &str, value: Value) {
        self.row.insert(key.into(), value);
    }

    /// Sets a conversational prompt and moves the completions, `chosen` and `rejected` or `completion`.
    fn set_turns(
        &mut self,
        system: Option<String>,
        user: String,
        completions: &[(&str, &str)],
    ) -> Result<(), DataError> {
        let mut taken = Vec::new();
        for (key, column) in completions {
            taken.push((*key, self.text(column)?));
        }
        let mut prompt = Vec::new();
        prompt.extend(system.map(|text| json!({"role": "system", "content": text})));
        prompt.push(json!({"role": "user", "content": user}));
        self.set("prompt", Value::Array(prompt));
        for (key, text) in taken {
            self.set(key, json!([{"role": "assistant", "content": text}]));
        }
        Ok(())
    }

    fn sharegpt(&mut self, pairs: bool) -> Result<(), DataError> {
        let mut turns = self.list("conversations")?;
        if turns.is_empty() {
            return Err(self.refuse("`conversations` is empty: expected messages { from, value }"));
        }
        for (i, message) in turns.iter_mut().enumerate() {
            turn(message, &format!("conversations[{i}]"), self.place)?;
        }
        if let Some(system) = self.optional_text("system")? {
            if turns[0]["role"] == "system" {
                return Err(self.refuse("`system` and a first message from \"system\" are both given"));
            }
            turns.insert(0, json!({"role": "system", "content": system}));
        }
        if !pairs {
            self.set("messages", Value::Array(turns));
            return Ok(());
        }
        for key in ["chosen", "rejected"] {
            let mut answer = match self.row.remove(key) {
                Some(Value::Array(items)) => items,
                Some(Value::String(text)) => vec![json!({"role": "assistant", "content": text})],
                Some(message @ Value::Object(_)) => vec![message],
                other => {
                    let found = describe(&other.unwrap_or_default());
                    return Err(self.refuse(format!("`{key}` should be a message, found {found}")));
                }
            };
            for (i, message) in answer.iter_mut().enumerate() {
                turn(message, &format!("{key}[{i}]"), self.place)?;
            }
            self.set(key, Value::Array(answer));
        }
        self.set("prompt", Value::Array(turns));
        Ok(())
    }

    fn alpaca(&mut self, pairs: bool) -> Result<(), DataError> {
        let mut user = self.text("instruction")?;
        if let Some(input) = self.optional_text("input")? {
            user = format!("{user}\n{input}");
        }
        let system = self.optional_text("system")?;
        let completions: &[_] = if pairs { &PAIR } else { &[("completion", "output")] };
        self.set_turns(system, user, completions)
    }

    fn orca(&mut self, pairs: bool) -> Result<(), DataError> {
        let user = self.text("question")?;
        let mut system = self.optional_text("system")?;
        if system.is_none() {
            system = self.optional_text("system_prompt")?;
        }
        let completions: &[_] = if pairs { &PAIR } else { &[("completion", "response")] };
        self.set_turns(system, user, completions)
    }

    /// The best completion against the worst; of equal ones the first.
    fn ultrafeedback(mut self) -> Result<Converted, DataError> {
        let instruction = self.text("instruction")?;
        let mut scored = Vec::new();
        for (i, mut item) in self.list("completions")?.into_iter().enumerate() {
            let score = ["overall_score", "fine-grained_score"].iter().find_map(|k| number(&item[*k]));
            let Some(score) = score else {
                return Err(self.refuse(format!(
                    "`completions[{i}]` has neither a number `overall_score` nor `fine-grained_score`"
                )));
            };
            let Value::String(text) = item["response"].take() else {
                return Err(self.refuse(format!("`completions[{i}].response` should be a string")));
            };
            scored.push((score, text));
        }
        let Some(best) = best(&scored) else { return Ok(Err(Reason::NoPair)) };
        let worst = scored.iter().rev().min_by(|a, b| a.0.total_cmp(&b.0)).expect("there is a best");
        if worst.0 == best.0 {
            return Ok(Err(Reason::NoPair));
        }
        let (chosen, rejected) = (best.1.clone(), worst.1.clone());
        self.set("chosen", chosen.into());
        self.set("rejected", rejected.into());
        self.set_turns(None, instruction, &PAIR)?;
        Ok(Ok(vec![self.row]))
    }

    /// Cuts both transcripts after the last "Assistant:" of what they have in common. `get_dataset`
    /// cuts both where `chosen` has its last one, which is the same wherever `rejected` agrees so
    /// far.
    fn hh(&mut self) -> Result<(), DataError> {
        let (chosen, rejected) = (self.text("chosen")?, self.text("rejected")?);
        let same: usize = (chosen.chars().zip(rejected.chars()))
            .take_while(|(a, b)| a == b)
            .map(|(a, _)| a.len_utf8())
            .sum();
        let Some(at) = chosen[..same].rfind(ASSISTANT) else {
            return Err(
                self.refuse("`chosen` and `rejected` have no beginning up to \"\\n\\nAssistant:\" in common")
            );
        };
        let at = at + ASSISTANT.len();
        self.set("prompt", chosen[..at].into());
        self.set("chosen", chosen[at..].into());
        self.set("rejected", rejected[at..].into());
        Ok(())
    }

    fn shp(mut self) -> Result<Converted, DataError> {
        let prompt = transcript(&self.text("history")?);
        let (a, b) = (self.text("human_ref_A")?, self.text("human_ref_B")?);
        let (score_a, score_b) = (self.number("score_A")?, self.number("score_B")?);
        let (chosen, rejected) = match self.number("labels")? {
            1.0 => (a, b),
            0.0 => (b, a),
            other => return Err(self.refuse(format!("`labels` is {other}: expected 1 (A is better) or 0"))),
        };
        let ratio = (score_a / score_b).max(score_b / score_a);
        if ratio.is_nan() || ratio < 2.0 {
            return Ok(Err(Reason::LowScoreRatio));
        }
        self.set("prompt", prompt.into());
        self.set("chosen", format!(" {chosen}").into());
        self.set("rejected", format!(" {rejected}").into());
        Ok(Ok(vec![self.row]))
    }

    /// A pair for every two answers, in the order of `get_dataset`: of equal scores the later is chosen.
    fn stack_exchange(mut self, best_only: bool) -> Result<Converted, DataError> {
        let prompt = transcript(&self.text("question")?);
        let mut scored = Vec::new();
        for (i, mut item) in self.list("answers")?.into_iter().enumerate() {
            let (score, text) = (number(&item["pm_score"]), item["text"].take());
            let (Some(score), Value::String(text)) = (score, text) else {
                return Err(self
                    .refuse(format!("`answers[{i}]` should have a string `text` and a number `pm_score`")));
            };
            scored.push((score, format!(" {text}")));
        }
        let prompt_bytes = prompt.len();
        self.set("prompt", prompt.into());
        let row = |chosen: &str, rejected: &str| {
            let mut row = self.row.clone();
            row.insert("chosen".into(), chosen.into());
            row.insert("rejected".into(), rejected.into());
            row
        };
        if best_only {
            return Ok(best(&scored).map(|(_, text)| vec![row(text, text)]).ok_or(Reason::NoPair));
        }
        let others = scored.len().saturating_sub(1);
        let pairs = scored.len() * others / 2;
        let texts: usize = scored.iter().map(|(_, text)| text.len()).sum();
        // All pairs of a row are made at once.
        if pairs * prompt_bytes + others * texts > MAX_PAIRS {
            return Err(self.refuse(format!(
                "its {} answers make {pairs} pairs with texts of more than {} MiB together: keep fewer answers",
                scored.len(),
                MAX_PAIRS >> 20
            )));
        }
        let mut rows = Vec::new();
        for (i, a) in scored.iter().enumerate() {
            for b in &scored[i + 1..] {
                rows.push(if a.0 > b.0 { row(&a.1, &b.1) } else { row(&b.1, &a.1) });
            }
        }
        Ok(if rows.is_empty() { Err(Reason::NoPair) } else { Ok(rows) })
    }
}

/// Converts `{ from, value }` to `{ role, content }`; messages that have a role stay.
pub(crate) fn turn(turn: &mut Value, key: &str, place: &Place) -> Result<(), DataError> {
    let refuse = |reason: String| DataError::NotOfShape {
        place: place.clone(),
        shape: NamedShape::ShareGpt.name(),
        reason,
    };
    let Value::Object(message) = turn else {
        return Err(refuse(format!("`{key}` should be {{ from, value }}, found {}", describe(turn))));
    };
    message.retain(|_, value| !value.is_null());
    if message.contains_key("role") {
        return Ok(());
    }
    let role = match message.remove("from") {
        Some(Value::String(from)) => match role(&from) {
            Some(role) => role,
            None => {
                return Err(refuse(format!(
                    "`{key}.from` is {from:?}: expected \"system\", \"human\" or \"user\", \"gpt\" or \"assistant\", \
                     \"tool\" or \"observation\""
                )));
            }
        },
        other => {
            let found = describe(&other.unwrap_or_default());
            return Err(refuse(format!("`{key}.from` should be a string, found {found}")));
        }
    };
    let content = match message.remove("value") {
        Some(Value::String(text)) => text,
        other => {
            let found = describe(&other.unwrap_or_default());
            return Err(refuse(format!("`{key}.value` should be a string, found {found}")));
        }
    };
    message.insert("role".into(), role.into());
    message.insert("content".into(), content.into());
    Ok(())
}

const PAIR: [(&str, &str); 2] = [("chosen", "chosen"), ("rejected", "rejected")];

fn transcript(text: &str) -> String {
    format!("{HUMAN} {text}{ASSISTANT}")
}

/// Returns the first item with the largest score.
fn best(scored: &[(f64, String)]) -> Option<&(f64, String)> {
    scored.iter().rev().max_by(|a, b| a.0.total_cmp(&b.0))
}

fn role(from: &str) -> Option<&'static str> {
    Some(match from {
        "system" => "system",
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "model" => "assistant",
        "tool" | "observation" => "tool",
        _ => return None,
    })
}

/// Reads a number, or a text that is one, as tables of text have it.
fn number(value: &Value) -> Option<f64> {
    value.as_f64().or_else(|| value.as_str()?.trim().parse().ok()).filter(|x: &f64| x.is_finite())
}

/// Returns the name of a value's type, for messages.
pub(super) fn describe(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
