//! From a name to local files: the cache, the hub's listing, and the download of what is missing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::cache::{Kind, RepoCache, create};
use crate::client::{ATTEMPTS, Client, Failure, Method, encode, encode_whole};
use crate::dataset;
use crate::download::{Download, Metadata};
use crate::error::{HubError, Result};
use crate::model::ModelFiles;
use crate::name::{HubName, check_path, is_commit};
use crate::settings::Settings;

/// Receiver of a download's progress.
pub trait Progress {
    /// Shows the bytes of a file that are there. Called often.
    fn bytes(&mut self, file: &str, done: u64, total: Option<u64>);
    /// Shows a sentence.
    fn notice(&mut self, text: &str);
}

/// One hub and one cache.
#[derive(Debug)]
pub struct Hub {
    settings: Settings,
    client: Client,
}

/// Names of chosen files, or the reason why something is missing.
pub(crate) type Choice = Result<Vec<String>>;

/// Files of a repository at one commit, for choosing among them.
pub(crate) struct Files<'a> {
    names: BTreeSet<String>,
    repo: String,
    commit: String,
    /// Returns the local path of a file.
    fetch: &'a mut dyn FnMut(&str) -> Result<PathBuf>,
}

impl Files<'_> {
    pub(crate) fn names(&self) -> &BTreeSet<String> {
        &self.names
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    pub(crate) fn repo(&self) -> &str {
        &self.repo
    }

    /// Reads a small text file.
    pub(crate) fn read(&mut self, name: &str) -> Result<String> {
        let path = (self.fetch)(name)?;
        fs::read_to_string(&path).map_err(HubError::io("read", &path))
    }

    pub(crate) fn missing(&self, reason: String) -> HubError {
        HubError::Missing { repo: format!("{} at commit {}", self.repo, self.commit), reason }
    }

    /// Beginning of the listing, in words.
    pub(crate) fn found(&self) -> String {
        let shown: Vec<&str> = self.names.iter().take(12).map(String::as_str).collect();
        let more = if self.names.len() > shown.len() { ", …" } else { "" };
        format!("its files: {}{more}", shown.join(", "))
    }
}

