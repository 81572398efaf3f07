//! Taking values out of the tree, each with its type and range checked; what is left over is an unknown key.

use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};

use super::error::{ConfigError, Place, Problem};
use super::tree::{Node, Value};

/// A table being read.
pub(super) struct Section {
    /// Dotted prefix, empty at the root.
    prefix: String,
    /// Where the table stands, or would stand.
    place: Place,
    /// The config file, which relative paths are relative to.
    file: PathBuf,
    entries: Vec<(String, Node)>,
    /// Every key asked for so far: what is known.
    known: Vec<&'static str>,
}

/// A value being read.
pub(super) struct Entry {
    pub key: String,
    pub node: Node,
    file: PathBuf,
}

/// One of two keys of which only one may be given.
pub(super) enum Either {
    First(Entry),
    Second(Entry),
}

impl Section {
    /// The whole document.
    pub fn root(tree: Node, file: &Path) -> Result<Self, ConfigError> {
        let place = Place::File { path: file.to_path_buf(), line: None };
        let Value::Table(entries) = tree.value else { unreachable!("a document is a table") };
        let (prefix, known) = (String::new(), Vec::new());
        Ok(Self { prefix, place, file: file.to_path_buf(), entries, known })
    }

    /// Takes a key's value.
    pub fn take(&mut self, key: &'static str) -> Option<Entry> {
        self.known.push(key);
        let index = self.entries.iter().position(|(k, _)| k == key)?;
        let (_, node) = self.entries.remove(index);
        Some(Entry { key: self.full(key), node, file: self.file.clone() })
    }

    /// Takes a key's value; its absence is an error that says what to `give`.
    pub fn required(&mut self, key: &'static str, give: &str) -> Result<Entry, ConfigError> {
        self.take(key).ok_or_else(|| self.missing(key, give))
    }

    /// Takes whichever of two exclusive keys is given. Both in one place contradict each other; an override replaces the
    /// file's choice whichever of the two it names.
    pub fn either(
        &mut self,
        first: &'static str,
        second: &'static str,
    ) -> Result<Option<Either>, ConfigError> {
        let overrides = |e: &Entry| matches!(e.node.place, Place::Set { .. });
        Ok(match (self.take(first), self.take(second)) {
            (Some(a), Some(b)) => match (overrides(&a), overrides(&b)) {
                (true, false) => Some(Either::First(a)),
                (false, true) => Some(Either::Second(b)),
                _ => return Err(b.conflict(format!("`{}` is given too; remove one of the two", a.key))),
            },
            (a, b) => a.map(Either::First).or(b.map(Either::Second)),
        })
    }

    /// The error for a key that must be there. Where it is there but for a slip or two, the slip is the error.
    pub fn missing(&self, key: &str, give: &str) -> ConfigError {
        let is_slip = |name: &str| strsim::damerau_levenshtein(name, key) * 4 <= key.len();
        if let Some((name, node)) = self.entries.iter().find(|(name, _)| is_slip(name)) {
            let nearest = Some(self.full(key));
            let problem = Problem::UnknownKey { key: self.full(name), nearest, known: self.known.clone() };
            return ConfigError { place: node.place.clone(), problem };
        }
        let problem = Problem::Missing { key: self.full(key), expected: give.to_string() };
        ConfigError { place: self.place.clone(), problem }
    }

    /// Takes a nested table; an absent one is empty.
    pub fn section(&mut self, key: &'static str) -> Result<Self, ConfigError> {
        match self.take(key) {
            Some(entry) => entry.section(),
            None => Ok(Self {
                prefix: self.full(key),
                place: self.place.clone(),
                file: self.file.clone(),
                entries: Vec::new(),
                known: Vec::new(),
            }),
        }
    }

    /// Takes every entry that is left, for tables whose keys are not fixed.
    pub fn drain(&mut self) -> Vec<Entry> {
        let entries = std::mem::take(&mut self.entries);
        entries
            .into_iter()
            .map(|(k, node)| Entry { key: self.full(&k), node, file: self.file.clone() })
            .collect()
    }

    /// Refuses a key that stands elsewhere by now; it is not among those known.
    pub fn moved(&self, key: &str, now: &str) -> Result<(), ConfigError> {
        let Some((_, node)) = self.entries.iter().find(|(k, _)| k == key) else { return Ok(()) };
        let reason = format!("it is `{now}` now; write it there");
        let problem = Problem::Conflict { key: self.full(key), reason };
        Err(ConfigError { place: node.place.clone(), problem })
    }

    /// Refuses what was not taken.
    pub fn finish(self) -> Result<(), ConfigError> {
        let Some((key, node)) = self.entries.first() else { return Ok(()) };
        let nearest = nearest(key, &self.known).map(|k| self.full(k));
        let problem = Problem::UnknownKey { key: self.full(key), nearest, known: self.known.clone() };
        Err(ConfigError { place: node.place.clone(), problem })
    }

    /// Where each key stands that was not taken yet.
    pub fn places(&self) -> Vec<(String, Place)> {
        self.entries.iter().map(|(key, node)| (key.clone(), node.place.clone())).collect()
    }

    fn full(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_string() } else { format!("{}.{key}", self.prefix) }
    }
}

