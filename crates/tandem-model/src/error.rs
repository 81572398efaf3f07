//! The crate's error.

use std::path::{Path, PathBuf};

use tandem_kernels::KernelError;

/// Failure to read, write or run a model.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "fields are explained by the messages that print them")]
pub enum ModelError {
    /// A kernel refused its operands, or memory ran out.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The operating system refused a file.
    #[error("{path}")]
    Io { path: PathBuf, source: std::io::Error },
    /// A malformed file: cut short, not JSON, an unknown pickle.
    #[error("{path}: {reason}")]
    Format { path: PathBuf, reason: String },
    /// A config that asks for something unsupported, or contradicts itself.
    #[error("{path}: {reason}")]
    Config {
        path: PathBuf,
        /// Key, value found and values supported.
        reason: String,
    },
    /// Tensors that are not those of the config.
    #[error(
        "{path}: {} of the tensors {} not fit {config}:\n  {}",
        problems.len(), if problems.len() == 1 { "does" } else { "do" }, listed(problems)
    )]
    Tensors { path: PathBuf, config: &'static str, problems: Vec<String> },
    /// Logits to sample from that are not numbers.
    #[error(
        "the logits of token {token} of a completion are not finite: weights of the model are damaged, or too large for \
         the compute type"
    )]
    NotFinite {
        /// Its number in the completion, from 0.
        token: u64,
    },
    /// Failure of a weight source or a gradient sink.
    #[error(transparent)]
    Store(Box<dyn std::error::Error + Send + Sync>),
    /// A call that breaks its contract.
    #[error("{0}")]
    Invalid(String),
}

/// Problems that a message lists.
const LISTED: usize = 100;

/// Lists problems, one a line; of very many the first ones.
fn listed(problems: &[String]) -> String {
    let mut lines: Vec<&str> = problems.iter().take(LISTED).map(String::as_str).collect();
    let more = format!("… and {} more", problems.len() - lines.len());
    if problems.len() > LISTED {
        lines.push(&more);
    }
    lines.join("\n  ")
}

impl ModelError {
    /// Makes a [`ModelError::Io`].
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// Makes a [`ModelError::Format`].
    pub fn format(path: &Path, reason: impl Into<String>) -> Self {
        Self::Format { path: path.to_owned(), reason: reason.into() }
    }

    /// Wraps the error of a weight source or a gradient sink.
    pub fn store(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Store(error.into())
    }
}

impl From<tandem_gguf::GgufError> for ModelError {
    fn from(error: tandem_gguf::GgufError) -> Self {
        match error {
            tandem_gguf::GgufError::Io { path, source } => Self::Io { path, source },
            tandem_gguf::GgufError::Format { path, reason } => Self::Format { path, reason },
        }
    }
}