/// Chooses among a repository's files; `true` for the cache's listing.
type Choose<'a> = &'a dyn Fn(&mut Files<'_>, bool) -> Choice;

impl Hub {
    /// Creates the client of an endpoint and a cache.
    pub fn new(settings: Settings) -> Self {
        let client = Client::new(&settings);
        Self { settings, client }
    }

    /// Creates the client that the environment describes.
    ///
    /// # Errors
    /// As [`Settings::from_environment`].
    pub fn from_environment() -> Result<Self> {
        Settings::from_environment().map(Self::new)
    }

    /// Returns the folder of a model or adapter, or the file that the name's rest gives. Missing
    /// files are downloaded.
    ///
    /// # Errors
    /// If the hub does not show the repository or revision, it lacks a needed file, the network
    /// fails or is forbidden, or the cache cannot be written.
    pub fn model(&self, name: &HubName, files: ModelFiles, progress: &mut dyn Progress) -> Result<PathBuf> {
        if name.rest.is_empty() {
            let (snapshot, _) = self.fetch(
                Kind::Model,
                name,
                &|listing, is_cache| files.choose(listing, is_cache),
                progress,
            )?;
            return Ok(snapshot);
        }
        let choose = |listing: &mut Files<'_>, _: bool| match listing.has(&name.rest) {
            true => Ok(vec![name.rest.clone()]),
            false => Err(listing.missing(format!("it has no file {}; {}", name.rest, listing.found()))),
        };
        let (snapshot, _) = self.fetch(Kind::Model, name, &choose, progress)?;
        Ok(snapshot.join(&name.rest))
    }

    /// Returns the files of a data set's split, in order. Missing files are downloaded.
    ///
    /// # Errors
    /// As [`Hub::model`], and if there is no such config or split.
    pub fn rows(&self, name: &HubName, progress: &mut dyn Progress) -> Result<Vec<PathBuf>> {
        let choose = |listing: &mut Files<'_>, is_cache: bool| dataset::choose(listing, &name.rest, is_cache);
        let (snapshot, files) = self.fetch(Kind::Dataset, name, &choose, progress)?;
        Ok(files.iter().map(|file| snapshot.join(file)).collect())
    }

    /// Returns a snapshot's folder and the chosen files in it.
    fn fetch(
        &self,
        kind: Kind,
        name: &HubName,
        choose: Choose<'_>,
        progress: &mut dyn Progress,
    ) -> Result<(PathBuf, Vec<String>)> {
        let cache = RepoCache::new(&self.settings.cache, kind, &name.repo);
        let cached = || cached(&cache, name, choose);
        if let Some(variable) = self.settings.offline {
            return cached().map_err(|reason| HubError::Offline {
                repo: name.to_string(),
                cache: self.settings.cache.clone(),
                reason,
                variable,
            });
        }
        // A commit never changes.
        if is_commit(&name.revision)
            && let Ok(found) = cached()
        {
            return Ok(found);
        }
        let found = cached();
        // With a cache there is no need to wait long for the hub.
        let attempts = if found.is_ok() { 2 } else { ATTEMPTS };
        let (commit, names) = match (self.list(kind, name, attempts), found) {
            (Ok(listing), _) => listing,
            (Err(error @ HubError::Network { .. }), Ok(found)) => {
                let HubError::Network { reason, .. } = error else { unreachable!("as matched") };
                progress.notice(&format!(
                    "{} cannot be reached ({reason}); using {} from the cache",
                    self.settings.endpoint,
                    found.0.display()
                ));
                return Ok(found);
            }
            (Err(error), _) => return Err(error),
        };
        let repository = Repository { hub: self, kind, name, cache: &cache, commit: &commit };
        let chosen = {
            let mut fetch = |file: &str| repository.file(file, progress);
            let mut files =
                Files { names, repo: name.repo.clone(), commit: commit.clone(), fetch: &mut fetch };
            choose(&mut files, false)?
        };
        for file in &chosen {
            repository.file(file, progress)?;
        }
        cache.set_commit(&name.revision, &commit)?;
        Ok((cache.snapshot(&commit), chosen))
    }

    /// Asks the hub for a revision's commit and files.
    fn list(&self, kind: Kind, name: &HubName, attempts: usize) -> Result<(String, BTreeSet<String>)> {
        let url = format!(
            "{}/api/{}/{}/revision/{}",
            self.settings.endpoint,
            kind.plural(),
            name.repo,
            encode_whole(&name.revision)
        );
        let text = self
            .client
            .text(&url, attempts)
            .map_err(|failure| self.error(kind, name, &name.repo, failure))?;
        let wrong = |reason: &str| HubError::Protocol { url: url.clone(), reason: reason.to_owned() };
        let info: Value =
            serde_json::from_str(&text).map_err(|_| wrong("the response is not the hub's JSON"))?;
        let commit = info.get("sha").and_then(Value::as_str).filter(|sha| is_commit(sha));
        let commit = commit.ok_or_else(|| wrong("the response names no commit (`sha`)"))?;
        let siblings = info.get("siblings").and_then(Value::as_array);
        let siblings = siblings.ok_or_else(|| wrong("the response lists no files (`siblings`)"))?;
        let mut names = BTreeSet::new();
        for sibling in siblings {
            let file = sibling.get("rfilename").and_then(Value::as_str);
            let file = file.ok_or_else(|| wrong("the response lists a file without a name"))?;
            check_path(file).map_err(|reason| wrong(&format!("the file name {file:?} {reason}")))?;
            names.insert(file.to_owned());
        }
        Ok((commit.to_owned(), names))
    }

    /// Explains a failed request for `what`.
    fn error(
        &self,
        kind: Kind,
        name: &HubName,
        what: &str,
        (attempts, failure): (usize, Failure),
    ) -> HubError {
        let Failure::Status { status, ref code, .. } = failure else {
            return match failure {
                Failure::Redirect(reason) => HubError::Protocol { url: what.to_owned(), reason },
                failure => HubError::network(what, &(attempts, failure)),
            };
        };
        let repo = name.repo.clone();
        let token = if self.client.has_token() { " (a token was sent)" } else { "" };
        match (status, code.as_str()) {
            (_, "GatedRepo") | (403, _) => {
                let page = format!("{}/{}{repo}", self.settings.endpoint, kind.page());
                HubError::Gated { repo, page, status, token }
            }
            (_, "RevisionNotFound") => HubError::NoRevision { repo, revision: name.revision.clone() },
            (_, "EntryNotFound") => {
                HubError::Missing { repo: name.to_string(), reason: format!("the hub has no file {what}") }
            }
            (401 | 404, _) => HubError::NoRepository {
                endpoint: self.settings.endpoint.clone(),
                kind: kind.in_words(),
                repo,
                status,
                token,
            },
            _ if failure.may_pass() => HubError::network(what, &(attempts, failure)),
            _ => HubError::Protocol { url: what.to_owned(), reason: failure.in_words() },
        }
    }
}

