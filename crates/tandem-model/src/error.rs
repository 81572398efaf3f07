//! What can go wrong with a model.

use std::path::{Path, PathBuf};

use tandem_kernels::KernelError;

/// A model could not be read, written or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A kernel refused its operands or memory ran out.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The operating system refused a file.
    #[error("{path}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file is not what its name promises: cut short, not JSON, an unknown pickle.
    #[error("{path}: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A `config.json` describes something that is not supported, or contradicts itself.
    #[error("{path}: {reason}")]
    Config {
        /// The config file.
        path: PathBuf,
        /// The key, what it says and what is supported.
        reason: String,
    },
    /// The folder's tensors are not the ones that its config asks for.
    #[error("{path}: {} of the tensors do not fit {config}:\n  {}", problems.len(), problems.join("\n  "))]
    Tensors {
        /// The folder or file.
        path: PathBuf,
        /// The name of the config.
        config: &'static str,
        /// One line per tensor: what was expected and what was found.
        problems: Vec<String>,
    },
    /// A weight source or a gradient sink failed.
    #[error(transparent)]
    Store(Box<dyn std::error::Error + Send + Sync>),
    /// A call that breaks its contract.
    #[error("{0}")]
    Invalid(String),
}

impl ModelError {
    /// Shorthand for [`ModelError::Io`].
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// Shorthand for [`ModelError::Format`].
    pub fn format(path: &Path, reason: impl Into<String>) -> Self {
        Self::Format { path: path.to_owned(), reason: reason.into() }
    }

    /// Wraps the error of a weight source or a gradient sink.
    pub fn store(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Store(error.into())
    }
}
