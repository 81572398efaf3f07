//! GGUF files, versions 2 and 3: header, dequantisation, and the files of the HF folder that they
//! stand for.
//!
//! Format: `docs/gguf.md` of ggml. Dequantised values equal those of PyPI's `gguf` bit for bit.
//! Counts and sizes are checked against the length of the file before anything is allocated.

#![warn(unreachable_pub)]

mod config;
mod folder;
mod header;
mod names;
mod pre_tokenizer;
mod quants;
mod tokenizer;

use std::path::{Path, PathBuf};

pub use folder::{FolderFiles, find};
pub use header::{Gguf, TensorInfo, Value};
pub use names::{Mapped, Transform};
pub use quants::Quant;

/// Failure to read a GGUF file.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "fields are explained by the messages that print them")]
pub enum GgufError {
    /// The operating system refused a file.
    #[error("{path}")]
    Io { path: PathBuf, source: std::io::Error },
    /// A malformed or unsupported file.
    #[error("{path}: {reason}")]
    Format { path: PathBuf, reason: String },
}

impl GgufError {
    fn format(path: &Path, reason: impl Into<String>) -> Self {
        Self::Format { path: path.to_owned(), reason: reason.into() }
    }

    fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
}

/// Result of reading a GGUF file.
pub type Result<T, E = GgufError> = std::result::Result<T, E>;
