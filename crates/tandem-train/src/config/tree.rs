//! A TOML document as a tree whose values know their places, and overrides of it.

use std::collections::HashMap;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Place, Problem, Result};

/// A value and its place.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub place: Place,
    pub value: Value,
}

/// A TOML value. A table keeps its entries in file order; keys are unique.
#[derive(Clone, Debug)]
pub(super) enum Value {
    String(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
    Array(Vec<Node>),
    Table(Vec<(String, Node)>),
    /// A date or time, which no key takes.
    Other(String),
}

impl Node {
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self> {
        let lines = Lines::new(text);
        let at = |offset| Place::File { path: path.to_path_buf(), line: Some(lines.line(offset)) };
        let table = DeTable::parse(text).map_err(|error| ConfigError {
            place: at(error.span().map_or(0, |s| s.start)),
            problem: Problem::Syntax { message: format!("not valid TOML: {}", error.message()) },
        })?;
        let start = table.span().start;
        Self::convert(&DeValue::Table(table.into_inner()), start, &at)
    }

    /// Applies one override `key=value`.
    pub(crate) fn set(&mut self, text: &str) -> Result<()> {
        let place = Place::Set { text: text.to_string() };
        let syntax =
            |message: String| ConfigError { place: place.clone(), problem: Problem::Syntax { message } };
        let Some((key, value)) = text.split_once('=') else {
            return Err(syntax("expected key=value, for example train.learning_rate=1e-4".into()));
        };
        let at = |_| place.clone();
        let value = match DeValue::parse(value.trim()) {
            Ok(parsed) => Self::convert(parsed.get_ref(), 0, &at)?,
            // Shells remove quotes, so a bare word or path is a string, and so is a chat template. Another
            // bracket announces TOML.
            Err(error)
                if value.trim_start().starts_with(['[', '{', '"', '\''])
                    && !["{{", "{%", "{#"].iter().any(|start| value.trim_start().starts_with(start)) =>
            {
                return Err(syntax(format!("the value is not valid TOML: {}", error.message())));
            }
            Err(_) => Self { place: place.clone(), value: Value::String(value.trim().to_string()) },
        };
        let mut node = self;
        let mut path = key.trim().split('.').peekable();
        while let Some(part) = path.next() {
            if part.trim().is_empty() {
                return Err(syntax(format!("`{key}` is not a dotted key such as train.batch_size")));
            }
            let Value::Table(entries) = &mut node.value else {
                return Err(syntax(format!(
                    "`{key}`: the part before `.{part}` in the file is a value, not a table"
                )));
            };
            let index = entries.iter().position(|(k, _)| k == part.trim()).unwrap_or_else(|| {
                entries.push((
                    part.trim().to_string(),
                    Self { place: place.clone(), value: Value::Table(vec![]) },
                ));
                entries.len() - 1
            });
            node = &mut entries[index].1;
            if path.peek().is_none() {
                *node = value;
                return Ok(());
            }
        }
        unreachable!("`split` yields at least one part")
    }

    /// Returns the names and places of a document's tables.
    pub(crate) fn tables(&self) -> Vec<(String, Place)> {
        let Value::Table(entries) = &self.value else { return Vec::new() };
        let tables = entries.iter().filter(|(_, node)| matches!(node.value, Value::Table(_)));
        tables.map(|(name, node)| (name.clone(), node.place.clone())).collect()
    }

    fn convert(value: &DeValue, offset: usize, at: &dyn Fn(usize) -> Place) -> Result<Self> {
        let place = at(offset);
        let invalid =
            |message: String| ConfigError { place: place.clone(), problem: Problem::Syntax { message } };
        let value = match value {
            DeValue::String(s) => Value::String(s.to_string()),
            DeValue::Integer(i) => {
                Value::Integer(i64::from_str_radix(i.as_str(), i.radix()).map_err(|_| {
                    invalid(format!("integer {}: expected one from {} to {}", i.as_str(), i64::MIN, i64::MAX))
                })?)
            }
            DeValue::Float(x) => {
                Value::Float(x.as_str().parse().map_err(|e| invalid(format!("number {}: {e}", x.as_str())))?)
            }
            DeValue::Boolean(b) => Value::Boolean(*b),
            DeValue::Datetime(d) => Value::Other(d.to_string()),
            DeValue::Array(items) => Value::Array(
                items
                    .iter()
                    .map(|v| Self::convert(v.get_ref(), v.span().start, at))
                    .collect::<Result<_, _>>()?,
            ),
            DeValue::Table(entries) => Value::Table(
                entries
                    .iter()
                    .map(|(k, v)| {
                        // A dotted table's span starts nowhere useful; its key's does.
                        let node = Self::convert(v.get_ref(), k.span().start, at)?;
                        Ok((k.get_ref().to_string(), node))
                    })
                    .collect::<Result<_, _>>()?,
            ),
        };
        Ok(Self { place, value })
    }
}

impl Value {
    /// Returns the value in a message's words, with its type where that is not obvious.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::String(s) => format!("the string {s:?}"),
            Self::Integer(i) => format!("the integer {i}"),
            Self::Float(x) => format!("the number {x:?}"),
            Self::Boolean(b) => format!("{b}"),
            Self::Array(_) => "a list".into(),
            Self::Table(_) => "a table".into(),
            Self::Other(text) => format!("the date {text}"),
        }
    }
}

/// Places of all keys of a document, for checks that compare keys after all of them were read.
pub(super) struct Places(HashMap<String, Place>);

impl Places {
    pub(crate) fn new(tree: &Node, file: &Path) -> Self {
        let root = Place::File { path: file.to_path_buf(), line: None };
        let mut places = HashMap::from([(String::new(), root)]);
        collect("", tree, &mut places);
        Self(places)
    }

    /// Returns whether the document has a key.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    /// Returns the error for a key that contradicts another. A key that is not in the document has
    /// the place of its table.
    pub(crate) fn conflict(&self, key: &str, reason: impl Into<String>) -> ConfigError {
        let mut of = key;
        let place = loop {
            match self.0.get(of) {
                Some(place) => break place.clone(),
                None => of = of.rfind(['.', '[']).map_or("", |end| &of[..end]),
            }
        };
        ConfigError { place, problem: Problem::Conflict { key: key.to_owned(), reason: reason.into() } }
    }
}

fn collect(key: &str, node: &Node, places: &mut HashMap<String, Place>) {
    let inner: Vec<(String, &Node)> = match &node.value {
        Value::Table(entries) if key.is_empty() => {
            entries.iter().map(|(name, node)| (name.clone(), node)).collect()
        }
        Value::Table(entries) => entries.iter().map(|(name, node)| (format!("{key}.{name}"), node)).collect(),
        Value::Array(items) => {
            items.iter().enumerate().map(|(index, node)| (format!("{key}[{index}]"), node)).collect()
        }
        _ => return,
    };
    for (key, node) in inner {
        collect(&key, node, places);
        places.insert(key, node.place.clone());
    }
}

/// Byte offsets to line numbers.
struct Lines {
    starts: Vec<usize>,
}

impl Lines {
    fn new(text: &str) -> Self {
        Self { starts: std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect() }
    }

    /// Returns the 1-based line of a byte offset.
    fn line(&self, offset: usize) -> usize {
        self.starts.partition_point(|&s| s <= offset)
    }
}
