//! A TOML document as a tree whose values remember where they were written, and overrides on it.

use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Place, Problem};

/// A value and its place.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub place: Place,
    pub value: Value,
}

/// A TOML value. Tables keep their entries unsorted; keys are unique.
#[derive(Clone, Debug)]
pub(super) enum Value {
    String(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
    Array(Vec<Node>),
    Table(Vec<(String, Node)>),
    /// Dates and times, which no key takes.
    Other(String),
}

impl Node {
    /// Parses a file's text.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
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
    pub fn set(&mut self, text: &str) -> Result<(), ConfigError> {
        let place = Place::Set { text: text.to_string() };
        let syntax =
            |message: String| ConfigError { place: place.clone(), problem: Problem::Syntax { message } };
        let Some((key, value)) = text.split_once('=') else {
            return Err(syntax("expected key=value, for example train.learning_rate=1e-4".into()));
        };
        let at = |_| place.clone();
        let value = match DeValue::parse(value.trim()) {
            Ok(parsed) => Self::convert(parsed.get_ref(), 0, &at)?,
            // Shells eat quotes; a bare word or path is meant as a string. Brackets show that TOML was meant.
            Err(error) if value.trim_start().starts_with(['[', '{', '"', '\'']) => {
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
                    "`{key}`: what stands before `.{part}` in the file is a value, not a table"
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

    fn convert(value: &DeValue, offset: usize, at: &dyn Fn(usize) -> Place) -> Result<Self, ConfigError> {
        let place = at(offset);
        let invalid =
            |message: String| ConfigError { place: place.clone(), problem: Problem::Syntax { message } };
        let value = match value {
            DeValue::String(s) => Value::String(s.to_string()),
            DeValue::Integer(i) => Value::Integer(
                i64::from_str_radix(i.as_str(), i.radix())
                    .map_err(|e| invalid(format!("integer {}: {e}", i.as_str())))?,
            ),
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
                        // A table's span starts at its header or, if dotted, nowhere useful; the key is always at hand.
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
    /// The value as a message shows it, with its type where that is not plain to see.
    pub fn describe(&self) -> String {
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

/// Byte offsets to line numbers.
struct Lines {
    starts: Vec<usize>,
}

impl Lines {
    fn new(text: &str) -> Self {
        Self { starts: std::iter::once(0).chain(text.match_indices('\n').map(|(i, _)| i + 1)).collect() }
    }

    /// 1-based line of a byte offset.
    fn line(&self, offset: usize) -> usize {
        self.starts.partition_point(|&s| s <= offset)
    }
}
