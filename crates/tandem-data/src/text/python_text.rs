//! Python's text forms of values: `str(x)`, `repr(x)` and `json.dumps(x)`.
//!
//! Chat templates are written for Jinja on Python: `{{ true }}` is `True`, and `tojson` is
//! `json.dumps` with `ensure_ascii=False` and without HTML escapes, as in transformers 5.

use std::fmt::{self, Write};
use std::sync::LazyLock;

use minijinja::Value;
use minijinja::value::ValueKind;
use regex::Regex;

/// Maximum depth of nested values.
const MAX_DEPTH: usize = 200;

/// Writes `str(value)`; fails where values are nested too deeply.
pub(crate) fn write_str(out: &mut dyn Write, value: &Value) -> fmt::Result {
    match value.as_str() {
        Some(text) => out.write_str(text),
        None => write_repr(out, value, 0),
    }
}

/// Writes `repr(value)`.
pub(crate) fn write_repr(out: &mut dyn Write, value: &Value, depth: usize) -> fmt::Result {
    if depth > MAX_DEPTH {
        return Err(fmt::Error);
    }
    match value.kind() {
        ValueKind::Undefined => Ok(()),
        ValueKind::None => out.write_str("None"),
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.write_char('[')?;
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.write_str(if i == 0 { "" } else { ", " })?;
                write_repr(out, &item, depth + 1)?;
            }
            out.write_char(']')
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.write_str(if i == 0 { "" } else { ", " })?;
                write_repr(out, &key, depth + 1)?;
                out.write_str(": ")?;
                write_repr(out, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            out.write_char('}')
        }
        _ => write!(out, "{value}"),
    }
}

fn write_quoted(out: &mut dyn Write, text: &str) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\\' => out.write_str("\\\\")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if is_printable(c) => out.write_char(c)?,
            c => match c as u32 {
                code @ ..0x100 => write!(out, "\\x{code:02x}")?,
                code @ ..0x10000 => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
        }
    }
    out.write_char(quote)
}

/// Returns whether Python's `str.isprintable` holds for a character.
fn is_printable(c: char) -> bool {
    static OTHER: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"[\p{Other}\p{Separator}]").expect("these categories exist"));
    matches!(c, ' '..='~') || !OTHER.is_match(c.encode_utf8(&mut [0; 4]))
}

fn write_number(out: &mut dyn Write, value: &Value) -> fmt::Result {
    if value.is_integer() {
        return write!(out, "{value}");
    }
    match f64::try_from(value.clone()) {
        Ok(number) => write_float(out, number),
        Err(_) => write!(out, "{value}"),
    }
}

/// Writes `repr(float)`: the shortest digits that read back the same, positional from 1e-4 to 1e16.
fn write_float(out: &mut dyn Write, number: f64) -> fmt::Result {
    let size = number.abs();
    if !number.is_finite() {
        return out.write_str(match (number.is_nan(), number > 0.0) {
            (true, _) => "nan",
            (_, true) => "inf",
            _ => "-inf",
        });
    }
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or_default();
        let sign = if exponent < 0 { '-' } else { '+' };
        return write!(out, "{digits}e{sign}{:02}", exponent.abs());
    }
    write!(out, "{number:?}")
}

/// Options of `tojson`.
#[derive(Clone, Debug)]
pub(crate) struct JsonStyle {
    /// Spaces per level; `None` writes one line.
    pub indent: Option<usize>,
    /// Separator of items.
    pub item: String,
    /// Separator of key and value.
    pub key: String,
    /// Whether characters beyond ASCII become `\uXXXX`.
    pub ascii: bool,
    /// Whether keys are sorted.
    pub sort_keys: bool,
    /// Maximum bytes of the text.
    pub max_length: usize,
}

impl JsonStyle {
    /// Creates a style with Python's default separators for this indent.
    pub(super) fn new(indent: Option<usize>) -> Self {
        let item = if indent.is_some() { "," } else { ", " };
        Self {
            indent,
            item: item.into(),
            key: ": ".into(),
            ascii: false,
            sort_keys: false,
            max_length: usize::MAX,
        }
    }
}

