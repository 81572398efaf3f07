//! Files of a tokenizer: on disk, or in a GGUF file.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use tandem_files::{MAX_CONFIG, MAX_TABLE};
use tandem_gguf::{FolderFiles, Gguf, GgufError};

use crate::error::DataError;

/// Folder with the files of a tokenizer, or a GGUF file that stands for one.
pub(super) enum TokenizerFolder {
    /// Folder on disk.
    Disk(PathBuf),
    /// Contents of a GGUF file.
    Gguf {
        /// The file, for messages.
        path: PathBuf,
        /// Files made from it.
        files: FolderFiles,
    },
}

impl TokenizerFolder {
    /// Opens a folder or a GGUF file.
    ///
    /// # Errors
    /// If there is none, or the GGUF file's tokenizer is malformed or of an unsupported kind.
    pub(super) fn open(path: &Path) -> Result<Self, DataError> {
        let broken = |error: GgufError| match error {
            GgufError::Io { path, source } => DataError::io("reading", &path)(source),
            GgufError::Format { path, reason } => DataError::Tokenizer { path, reason },
        };
        if let Some(path) = tandem_gguf::find(path).map_err(broken)? {
            let files = Gguf::open(&path).and_then(|gguf| gguf.tokenizer_files()).map_err(broken)?;
            return Ok(Self::Gguf { path, files });
        }
        if !path.is_dir() {
            return Err(DataError::Tokenizer { path: path.to_owned(), reason: "no such folder".into() });
        }
        Ok(Self::Disk(path.to_owned()))
    }

    /// Returns the path of a file, for messages.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        match self {
            Self::Disk(folder) => folder.join(name),
            Self::Gguf { path, .. } => path.clone(),
        }
    }

    /// Reads a file, if it exists.
    pub(super) fn read(&self, name: &str) -> Result<Option<Vec<u8>>, DataError> {
        match self {
            Self::Disk(_) => match self.require(name) {
                Err(DataError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
                found => found.map(Some),
            },
            Self::Gguf { files, .. } => Ok(files.get(name).map(<[u8]>::to_vec)),
        }
    }

    /// Reads a file that must exist.
    pub(super) fn require(&self, name: &str) -> Result<Vec<u8>, DataError> {
        let path = self.place(name);
        match self {
            Self::Disk(_) => tandem_files::read(&path, limit(name)).map_err(DataError::io("reading", &path)),
            Self::Gguf { files, .. } => files
                .get(name)
                .map(<[u8]>::to_vec)
                .ok_or_else(|| DataError::Tokenizer { path, reason: format!("has no {name}") }),
        }
    }
}

/// Returns the limit of a file: of the list of tokens, and of what is parsed as a tree of values.
fn limit(name: &str) -> u64 {
    if name == "tokenizer.json" { MAX_TABLE } else { MAX_CONFIG }
}