/// Chooses among the files of the cache.
fn cached(cache: &RepoCache, name: &HubName, choose: Choose<'_>) -> Result<(PathBuf, Vec<String>), String> {
    let commit = cache.commit(&name.revision).ok_or("its revision was never downloaded")?;
    let names: BTreeSet<String> = cache.list(&commit).into_iter().collect();
    if names.is_empty() {
        return Err("no file of its revision is there".to_owned());
    }
    let snapshot = cache.snapshot(&commit);
    let mut fetch = |file: &str| Ok(snapshot.join(file));
    let mut files = Files { names, repo: name.repo.clone(), commit: commit.clone(), fetch: &mut fetch };
    match choose(&mut files, true) {
        Ok(chosen) => Ok((snapshot, chosen)),
        Err(HubError::Missing { reason, .. }) => Err(reason),
        Err(error) => Err(error.to_string()),
    }
}

/// A repository at one commit.
struct Repository<'a> {
    hub: &'a Hub,
    kind: Kind,
    name: &'a HubName,
    cache: &'a RepoCache,
    commit: &'a str,
}

impl Repository<'_> {
    /// Returns the local path of a file, downloading it if it is missing.
    fn file(&self, file: &str, progress: &mut dyn Progress) -> Result<PathBuf> {
        let path = self.cache.snapshot(self.commit).join(file);
        if path.exists() {
            return Ok(path);
        }
        let Hub { settings, client } = self.hub;
        let url = format!(
            "{}/{}{}/resolve/{}/{}",
            settings.endpoint,
            self.kind.page(),
            self.name.repo,
            self.commit,
            encode(file)
        );
        let response = client.send_with_retries(Method::Head, &url, ATTEMPTS);
        let response = response.map_err(|failure| self.hub.error(self.kind, self.name, file, failure))?;
        let wrong = |reason| HubError::Protocol { url: url.clone(), reason };
        let metadata = Metadata::read(&response).map_err(wrong)?;
        let blob = self.cache.blob(&metadata.etag);
        create(parent(&blob))?;
        if !blob.exists() {
            let mut waiting =
                || progress.notice(&format!("another process downloads {file}; waiting for it"));
            let _lock = self.cache.lock(&metadata.etag, &mut waiting)?;
            if !blob.exists() {
                Download { client, url: &url, file, metadata: &metadata, blob: &blob }.run(progress)?;
            }
        }
        self.cache.link(self.commit, file, &metadata.etag)?;
        Ok(path)
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().expect("it is in a folder of the cache")
}
