//! Values of other programs' settings: numbers that YAML or a shell left as text, switches, lists.

use serde_json::{Map, Value};

use super::name::Converted;

/// A number, also as text: PyYAML and shells leave `1e-6` a string.
pub(super) fn as_number(value: &Value) -> Option<f64> {
    let number = match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().replace('_', "").parse().ok(),
        _ => None,
    };
    number.filter(|number: &f64| number.is_finite())
}

/// A whole number of at least 0.
pub(super) fn as_count(value: &Value) -> Option<u64> {
    as_number(value)
        .filter(|number| *number >= 0.0 && number.fract() == 0.0 && *number < 9e15)
        .map(|n| n as u64)
}

/// A switch, also in the words of YAML 1.1 and of shells.
pub(super) fn as_flag(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(flag) => Some(*flag),
        Value::String(text) => match text.to_ascii_lowercase().as_str() {
            "true" | "yes" | "on" | "1" => Some(true),
            "false" | "no" | "off" | "0" => Some(false),
            _ => None,
        },
        Value::Number(number) => match number.as_i64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => None,
        },
        _ => None,
    }
}

/// Texts of a list, or of a text with commas or blanks.
pub(super) fn as_texts(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::Array(items) => items.iter().map(|item| item.as_str().map(str::to_owned)).collect(),
        Value::String(text) => {
            let words = text.trim_matches(['[', ']']).split([',', ' ']);
            let word = |word: &str| word.trim().trim_matches(['\'', '"']).to_owned();
            Some(words.map(word).filter(|word| !word.is_empty()).collect())
        }
        _ => None,
    }
}

/// A table, also as a text in JSON: a shell has it so.
pub(super) fn as_table(value: &Value) -> Option<Map<String, Value>> {
    match value {
        Value::Object(entries) => Some(entries.clone()),
        Value::String(text) => serde_json::from_str(text).ok(),
        _ => None,
    }
}

/// Returns whether a value says "no": null, false, 0, an empty text or list, "no" or "none".
pub(super) fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(flag) => !flag,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => {
            let text = text.to_ascii_lowercase();
            matches!(text.as_str(), "" | "no" | "none" | "null" | "false" | "off" | "0" | "0.0")
        }
        Value::Array(items) => items.is_empty(),
        Value::Object(entries) => entries.is_empty(),
    }
}

/// Returns the value as the other program's file would have it, on one line.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::String(text) if !text.is_empty() && text.len() < 60 && !text.contains(char::is_control) => {
            text.clone()
        }
        other => other.to_string(),
    }
}

pub(super) fn number(value: &Value) -> Converted {
    as_number(value).map_or(Converted::Wrong("a number"), |number| Converted::Value(number.into()))
}

/// A number, or DeepSpeed's "auto".
pub(super) fn number_or_auto(value: &Value) -> Converted {
    match value.as_str() {
        Some("auto") => Converted::Same("\"auto\" leaves it to the trainer's own setting"),
        _ => number(value),
    }
}

pub(super) fn count(value: &Value) -> Converted {
    as_count(value)
        .map_or(Converted::Wrong("a whole number"), |count| Converted::Value((count as i64).into()))
}

pub(super) fn flag(value: &Value) -> Converted {
    as_flag(value).map_or(Converted::Wrong("true or false"), |flag| Converted::Value(flag.into()))
}

pub(super) fn text(value: &Value) -> Converted {
    match value {
        Value::String(text) if !text.is_empty() => Converted::Value(text.clone().into()),
        _ => Converted::Wrong("a text"),
    }
}

pub(super) fn texts(value: &Value) -> Converted {
    match as_texts(value) {
        Some(texts) if !texts.is_empty() => Converted::Value(texts.into()),
        _ => Converted::Wrong("a list of texts"),
    }
}

/// A name that may be empty.
pub(super) fn name(value: &Value) -> Converted {
    match value {
        Value::String(text) if !text.is_empty() => Converted::Value(text.clone().into()),
        Value::Number(number) => Converted::Value(number.to_string().into()),
        _ => Converted::Same("a run has the name of its folder"),
    }
}
