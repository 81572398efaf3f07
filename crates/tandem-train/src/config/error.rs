//! What is wrong with a config, where, and what to do about it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A mistake in the config file or in an override.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct ConfigError {
    /// Where the offending text stands.
    pub place: Place,
    /// What is wrong with it.
    pub problem: Problem,
}

/// Where a value was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// In the file, at a 1-based line; no line where something is missing from it.
    File {
        /// The config file.
        path: PathBuf,
        /// The line.
        line: Option<usize>,
    },
    /// In an override.
    Set {
        /// The override's text, `key=value`.
        text: String,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, line: Some(line) } => write!(f, "{}:{line}", path.display()),
            Self::File { path, line: None } => write!(f, "{}", path.display()),
            Self::Set { text } => write!(f, "--set {text}"),
        }
    }
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot read the config file: {reason}")]
    Unreadable {
        /// The system's answer.
        reason: String,
    },
    /// Not TOML, or not `key=value`.
    #[error("{message}")]
    Syntax {
        /// The parser's message.
        message: String,
    },
    /// A key that does not exist.
    #[error("unknown key `{key}`; {}", suggestion(nearest.as_deref(), known))]
    UnknownKey {
        /// The full key.
        key: String,
        /// The known key most like it.
        nearest: Option<String>,
        /// The keys of that table.
        known: Vec<&'static str>,
    },
    /// A key without which there is no run.
    #[error("`{key}` is missing: give {expected}")]
    Missing {
        /// The full key.
        key: String,
        /// What to write.
        expected: String,
    },
    /// A value of the wrong type, out of range or not among the choices.
    #[error("`{key}`: expected {expected}, found {found}")]
    Value {
        /// The full key.
        key: String,
        /// What would be right.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// Values that contradict each other.
    #[error("`{key}`: {reason}")]
    Conflict {
        /// The key that came second.
        key: String,
        /// What contradicts what, and what to do.
        reason: String,
    },
}

fn suggestion(nearest: Option<&str>, known: &[&str]) -> String {
    match nearest {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => format!("known here: {}", known.join(", ")),
    }
}

impl ConfigError {
    pub(super) fn unreadable(path: &Path, source: &io::Error) -> Self {
        let problem = Problem::Unreadable { reason: source.to_string() };
        Self { place: Place::File { path: path.to_path_buf(), line: None }, problem }
    }
}