/// Returns `json.dumps(value)`, or `None` if a part of it has no JSON form or it is too long.
pub(crate) fn to_json(value: &Value, style: &JsonStyle) -> Option<String> {
    let mut out = String::new();
    write_json(&mut out, value, style, 0).ok().map(|()| out)
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, level: usize) -> fmt::Result {
    if level > MAX_DEPTH || out.len() > style.max_length {
        return Err(fmt::Error);
    }
    match value.kind() {
        ValueKind::None => out.write_str("null"),
        ValueKind::Bool => write!(out, "{}", value.is_true()),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_json_string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<_> = value.try_iter().into_iter().flatten().collect();
            write_block(out, ['[', ']'], items.len(), style, level, |out, i| {
                write_json(out, &items[i], style, level + 1)
            })
        }
        ValueKind::Map => {
            let mut keys: Vec<_> = value.try_iter().into_iter().flatten().collect();
            if style.sort_keys {
                keys.sort();
            }
            write_block(out, ['{', '}'], keys.len(), style, level, |out, i| {
                let mut name = String::new();
                write_str(&mut name, &keys[i])?;
                write_json_string(out, &name, style.ascii)?;
                out.write_str(&style.key)?;
                write_json(out, &value.get_item(&keys[i]).unwrap_or_default(), style, level + 1)
            })
        }
        _ => Err(fmt::Error),
    }
}

fn write_block(
    out: &mut String,
    brackets: [char; 2],
    length: usize,
    style: &JsonStyle,
    level: usize,
    mut item: impl FnMut(&mut String, usize) -> fmt::Result,
) -> fmt::Result {
    let newline = |out: &mut String, level: usize| {
        if let (Some(indent), true) = (style.indent, length > 0) {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * level));
        }
    };
    out.push(brackets[0]);
    for i in 0..length {
        if i > 0 {
            out.push_str(&style.item);
        }
        newline(out, level + 1);
        item(out, i)?;
    }
    newline(out, level);
    out.push(brackets[1]);
    Ok(())
}

fn write_json_string(out: &mut String, text: &str, ascii: bool) -> fmt::Result {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => write!(out, "\\u{:04x}", c as u32)?,
            c if ascii && !c.is_ascii() => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(json: &str) -> Value {
        Value::from_serialize(serde_json::from_str::<serde_json::Value>(json).unwrap())
    }

    /// Expected texts are what CPython 3.11 prints.
    #[test]
    fn values_print_as_in_python() {
        let mut text = String::new();
        let list = r#"[true, null, 1, 1.0, 1e16, 1e-05, 0.0001, "it's", "a\n", {"k": [], "j": {}}]"#;
        write_str(&mut text, &value(list)).unwrap();
        assert_eq!(text, r#"[True, None, 1, 1.0, 1e+16, 1e-05, 0.0001, "it's", 'a\n', {'k': [], 'j': {}}]"#);
    }

    #[test]
    fn characters_that_do_not_print_are_escaped_as_in_python() {
        let text = "x\u{2028}\u{a0}\u{200b}\u{301}é\0\u{7f}\u{85}\u{e0001}\u{e000}\u{378}字";
        let mut found = String::new();
        write_repr(&mut found, &Value::from(text), 0).unwrap();
        assert_eq!(found, "'x\\u2028\\xa0\\u200b\u{301}é\\x00\\x7f\\x85\\U000e0001\\ue000\\u0378字'");
    }

    #[test]
    fn json_is_written_as_by_json_dumps() {
        let nested = value(r#"{"b": [1, 2.5, "é<\"\u0001"], "a": {}, "c": []}"#);
        assert_eq!(
            to_json(&nested, &JsonStyle::new(None)).unwrap(),
            r#"{"b": [1, 2.5, "é<\"\u0001"], "a": {}, "c": []}"#
        );
        let style = JsonStyle { sort_keys: true, ascii: true, ..JsonStyle::new(Some(2)) };
        assert_eq!(
            to_json(&nested, &style).unwrap(),
            "{\n  \"a\": {},\n  \"b\": [\n    1,\n    2.5,\n    \"\\u00e9<\\\"\\u0001\"\n  ],\n  \"c\": []\n}"
        );
    }
}
