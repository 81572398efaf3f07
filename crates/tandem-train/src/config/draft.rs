//! A configuration that is being written: keys with comments, and remarks below.

use std::fmt::Write;

use toml::Value;

use super::page::list;
use super::{Config, resolved};

/// A configuration file in the making.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// Lines above the keys.
    pub header: Vec<String>,
    /// Keys in the order in which they were set.
    pub keys: Vec<DraftKey>,
    /// Judges of an online run, each with its keys.
    pub judges: Vec<Vec<DraftKey>>,
    /// Settings of another program that need no key here.
    pub not_needed: Vec<Remark>,
    /// Settings of another program that have no counterpart.
    pub missing: Vec<Remark>,
    /// Settings of another program that are not known.
    pub unknown: Vec<Remark>,
}

/// A key with its value.
#[derive(Clone, Debug)]
pub struct DraftKey {
    /// Full key.
    pub key: String,
    /// The value.
    pub value: Value,
    /// Comment behind it; may be empty.
    pub comment: String,
}

/// A setting of another program with a sentence about it.
#[derive(Clone, Debug)]
pub struct Remark {
    /// The setting as it was given, `name = value`.
    pub setting: String,
    /// The sentence.
    pub reason: String,
}

impl Draft {
    /// Sets a key, or replaces it.
    pub fn set(&mut self, key: &str, value: impl Into<Value>, comment: impl Into<String>) {
        let new = DraftKey { key: key.to_owned(), value: value.into(), comment: comment.into() };
        match self.keys.iter_mut().find(|known| known.key == key) {
            Some(known) => *known = new,
            None => self.keys.push(new),
        }
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.keys.iter().find(|known| known.key == key).map(|known| &known.value)
    }

    /// Removes a key.
    pub fn remove(&mut self, key: &str) {
        self.keys.retain(|known| known.key != key);
    }

    /// Returns the file: keys in the order of the reference page, each with its comment.
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        for line in &self.header {
            comment(&mut text, "", line);
        }
        for table in resolved::sorted(list(|keys| Config::visit(None, keys).map(drop))) {
            let full = |name: &str| match table.name.as_str() {
                "" => name.to_owned(),
                table => format!("{table}.{name}"),
            };
            let found = |row: &super::KeyRow| self.keys.iter().find(|known| known.key == full(row.name));
            let keys: Vec<_> = table.keys.iter().filter_map(|row| Some((row.name, found(row)?))).collect();
            if keys.is_empty() {
                continue;
            }
            if !table.name.is_empty() {
                let _ = write!(text, "\n[{}]\n", table.name);
            }
            write_keys(&mut text, &keys);
        }
        for judge in &self.judges {
            text.push_str("\n[[judges]]\n");
            write_keys(&mut text, &judge.iter().map(|key| (key.key.as_str(), key)).collect::<Vec<_>>());
        }
        self.write_remarks(&mut text);
        text
    }

    fn write_remarks(&self, text: &mut String) {
        let groups = [
            ("Cannot be had here:", &self.missing),
            ("Not known here, and left out:", &self.unknown),
            ("Not needed here:", &self.not_needed),
        ];
        for (title, remarks) in groups {
            if remarks.is_empty() {
                continue;
            }
            let _ = write!(text, "\n# {title}\n");
            // Settings with one reason share a line.
            let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
            for Remark { setting, reason } in remarks {
                match reasons.iter_mut().find(|(known, _)| known == reason && !reason.is_empty()) {
                    Some((_, settings)) => settings.push(setting),
                    None => reasons.push((reason, vec![setting])),
                }
            }
            for (reason, settings) in reasons {
                let colon = if reason.is_empty() { "" } else { ": " };
                comment(text, "  ", &format!("{}{colon}{reason}", settings.join(", ")));
            }
        }
    }
}

/// Writes keys with their comments in a column.
fn write_keys(text: &mut String, keys: &[(&str, &DraftKey)]) {
    let lines: Vec<_> =
        keys.iter().map(|(name, key)| (format!("{name} = {}", shown(&key.value)), &key.comment)).collect();
    let width =
        lines.iter().filter(|(line, _)| line.len() <= 44).map(|(line, _)| line.len()).max().unwrap_or(0);
    for (line, comment) in lines {
        let _ = match comment.is_empty() {
            true => writeln!(text, "{line}"),
            false => writeln!(text, "{line:width$}  # {}", one_line(comment)),
        };
    }
}

/// Writes a comment, broken at 98 characters.
fn comment(text: &mut String, indent: &str, words: &str) {
    let mut line = format!("#{indent}");
    let start = line.len();
    for word in one_line(words).split(' ') {
        if line.len() > start && line.chars().count() + word.chars().count() + 1 > 98 {
            let _ = writeln!(text, "{line}");
            line = format!("#{indent}  ");
        }
        line.push(' ');
        line.push_str(word);
    }
    let _ = writeln!(text, "{}", line.trim_end());
}

/// A text of another file in a comment: no character of it may end the line.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// A value as TOML; a small number as `1e-6`.
fn shown(value: &Value) -> String {
    match value {
        Value::Float(x) if *x != 0.0 && x.abs() < 1e-3 => format!("{x:e}"),
        other => other.to_string(),
    }
}