impl Entry {
    /// The last part of the key.
    pub fn name(&self) -> &str {
        self.key.rsplit('.').next().unwrap_or(&self.key)
    }

    /// Whether the value is exactly this string.
    pub fn is_string(&self, text: &str) -> bool {
        matches!(&self.node.value, Value::String(s) if s == text)
    }

    /// The error for a value that is not what was `expected`.
    pub fn wrong(&self, expected: impl Into<String>) -> ConfigError {
        let (key, found) = (self.key.clone(), self.node.value.describe());
        self.error(Problem::Value { key, expected: expected.into(), found })
    }

    /// The error for a value that contradicts another.
    pub fn conflict(&self, reason: impl Into<String>) -> ConfigError {
        self.error(Problem::Conflict { key: self.key.clone(), reason: reason.into() })
    }

    fn error(&self, problem: Problem) -> ConfigError {
        ConfigError { place: self.node.place.clone(), problem }
    }

    /// A table.
    pub fn section(self) -> Result<Section, ConfigError> {
        if !matches!(self.node.value, Value::Table(_)) {
            return Err(self.wrong("a table"));
        }
        let Value::Table(entries) = self.node.value else { unreachable!("checked above") };
        let (place, known) = (self.node.place, Vec::new());
        Ok(Section { prefix: self.key, place, file: self.file, entries, known })
    }

    /// Whether the value is a list.
    pub fn is_list(&self) -> bool {
        matches!(self.node.value, Value::Array(_))
    }

    /// A list's items, or the value itself as the only one.
    pub fn items(self) -> Vec<Self> {
        let (key, file) = (self.key, self.file);
        match self.node.value {
            Value::Array(nodes) => nodes
                .into_iter()
                .enumerate()
                .map(|(i, node)| Self { key: format!("{key}[{i}]"), node, file: file.clone() })
                .collect(),
            value => vec![Self { key, node: Node { place: self.node.place, value }, file }],
        }
    }

    /// A string.
    pub fn string(&self) -> Result<&str, ConfigError> {
        match &self.node.value {
            Value::String(s) => Ok(s),
            _ => Err(self.wrong("a string")),
        }
    }

    /// `true` or `false`.
    pub fn boolean(&self) -> Result<bool, ConfigError> {
        match self.node.value {
            Value::Boolean(b) => Ok(b),
            _ => Err(self.wrong("true or false")),
        }
    }

    /// An integer in a range.
    pub fn integer(&self, range: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        match self.node.value {
            Value::Integer(i) if u64::try_from(i).is_ok_and(|i| range.contains(&i)) => Ok(i as u64),
            _ if *range.end() >= i64::MAX as u64 => {
                Err(self.wrong(format!("an integer of at least {}", range.start())))
            }
            _ => Err(self.wrong(format!("an integer from {} to {}", range.start(), range.end()))),
        }
    }

    /// A finite number (integers count) for which `valid` holds; `expected` describes it.
    pub fn number(&self, expected: &str, valid: impl Fn(f64) -> bool) -> Result<f64, ConfigError> {
        let x = match self.node.value {
            Value::Float(x) => x,
            Value::Integer(i) => i as f64,
            _ => return Err(self.wrong(expected)),
        };
        if x.is_finite() && valid(x) { Ok(x) } else { Err(self.wrong(expected)) }
    }

    /// One of several names.
    pub fn one_of<T: Copy>(&self, choices: &[(&str, T)]) -> Result<T, ConfigError> {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let list = names.iter().map(|n| format!("{n:?}")).collect::<Vec<_>>().join(", ");
        let Value::String(text) = &self.node.value else {
            return Err(self.wrong(format!("one of {list}")));
        };
        if let Some((_, value)) = choices.iter().find(|(name, _)| name == text) {
            return Ok(*value);
        }
        let hint = nearest(text, &names).map(|n| format!(" (did you mean {n:?}?)")).unwrap_or_default();
        Err(self.wrong(format!("one of {list}{hint}")))
    }

    /// A path, made absolute: relative to the config file's folder or, from an override, to the current directory.
    pub fn path(&self) -> Result<PathBuf, ConfigError> {
        let text = self.string()?;
        if text.is_empty() {
            return Err(self.wrong("a path"));
        }
        let base = match self.node.place {
            Place::File { .. } => self.file.parent().unwrap_or(Path::new("")).to_path_buf(),
            Place::Set { .. } => PathBuf::new(),
        };
        let joined = std::path::absolute(base.join(text)).map_err(|e| self.wrong(format!("a path ({e})")))?;
        Ok(tidy(&joined))
    }
}

/// Drops `.` and resolves `..` by name only, so that a path that does not exist yet can be tidied too. A `..` after a
/// symbolic link would mean another folder to the system, so those that might be one are kept.
fn tidy(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if out.file_name().is_some() && !out.is_symlink() => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out
}

/// The known name that `text` is most likely a slip for.
pub(super) fn nearest<'a>(text: &str, known: &[&'a str]) -> Option<&'a str> {
    let score =
        |k: &str| strsim::normalized_damerau_levenshtein(text, k).max(strsim::jaro_winkler(text, k) - 0.2);
    known
        .iter()
        .copied()
        .map(|k| (score(k), k))
        .filter(|(s, _)| *s > 0.55)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, k)| k)
}
