//! Errors of the hub.

use std::io;
use std::path::{Path, PathBuf};

/// The result of an operation of this crate.
pub type Result<T, E = HubError> = std::result::Result<T, E>;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The repository is not there, or not for this user.
    #[error(
        "{endpoint} shows no {kind} {repo} (HTTP {status}): check the name; if it is private, set HF_TOKEN to a token \
         that may read it{token}"
    )]
    NoRepository {
        /// Endpoint of the hub.
        endpoint: String,
        /// "model" or "data set".
        kind: &'static str,
        /// Owner and name.
        repo: String,
        /// HTTP status.
        status: u16,
        /// Remark on the token that was sent.
        token: &'static str,
    },
    /// The repository is gated, and this user has no access.
    #[error(
        "{repo} is gated (HTTP {status}): accept its licence at {page}, and set HF_TOKEN to a token of that account{token}"
    )]
    Gated {
        /// Owner and name.
        repo: String,
        /// Page with the licence.
        page: String,
        /// HTTP status.
        status: u16,
        /// Remark on the token that was sent.
        token: &'static str,
    },
    /// The repository has no such branch, tag or commit.
    #[error(
        "{repo} has no revision {revision:?}: give a branch, a tag or a commit after @, or leave it out for main"
    )]
    NoRevision {
        /// Owner and name.
        repo: String,
        /// The revision.
        revision: String,
    },
    /// The repository lacks a file, split or config that is needed.
    #[error("{repo}: {reason}")]
    Missing {
        /// Owner, name and commit.
        repo: String,
        /// The missing thing, what is there, and the remedy.
        reason: String,
    },
    /// The cache does not hold everything, and the network may not be used.
    #[error(
        "{repo} is not in the cache {} ({reason}), and {variable} forbids the network: unset it, or download the \
         repository first", cache.display()
    )]
    Offline {
        /// Owner and name.
        repo: String,
        /// The cache.
        cache: PathBuf,
        /// The missing part.
        reason: String,
        /// Variable that forbids the network.
        variable: &'static str,
    },
    /// The hub cannot be reached, or breaks off.
    #[error("cannot download {what} after {attempts} attempts: {reason}; run the command again to continue")]
    Network {
        /// The URL's path or file.
        what: String,
        /// Number of attempts.
        attempts: usize,
        /// The last attempt's failure.
        reason: String,
    },
    /// The server answered something else than the hub would.
    #[error("{url}: {reason}")]
    Protocol {
        /// The request.
        url: String,
        /// The unexpected answer.
        reason: String,
    },
    /// A download differs from the hash that the hub states.
    #[error("{file}: {reason}, twice; the server or a proxy sends other contents than the hub states")]
    Corrupt {
        /// The file.
        file: String,
        /// Expected and found.
        reason: String,
    },
    /// The disk of the cache has too little room.
    #[error(
        "{file} takes {needed} more bytes, but {} has {free} bytes free: make room, or set HF_HOME to another folder",
        cache.display()
    )]
    NoRoom {
        /// The file.
        file: String,
        /// Bytes still to download.
        needed: u64,
        /// Bytes that are free.
        free: u64,
        /// The cache.
        cache: PathBuf,
    },
    /// A file operation failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// Attempted operation, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A setting of the environment is wrong.
    #[error("{variable} {reason}")]
    Setting {
        /// The variable.
        variable: &'static str,
        /// Found and expected.
        reason: String,
    },
}

impl HubError {
    /// Turns an I/O error into [`HubError::Io`].
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }

    /// Returns whether the user can mend it, by another name, a token or a setting.
    pub fn is_mistake(&self) -> bool {
        match self {
            Self::NoRepository { .. }
            | Self::Gated { .. }
            | Self::NoRevision { .. }
            | Self::Missing { .. }
            | Self::Offline { .. }
            | Self::Setting { .. } => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
            Self::Network { .. } | Self::Protocol { .. } | Self::Corrupt { .. } | Self::NoRoom { .. } => {
                false
            }
        }
    }
}
