//! Tables and values of the tree as they are read. A value is checked for its type and range; a key
//! that was never asked for is unknown.

use std::ops::RangeInclusive;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use super::error::{ConfigError, Place, Problem, Result};
use super::hub::Lookup;
use super::tree::{Node, Value};

/// The file that is read.
struct Origin {
    /// Path, which relative paths in the file are relative to.
    path: PathBuf,
    /// Whether a run wrote the file, which may then have former names of keys.
    is_resolved: bool,
    lookup: Lookup,
}

/// A table being read.
pub(super) struct Section {
    /// Full name, empty at the root.
    prefix: String,
    /// Place of the table, or of the table around it.
    place: Place,
    origin: Rc<Origin>,
    entries: Vec<(String, Node)>,
    /// Keys asked for so far.
    known: Vec<&'static str>,
}

/// A value being read.
#[derive(Clone)]
pub(super) struct Entry {
    pub key: String,
    node: Node,
    origin: Rc<Origin>,
}

impl Section {
    /// Creates the section of a whole document.
    pub(crate) fn root(tree: Node, path: &Path, is_resolved: bool, lookup: &Lookup) -> Self {
        let place = Place::File { path: path.to_path_buf(), line: None };
        let Value::Table(entries) = tree.value else { unreachable!("a document is a table") };
        let origin = Rc::new(Origin { path: path.to_path_buf(), is_resolved, lookup: lookup.clone() });
        Self { prefix: String::new(), place, origin, entries, known: Vec::new() }
    }

    /// Returns whether the table has a key, and makes the key known.
    pub(crate) fn has(&mut self, key: &'static str) -> bool {
        self.know(key);
        self.entries.iter().any(|(k, _)| k == key)
    }

    pub(crate) fn take(&mut self, key: &'static str) -> Option<Entry> {
        self.know(key);
        self.remove(key, key)
    }

    fn know(&mut self, key: &'static str) {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
    }

    /// Takes a key's value. A `former` name is accepted in a file that a run wrote.
    pub(crate) fn take_renamed(&mut self, key: &'static str, former: Option<&str>) -> Result<Option<Entry>> {
        let Some(former) = former else { return Ok(self.take(key)) };
        let is_former = |(name, node): &(String, Node)| {
            name == former && !(self.origin.is_resolved && matches!(node.place, Place::File { .. }))
        };
        if self.entries.iter().any(is_former) {
            self.moved(former, &self.full(key))?;
        }
        let entry = self.take(key);
        Ok(entry.or_else(|| self.remove(former, key)))
    }

    fn remove(&mut self, key: &str, name: &str) -> Option<Entry> {
        let index = self.entries.iter().position(|(k, _)| k == key)?;
        let (_, node) = self.entries.remove(index);
        Some(Entry { key: self.full(name), node, origin: self.origin.clone() })
    }

    /// Returns whether the table has the second of two exclusive keys rather than the first.
    pub(crate) fn has_second(&mut self, first: &str, second: &str) -> Result<bool> {
        let find = |key| self.entries.iter().position(|(k, _)| k == key);
        let (Some(a), Some(b)) = (find(first), find(second)) else { return Ok(find(second).is_some()) };
        let is_override = |index: usize| matches!(self.entries[index].1.place, Place::Set { .. });
        if is_override(a) == is_override(b) {
            let reason = format!("`{}` is given too; remove one of the two", self.full(first));
            let problem = Problem::Conflict { key: self.full(second), reason };
            return Err(ConfigError { place: self.entries[b].1.place.clone(), problem });
        }
        let is_second = is_override(b);
        self.entries.remove(if is_second { a } else { b });
        Ok(is_second)
    }

    /// Takes a nested table; an absent one is empty.
    pub(crate) fn section(&mut self, key: &'static str) -> Result<Self> {
        match self.take(key) {
            Some(entry) => entry.section(),
            None => Ok(Self {
                prefix: self.full(key),
                place: self.place.clone(),
                origin: self.origin.clone(),
                entries: Vec::new(),
                known: Vec::new(),
            }),
        }
    }

    /// Takes every entry that is left, for tables whose keys are not fixed.
    pub(crate) fn drain(&mut self) -> Vec<Entry> {
        let entries = std::mem::take(&mut self.entries);
        let entry =
            |(key, node): (String, Node)| Entry { key: self.full(&key), node, origin: self.origin.clone() };
        entries.into_iter().map(entry).collect()
    }

    /// Returns the error for a missing key; `give` says what to write. A slip in the key's name is
    /// reported instead.
    pub(crate) fn missing(&self, key: &str, give: &str) -> ConfigError {
        let is_slip = |name: &str| strsim::damerau_levenshtein(name, key) * 4 <= key.len();
        if let Some((name, node)) = self.entries.iter().find(|(name, _)| is_slip(name)) {
            return self.unknown(name, node, Some(key));
        }
        let problem = Problem::Missing { key: self.full(key), expected: give.to_owned() };
        ConfigError { place: self.place.clone(), problem }
    }

    /// Refuses a key that has another name now.
    pub(crate) fn moved(&self, key: &str, now: &str) -> Result<()> {
        let Some((_, node)) = self.entries.iter().find(|(k, _)| k == key) else { return Ok(()) };
        let reason = format!("it was renamed to `{now}`; use that name");
        let problem = Problem::Conflict { key: self.full(key), reason };
        Err(ConfigError { place: node.place.clone(), problem })
    }

    /// Refuses a key that was not taken.
    pub(crate) fn finish(self) -> Result<()> {
        let Some((key, node)) = self.entries.first() else { return Ok(()) };
        Err(self.unknown(key, node, nearest(key, &self.known)))
    }

