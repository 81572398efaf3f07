//! Files of a tokenizer: on disk, or in a GGUF file.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use tandem_files::{MAX_CONFIG, MAX_TABLE, TokenizerOverride};
use tandem_gguf::{FolderFiles, Gguf, GgufError};

use crate::error::DataError;

/// Files that define tokens.
const TOKEN_FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];

/// Folder with the files of a tokenizer, or a GGUF file that stands for one; before its files come those of
/// an adapter's folder.
pub(super) struct TokenizerFolder {
    base: Base,
    adapter: Option<TokenizerOverride>,
}

enum Base {
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
    /// Opens a folder or a GGUF file, and the folder of an adapter that was trained on the model.
    ///
    /// # Errors
    /// If there is none, or the GGUF file's tokenizer is malformed or of an unsupported kind.
    pub(super) fn open(path: &Path, adapter: Option<&Path>) -> Result<Self, DataError> {
        let broken = |error: GgufError| match error {
            GgufError::Io { path, source } => DataError::io("reading", &path)(source),
            GgufError::Format { path, reason } => DataError::Tokenizer { path, reason },
        };
        let overrides = |folder: &Path| {
            let config = folder.join("tokenizer_config.json");
            TokenizerOverride::open(folder).map_err(DataError::io("reading", &config))
        };
        let adapter = adapter.map(overrides).transpose()?;
        if let Some(path) = tandem_gguf::find(path).map_err(broken)? {
            let files = Gguf::open(&path).and_then(|gguf| gguf.tokenizer_files()).map_err(broken)?;
            return Ok(Self { base: Base::Gguf { path, files }, adapter });
        }
        if !path.is_dir() {
            return Err(DataError::Tokenizer { path: path.to_owned(), reason: "no such folder".into() });
        }
        Ok(Self { base: Base::Disk(path.to_owned()), adapter })
    }

    /// Returns the adapter's folder, if its file of that name is used.
    pub(super) fn overriding(&self, name: &str) -> Option<&Path> {
        let adapter = self.adapter.as_ref()?;
        adapter.names().contains(&name).then(|| adapter.folder())
    }

    /// Returns whether the adapter's folder has files that define tokens, other than the base's.
    pub(super) fn changes_tokens(&self) -> Result<bool, DataError> {
        for name in TOKEN_FILES {
            if let Some(folder) = self.overriding(name) {
                let path = folder.join(name);
                let bytes =
                    tandem_files::read(&path, limit(name)).map_err(DataError::io("reading", &path))?;
                if self.base.read(name)?.is_none_or(|base| base != bytes) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Returns the folder of the chat template's files.
    pub(super) fn template_folder(&self) -> &Path {
        match (&self.adapter, &self.base) {
            (Some(adapter), _) if adapter.replaces_template() => adapter.folder(),
            (_, Base::Disk(path) | Base::Gguf { path, .. }) => path,
        }
    }

    /// Returns the path of a file, for messages.
    pub(super) fn place(&self, name: &str) -> PathBuf {
        match (self.overriding(name), &self.base) {
            (Some(folder), _) => folder.join(name),
            (None, Base::Disk(folder)) => folder.join(name),
            (None, Base::Gguf { path, .. }) => path.clone(),
        }
    }

    /// Reads a file, if it exists.
    pub(super) fn read(&self, name: &str) -> Result<Option<Vec<u8>>, DataError> {
        match (self.overriding(name), &self.adapter) {
            (Some(folder), _) => Base::Disk(folder.to_owned()).read(name),
            (None, Some(adapter)) if adapter.hides(name) => Ok(None),
            _ => self.base.read(name),
        }
    }

    /// Reads a file that must exist.
    pub(super) fn require(&self, name: &str) -> Result<Vec<u8>, DataError> {
        match self.overriding(name) {
            Some(folder) => Base::Disk(folder.to_owned()).require(name),
            None => self.base.require(name),
        }
    }
}

impl Base {
    fn read(&self, name: &str) -> Result<Option<Vec<u8>>, DataError> {
        match self {
            Self::Disk(_) => match self.require(name) {
                Err(DataError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(None),
                found => found.map(Some),
            },
            Self::Gguf { files, .. } => Ok(files.get(name).map(<[u8]>::to_vec)),
        }
    }

    fn require(&self, name: &str) -> Result<Vec<u8>, DataError> {
        match self {
            Self::Disk(folder) => {
                let path = folder.join(name);
                let others = ["tokenizer.model", "vocab.json"].map(|other| folder.join(other));
                match others.into_iter().find(|other| name == TOKENIZER && !path.exists() && other.exists()) {
                    Some(other) => Err(DataError::Tokenizer {
                        path: other,
                        reason: format!(
                            "is not read: {TOKENIZER} is needed, which \
                             AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes"
                        ),
                    }),
                    None => tandem_files::read(&path, limit(name)).map_err(DataError::io("reading", &path)),
                }
            }
            Self::Gguf { path, files } => files
                .get(name)
                .map(<[u8]>::to_vec)
                .ok_or_else(|| DataError::Tokenizer { path: path.clone(), reason: format!("has no {name}") }),
        }
    }
}

/// File that every tokenizer has.
const TOKENIZER: &str = "tokenizer.json";

/// Returns the limit of a file: of the list of tokens, and of what is parsed as a tree of values.
fn limit(name: &str) -> u64 {
    if name == TOKENIZER { MAX_TABLE } else { MAX_CONFIG }
}
