//! Files of a data set and their weights.

mod arrow_ipc;
mod arrow_rows;
pub mod columns;
mod csv_rows;
pub(crate) mod files;
mod format;
mod json;
pub mod peek;
pub(crate) mod reader;
pub mod record;
pub mod shapes;

use std::path::PathBuf;

pub use files::listed_columns;
use serde::de::{Error as _, SeqAccess, Visitor, value::MapAccessDeserializer};
use serde::{Deserialize, Deserializer, Serialize};

/// One file with its weight.
///
/// The weight repeats or thins a file's rows. Row `j` (0-based, without blank lines) occurs
/// `⌊(j+1)·weight⌋ − ⌊j·weight⌋` times: weight 2 gives every row twice, 0.5 every second row, 1.5
/// one and two in turn. Repetitions follow as whole passes over the file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Source {
    /// A file, a pattern of files, or a folder that `save_to_disk` of datasets wrote.
    pub path: PathBuf,
    /// Positive weight; 1 keeps the file as it is.
    pub weight: f64,
}

impl Source {
    /// Creates a source of weight 1.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), weight: 1.0 }
    }

    /// Returns how often row `j` occurs in the data set.
    pub fn copies(&self, j: u64) -> u64 {
        ((j + 1) as f64 * self.weight).floor() as u64 - (j as f64 * self.weight).floor() as u64
    }
}

/// Files of a data set, in order.
///
/// TOML or JSON: a path, a list of paths, or a list of tables `{ path, weight }`, also mixed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Sources(pub Vec<Source>);

impl Sources {
    /// Returns the paths, in order.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.0.iter().map(|s| s.path.clone()).collect()
    }

    pub(crate) fn names(&self) -> String {
        self.0.iter().map(|s| s.path.display().to_string()).collect::<Vec<_>>().join(", ")
    }
}

impl<P: Into<PathBuf>> From<P> for Sources {
    fn from(path: P) -> Self {
        Self(vec![Source::new(path)])
    }
}

/// List entry: a path or a table.
struct Entry(Source);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    path: PathBuf,
    #[serde(default = "one")]
    weight: f64,
}

fn one() -> f64 {
    1.0
}

impl Table {
    fn check<E: serde::de::Error>(self) -> Result<Source, E> {
        let Self { path, weight } = self;
        if weight.is_finite() && weight > 0.0 {
            return Ok(Source { path, weight });
        }
        Err(E::custom(format!("weight of {} is {weight}, expected a positive number", path.display())))
    }
}

struct EntryVisitor;

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = Source;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a path or a table { path, weight }")
    }

    fn visit_str<E: serde::de::Error>(self, path: &str) -> Result<Source, E> {
        Ok(Source::new(path))
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<Source, A::Error> {
        Table::deserialize(MapAccessDeserializer::new(map))?.check()
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EntryVisitor).map(Entry)
    }
}

struct SourcesVisitor;

impl<'de> Visitor<'de> for SourcesVisitor {
    type Value = Sources;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("a path, a list of paths, or tables { path, weight }")
    }

    fn visit_str<E: serde::de::Error>(self, path: &str) -> Result<Sources, E> {
        Ok(Sources(vec![Source::new(path)]))
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, map: A) -> Result<Sources, A::Error> {
        Ok(Sources(vec![EntryVisitor.visit_map(map)?]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Sources, A::Error> {
        let mut sources = Vec::new();
        while let Some(Entry(source)) = seq.next_element()? {
            sources.push(source);
        }
        if sources.is_empty() {
            return Err(A::Error::custom("the list of data files is empty"));
        }
        Ok(Sources(sources))
    }
}

impl<'de> Deserialize<'de> for Sources {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SourcesVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Sources, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    #[test]
    fn the_three_notations_are_understood() {
        assert_eq!(parse(r#""a.jsonl""#).unwrap(), Sources::from("a.jsonl"));
        let mixed = parse(r#"["a.jsonl", {"path": "b.json", "weight": 0.5}, {"path": "c"}]"#).unwrap();
        assert_eq!(mixed.0.iter().map(|s| s.weight).collect::<Vec<_>>(), [1.0, 0.5, 1.0]);
    }

    #[test]
    fn bad_entries_are_refused_with_their_reason() {
        assert!(parse("[]").unwrap_err().contains("empty"));
        assert!(parse(r#"[{"path": "a", "weight": 0}]"#).unwrap_err().contains("positive"));
        assert!(parse(r#"[{"path": "a", "wieght": 1}]"#).unwrap_err().contains("wieght"));
        assert!(parse("3").unwrap_err().contains("a path, a list of paths"));
    }

    #[test]
    fn weights_repeat_and_thin_evenly() {
        let copies = |weight| {
            let source = Source { path: "a".into(), weight };
            (0..6).map(|j| source.copies(j)).collect::<Vec<_>>()
        };
        assert_eq!(copies(1.0), [1; 6]);
        assert_eq!(copies(2.0), [2; 6]);
        assert_eq!(copies(0.5), [0, 1, 0, 1, 0, 1]);
        assert_eq!(copies(1.5), [1, 2, 1, 2, 1, 2]);
        assert_eq!(copies(1.0 / 3.0).iter().sum::<u64>(), 2);
    }
}
