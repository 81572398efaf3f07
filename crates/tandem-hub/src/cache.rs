//! The cache's folders: refs, blobs, snapshots and locks.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{HubError, Result};
use crate::name::is_commit;

/// Kind of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Model,
    Dataset,
}

impl Kind {
    /// Part of the API's address, and beginning of the folder's name.
    pub(crate) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }

    /// Beginning of a page's address.
    pub(crate) fn page(self) -> &'static str {
        match self {
            Self::Model => "",
            Self::Dataset => "datasets/",
        }
    }

    pub(crate) fn in_words(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Dataset => "data set",
        }
    }
}

/// A repository's part of the cache.
#[derive(Debug)]
pub(crate) struct RepoCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    pub(crate) fn new(cache: &Path, kind: Kind, repo: &str) -> Self {
        let name = format!("{}--{}", kind.plural(), repo.replace('/', "--"));
        Self { folder: cache.join(&name), locks: cache.join(".locks").join(name) }
    }

    /// Commit of a revision, as last seen.
    pub(crate) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = fs::read_to_string(self.folder.join("refs").join(revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Records the commit of a branch or tag.
    pub(crate) fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let file = self.folder.join("refs").join(revision);
        let folder = file.parent().expect("it is in refs");
        create(folder)?;
        let temporary = temporary(&file);
        fs::write(&temporary, commit).map_err(HubError::io("write", &temporary))?;
        fs::rename(&temporary, &file).map_err(HubError::io("write", &file))
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Files of a snapshot that are whole, relative to it and sorted.
    pub(crate) fn list(&self, commit: &str) -> Vec<String> {
        let mut names = Vec::new();
        list_into(&self.snapshot(commit), "", &mut names);
        names.sort();
        names
    }

    /// Links a snapshot's file to its blob.
    pub(crate) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<()> {
        let pointer = self.snapshot(commit).join(file);
        if pointer.exists() {
            return Ok(());
        }
        create(pointer.parent().expect("it is in a snapshot"))?;
        // Up from the file's folder, its commit and `snapshots`.
        let up = "../".repeat(file.matches('/').count() + 2);
        let temporary = temporary(&pointer);
        let _ = fs::remove_file(&temporary);
        std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), &temporary)
            // A file system without links gets a copy.
            .or_else(|_| fs::copy(self.blob(etag), &temporary).map(drop))
            .and_then(|()| fs::rename(&temporary, &pointer))
            .map_err(HubError::io("link", &pointer))
    }

    /// Locks a blob for a download, like `huggingface_hub`. `waiting` is called once if another
    /// process holds the lock. `None` on a file system without locks.
    pub(crate) fn lock(&self, etag: &str, waiting: &mut dyn FnMut()) -> Result<Option<File>> {
        create(&self.locks)?;
        let path = self.locks.join(format!("{etag}.lock"));
        loop {
            let options = OpenOptions::new().create(true).truncate(false).write(true).read(true).open(&path);
            let file = options.map_err(HubError::io("open", &path))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    waiting();
                    file.lock().map_err(HubError::io("lock", &path))?;
                }
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    return Ok(None);
                }
                Err(TryLockError::Error(error)) => return Err(HubError::io("lock", &path)(error)),
            }
            // Its last holder may have deleted the file, so that others lock a new one.
            let (mine, now) = (file.metadata(), fs::metadata(&path));
            let is_same =
                mine.ok().zip(now.ok()).is_some_and(|(a, b)| (a.dev(), a.ino()) == (b.dev(), b.ino()));
            if is_same {
                return Ok(Some(file));
            }
        }
    }
}

/// Returns a name beside `path` that no other thread takes; process numbers repeat between
/// containers that share a cache, so the time is part of it.
fn temporary(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    path.with_file_name(format!(".{}-{time}-{count}.tmp", std::process::id()))
}

pub(crate) fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(HubError::io("create", folder))
}

fn list_into(folder: &Path, prefix: &str, names: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        // Follows links: one without its blob is no file.
        let Ok(metadata) = fs::metadata(entry.path()) else { continue };
        match metadata.is_dir() {
            true => list_into(&entry.path(), &format!("{prefix}{name}/"), names),
            false => names.push(format!("{prefix}{name}")),
        }
    }
}
