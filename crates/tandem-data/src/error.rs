//! What can be wrong with data, each said with the place, what was expected, what was found and what to do.

use std::path::{Path, PathBuf};

pub use crate::place::Place;

/// A mistake in the data, the tokenizer's folder or the cache's file system.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The operating system refused a read or a write.
    #[error("{what} {}{}", path.display(), advice(source))]
    Io {
        /// What was attempted, as in "reading".
        what: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A line or an array element is not JSON.
    #[error("{place}: not valid JSON: {reason}")]
    Json {
        /// File and line.
        place: Place,
        /// The parser's words.
        reason: String,
    },
    /// A row does not have the keys of any known shape.
    #[error("{place}: expected the keys {expected}, found {found}{}", hint.as_ref().map_or(String::new(), |h| format!("; {h}")))]
    Keys {
        /// File and line.
        place: Place,
        /// The key sets that are understood.
        expected: &'static str,
        /// The keys of this row.
        found: String,
        /// The nearest key on a typo, or another piece of advice.
        hint: Option<String>,
    },
    /// A value has another type than its key needs.
    #[error("{place}: `{key}` should be {expected}, found {found}")]
    Type {
        /// File and line.
        place: Place,
        /// The key, with its path inside the row.
        key: String,
        /// The types accepted.
        expected: &'static str,
        /// The type found, with the beginning of the value.
        found: String,
    },
    /// Rows of one data set have different shapes.
    #[error(
        "{place}: this row is {found}, but the first row ({first}) is {expected}; all rows of a data set need the same shape"
    )]
    MixedShapes {
        /// File and line.
        place: Place,
        /// The shape of this row.
        found: String,
        /// File and line of the first row.
        first: Place,
        /// The first row's shape.
        expected: String,
    },
    /// The rows have a shape that the method cannot use.
    #[error("{place}: the rows are {found}, {method} needs {expected}")]
    WrongKind {
        /// File and line.
        place: Place,
        /// The shape found.
        found: String,
        /// The training method, in words.
        method: &'static str,
        /// The shapes it takes.
        expected: &'static str,
    },
    /// There is no row at all.
    #[error("no rows in {files}: expected at least one JSON object")]
    Empty {
        /// The files read.
        files: String,
    },
    /// A file is not what it was when its hash was taken, so its tokens have no name.
    #[error("{files}: changed while it was tokenised; nothing was kept: run again when nobody writes it")]
    Changed {
        /// The files read.
        files: String,
    },
    /// Every row was dropped.
    #[error("no row is left of {files}:\n{report}")]
    NothingLeft {
        /// The files read.
        files: String,
        /// Why they were dropped.
        report: String,
    },
    /// The tokenizer's folder has no chat template, but the data are conversations.
    #[error(
        "{}: no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json), but the data are conversations; \
         add a template to the model's folder or use plain text", folder.display()
    )]
    NoChatTemplate {
        /// The tokenizer's folder.
        folder: PathBuf,
    },
    /// The chat template could not be compiled or does not run.
    #[error("chat template: {reason}")]
    Template {
        /// The template engine's words, with the template's line.
        reason: String,
    },
    /// A conversation's beginning renders differently from the whole, so the assistant's part cannot be located.
    #[error(
        "the chat template renders the beginning of a conversation (up to message {message}) differently from the whole: \
         expected {expected:?}, found {found:?}; the assistant's tokens cannot be told apart that way. \
         Put {{% generation %}} … {{% endgeneration %}} around the assistant's text in the template, or set loss_on = \"all\""
    )]
    NotPrefixConsistent {
        /// Index of the message after which the two differ.
        message: usize,
        /// What the whole conversation has at that place.
        expected: String,
        /// What the beginning alone has there.
        found: String,
    },
    /// The tokenizer cannot be loaded, or refuses a text.
    #[error("tokenizer {}: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// An error in one row, with its place.
    #[error("{place}: {error}")]
    Row {
        /// File and line.
        place: Place,
        /// What is wrong with the row.
        error: Box<DataError>,
    },
    /// A configuration value that makes no sense.
    #[error("{0}")]
    Option(String),
    /// A batch could not be built.
    #[error(transparent)]
    Forest(#[from] tandem_kernels::KernelError),
}

impl DataError {
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { what, path, source }
    }

    pub(crate) fn at(self, place: Place) -> Self {
        Self::Row { place, error: Box::new(self) }
    }
}

fn advice(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind;
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            " (nothing half-written was left; free space there or put the cache elsewhere)"
        }
        _ => "",
    }
}
