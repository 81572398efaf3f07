//! Mistakes in a config: place, problem and remedy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

pub(super) type Result<T, E = ConfigError> = std::result::Result<T, E>;

/// A mistake in the config file or in an override.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct ConfigError {
    /// Place of the offending text.
    pub place: Place,
    /// The problem.
    pub problem: Problem,
}

/// Place of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A 1-based line of the file; no line for something missing from it.
    File {
        /// The config file.
        path: PathBuf,
        /// The line.
        line: Option<usize>,
    },
    /// An override.
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

/// A problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot read the config file: {reason}")]
    Unreadable {
        /// The system's message.
        reason: String,
    },
    /// Not TOML, or not `key=value`.
    #[error("{message}")]
    Syntax {
        /// The parser's message.
        message: String,
    },
    /// An unknown key.
    #[error("unknown key `{key}`; {}", suggestion(nearest.as_deref(), known))]
    UnknownKey {
        /// The full key.
        key: String,
        /// The most similar known key.
        nearest: Option<String>,
        /// The keys of that table.
        known: Vec<&'static str>,
    },
    /// A key of another program, or one of ours outside its table.
    #[error("unknown key `{key}`; {advice}")]
    ForeignKey {
        /// The full key.
        key: String,
        /// Replacement to write, or the reason why none is needed.
        advice: String,
    },
    /// A required key that is missing.
    #[error("`{key}` is missing: give {expected}")]
    Missing {
        /// The full key.
        key: String,
        /// Value to give.
        expected: String,
    },
    /// A value of the wrong type, out of range or not among the choices.
    #[error("`{key}`: expected {expected}, found {found}")]
    Value {
        /// The full key.
        key: String,
        /// Type and range expected.
        expected: String,
        /// Value found.
        found: String,
    },
    /// A name of the hub that cannot be resolved.
    #[error("`{key}` ({remark}): {reason}")]
    Hub {
        /// The full key.
        key: String,
        /// Text of the name, and whether it is a path that is missing.
        remark: String,
        /// The failure.
        reason: String,
        /// Whether the user can mend it, rather than the network or the disk.
        is_mistake: bool,
    },
    /// A value that contradicts another.
    #[error("`{key}`: {reason}")]
    Conflict {
        /// The full key.
        key: String,
        /// Contradiction and remedy.
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
    /// Returns whether the user can mend it. All but failures of the network or the disk are mistakes.
    pub fn is_mistake(&self) -> bool {
        !matches!(self.problem, Problem::Hub { is_mistake: false, .. })
    }

    pub(super) fn unreadable(path: &Path, source: &io::Error) -> Self {
        let problem = Problem::Unreadable { reason: source.to_string() };
        Self { place: Place::File { path: path.to_path_buf(), line: None }, problem }
    }
}
