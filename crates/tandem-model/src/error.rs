//! The crate's error.

use std::path::{Path, PathBuf};

use tandem_kernels::KernelError;

/// Failure to read, write or run a model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A kernel refused its operands, or memory ran out.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The operating system refused a file.
    #[error("{path}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A malformed file: cut short, not JSON, an unknown pickle.
    #[error("{path}: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// Problem with the file.
        reason: String,
    },
    /// A config that asks for something unsupported, or contradicts itself.
    #[error("{path}: {reason}")]
    Config {
        /// Config file.
        path: PathBuf,
        /// Key, value found and values supported.
        reason: String,
    },
    /// Tensors that are not those of the config.
    #[error("{path}: {} of the tensors do not fit {config}:\n  {}", problems.len(), problems.join("\n  "))]
    Tensors {
        /// Folder or file.
        path: PathBuf,
        /// Name of the config.
        config: &'static str,
        /// One line per tensor: expected and found.
        problems: Vec<String>,
    },
    /// Failure of a weight source or a gradient sink.
    #[error(transparent)]
    Store(Box<dyn std::error::Error + Send + Sync>),
    /// A call that breaks its contract.
    #[error("{0}")]
    Invalid(String),
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