    fn unknown(&self, key: &str, node: &Node, nearest: Option<&str>) -> ConfigError {
        let nearest = nearest.map(|key| self.full(key));
        let problem = Problem::UnknownKey { key: self.full(key), nearest, known: self.known.clone() };
        ConfigError { place: node.place.clone(), problem }
    }

    fn full(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_owned() } else { format!("{}.{key}", self.prefix) }
    }
}

impl Entry {
    /// Returns the last part of the key.
    pub(crate) fn name(&self) -> &str {
        self.key.rsplit('.').next().unwrap_or(&self.key)
    }

    /// Returns the place of the value.
    pub(crate) fn place(&self) -> &Place {
        &self.node.place
    }

    /// Returns the local paths of names of the hub.
    pub(crate) fn lookup(&self) -> &Lookup {
        &self.origin.lookup
    }

    /// Returns whether the value is exactly this string.
    pub(crate) fn is_string(&self, text: &str) -> bool {
        matches!(&self.node.value, Value::String(s) if s == text)
    }

    /// Returns whether the value is a list.
    pub(crate) fn is_list(&self) -> bool {
        matches!(self.node.value, Value::Array(_))
    }

    /// Returns the error for a value of the wrong type or range.
    pub(crate) fn wrong(&self, expected: impl Into<String>) -> ConfigError {
        let (key, found) = (self.key.clone(), self.node.value.describe());
        self.error(Problem::Value { key, expected: expected.into(), found })
    }

    /// Returns the error for a value that contradicts another.
    pub(crate) fn conflict(&self, reason: impl Into<String>) -> ConfigError {
        self.error(Problem::Conflict { key: self.key.clone(), reason: reason.into() })
    }

    fn error(&self, problem: Problem) -> ConfigError {
        ConfigError { place: self.node.place.clone(), problem }
    }

    pub(crate) fn section(self) -> Result<Section> {
        match self.node.value {
            Value::Table(entries) => Ok(Section {
                prefix: self.key,
                place: self.node.place,
                origin: self.origin,
                entries,
                known: Vec::new(),
            }),
            _ => Err(self.wrong("a table")),
        }
    }

    /// Returns a list's items, or the value itself as the only item.
    pub(crate) fn items(self) -> Vec<Self> {
        let Value::Array(nodes) = self.node.value else { return vec![self] };
        let item =
            |(index, node)| Self { key: format!("{}[{index}]", self.key), node, origin: self.origin.clone() };
        nodes.into_iter().enumerate().map(item).collect()
    }

    /// Returns a list's items; `None` for another value.
    pub(crate) fn items_of_list(self) -> Option<Vec<Self>> {
        matches!(self.node.value, Value::Array(_)).then(|| self.items())
    }

    pub(crate) fn string(&self) -> Result<&str> {
        match &self.node.value {
            Value::String(s) => Ok(s),
            _ => Err(self.wrong("a string")),
        }
    }

    pub(crate) fn boolean(&self) -> Result<bool> {
        match self.node.value {
            Value::Boolean(b) => Ok(b),
            _ => Err(self.wrong("true or false")),
        }
    }

    pub(crate) fn integer(&self, range: RangeInclusive<u64>) -> Result<u64> {
        match self.node.value {
            Value::Integer(i) if u64::try_from(i).is_ok_and(|i| range.contains(&i)) => Ok(i as u64),
            _ if *range.end() >= i64::MAX as u64 => {
                Err(self.wrong(format!("an integer of at least {}", range.start())))
            }
            _ => Err(self.wrong(format!("an integer from {} to {}", range.start(), range.end()))),
        }
    }

    /// Reads a number (an integer counts) that f32 holds, in which it is computed with, and for which `is_valid` holds;
    /// `expected` describes it.
    pub(crate) fn number(&self, expected: &str, is_valid: impl Fn(&f64) -> bool) -> Result<f64> {
        let x = match self.node.value {
            Value::Float(x) => x,
            Value::Integer(i) => i as f64,
            _ => return Err(self.wrong(expected)),
        };
        match x as f32 {
            _ if !x.is_finite() || !is_valid(&x) => Err(self.wrong(expected)),
            rounded if rounded.is_infinite() || (rounded == 0.0 && x != 0.0) => {
                Err(self.wrong("a number that f32 holds, 0 or from 1e-45 to 3e38 in size"))
            }
            _ => Ok(x),
        }
    }

    pub(crate) fn one_of<T: Copy>(&self, choices: &[(&str, T)]) -> Result<T> {
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

    /// Reads a path and makes it absolute. A path in a file is relative to the file's folder, a path
    /// in an override to the current directory.
    pub(crate) fn path(&self) -> Result<PathBuf> {
        let text = self.string()?;
        if text.is_empty() {
            return Err(self.wrong("a path"));
        }
        if text == "~" || text.starts_with("~/") {
            return Err(
                self.wrong("a path without `~`, which only a shell replaces; write the home folder's name")
            );
        }
        let base = match self.node.place {
            Place::File { .. } => self.origin.path.parent().unwrap_or(Path::new("")),
            Place::Set { .. } => Path::new(""),
        };
        let joined = std::path::absolute(base.join(text)).map_err(|e| self.wrong(format!("a path ({e})")))?;
        let path = tidy(&joined);
        if path.to_str().is_none() {
            return Err(self.wrong(format!(
                "a path in folders whose names are UTF-8, for a run keeps it as text; here it is {}",
                path.display()
            )));
        }
        Ok(path)
    }
}

/// Drops `.` and resolves `..` by name only, so that the path need not exist. A `..` after a
/// symbolic link stays: to the system it means another folder.
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

/// Returns the known name that `text` is most likely a slip for.
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
