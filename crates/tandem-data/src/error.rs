//! Errors of reading and preparing data: place, expected, found, and the remedy.

use std::path::{Path, PathBuf};

pub use crate::place::Place;
use crate::source::record::ROLES;

/// An invalid row, tokenizer folder or cache file.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "fields are explained by the messages that print them")]
pub enum DataError {
    /// A failed read or write.
    #[error("{what} {}{}", path.display(), advice(source))]
    Io {
        /// The operation that failed, as in "reading".
        what: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    /// A line or an array element is not JSON.
    #[error("{place}: not valid JSON: {reason}")]
    Json { place: Place, reason: String },
    /// A row whose keys match no known shape.
    #[error("{place}: expected the keys {expected}, found {found}{}", hint.as_ref().map_or(String::new(), |h| format!("; {h}")))]
    Keys {
        place: Place,
        /// The accepted sets of keys.
        expected: &'static str,
        found: String,
        /// The nearest known key, or another remedy.
        hint: Option<String>,
    },
    /// A value of the wrong type.
    #[error("{place}: `{key}` should be {expected}, found {found}")]
    Type { place: Place, key: String, expected: &'static str, found: String },
    /// A message without content that calls no tool.
    #[error(
        "{place}: `{key}`: no `content`, found {found}; a message is {{ role, content }}, and may only lack the content \
         if it has `tool_calls`"
    )]
    NoContent {
        place: Place,
        key: String,
        /// The message's other fields.
        found: String,
    },
    /// A role that neither all templates nor the model's own know.
    #[error(
        "`{key}` should be {}, or a role that the chat template names, found {found:?}{}",
        ROLES.map(|role| format!("{role:?}")).join(", "), nearest_role(found)
    )]
    Role { key: String, found: String },
    /// A column with a part of the prompt, or with media, that nothing reads.
    #[error("{place}: the column `{column}` is not used: {why}; {remedy}")]
    UnusedColumn { place: Place, column: String, why: String, remedy: String },
    /// A column that `data.columns` names and the row lacks.
    #[error("{place}: no column `{column}`, which data.columns.{key} names; found {found}")]
    MappedColumn { place: Place, key: String, column: String, found: String },
    /// A row that is not of the shape that was named or recognised.
    #[error("{place}: not a row of the shape \"{shape}\": {reason}")]
    NotOfShape { place: Place, shape: &'static str, reason: String },
    /// A completion with a label.
    #[error(
        "{place}: {keys} and `{label}` are rows for method = \"kto\": half of them are bad examples. \
         Train on them with that method, or keep the rows whose label is true and remove `{label}`, or make pairs `prompt`, `chosen`, `rejected`"
    )]
    Labelled {
        place: Place,
        /// The keys beside the label.
        keys: &'static str,
        label: &'static str,
    },
    /// A line of a table that is not a row.
    #[error("{place}: {reason}")]
    Cells { place: Place, reason: String },
    /// A file that cannot be read as rows.
    #[error("{}: {reason}", path.display())]
    File { path: PathBuf, reason: String },
    /// Rows of different shapes in one data set.
    #[error(
        "{place}: this row is {found}, but the first row ({first}) is {expected}; all rows of a data set need the same shape"
    )]
    MixedShapes { place: Place, found: String, first: Place, expected: String },
    /// Rows of a shape that the method cannot train on.
    #[error("{place}: the rows are {found}, {method} needs {expected}")]
    WrongKind {
        place: Place,
        found: String,
        /// The training method, in words.
        method: &'static str,
        expected: &'static str,
    },
    /// A data set without rows.
    #[error("no rows in {files}: expected at least one row")]
    Empty { files: String },
    /// A file that changed while it was tokenised, so its cache key is wrong.
    #[error(
        "{files}: changed during tokenisation; no cache was written: run again when nothing writes to it"
    )]
    Changed { files: String },
    /// A data set of which every row was dropped.
    #[error("no row is left of {files}:\n{report}")]
    NothingLeft { files: String, report: String },
    /// Conversations, but a tokenizer folder without a chat template.
    #[error(
        "{}: no chat template (chat_template.jinja, or `chat_template` in tokenizer_config.json), but the data are conversations; \
         add a template to the model's folder or use plain text", folder.display()
    )]
    NoChatTemplate { folder: PathBuf },
    /// A chat template that does not compile or fails while rendering.
    #[error("chat template: {reason}")]
    Template {
        /// The template engine's message, with the template's line.
        reason: String,
    },
    /// A template in whose text the assistant's turns cannot be located.
    #[error(
        "the chat template writes the assistant's turns where they cannot be told apart from the rest; \
         put {{% generation %}} … {{% endgeneration %}} around the assistant's text in the template, or set loss_on = \"all\""
    )]
    AssistantNotFound,
    /// A tokenizer that cannot be loaded, or that rejects a text.
    #[error("tokenizer {}: {reason}", path.display())]
    Tokenizer { path: PathBuf, reason: String },
    /// An error in one row.
    #[error("{place}: {error}")]
    Row { place: Place, error: Box<DataError> },
    /// An invalid configuration value.
    #[error("{0}")]
    Option(String),
    /// A batch that could not be built.
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

fn nearest_role(found: &str) -> String {
    let known = ROLES.map(|role| (strsim::jaro_winkler(found, role), role));
    match known.into_iter().max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((likeness, role)) if likeness > 0.8 => format!("; did you mean {role:?}?"),
        _ => String::new(),
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
