//! Facts about a model and rows that a translation depends on.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tandem_data::source::peek::{count_rows, first_row};
use tandem_data::source::{Source, Sources};
use tandem_hub::{HubName, ModelFiles};
use tandem_train::config::Facts;

use crate::hub;

/// Facts of files on this machine, and of models of the hub.
pub(super) struct LocalFacts {
    /// Folder of the configuration, which its relative paths start from.
    folder: PathBuf,
    /// Whether a model's config may be downloaded.
    may_download: bool,
}

impl LocalFacts {
    pub(super) fn new(file: &Path, may_download: bool) -> Self {
        Self { folder: file.parent().unwrap_or(Path::new("")).to_owned(), may_download }
    }

    /// A path of the configuration, from the current folder.
    fn beside(&self, path: &str) -> PathBuf {
        self.folder.join(path)
    }
}

impl Facts for LocalFacts {
    fn path(&self, given: &str) -> String {
        let is_name = HubName::is_explicit(given) || HubName::bare(given).is_some();
        if is_name && !Path::new(given).exists() { given.to_owned() } else { self.local(given) }
    }

    fn local(&self, given: &str) -> String {
        if self.folder.as_os_str().is_empty() || Path::new(given).is_absolute() {
            return given.to_owned();
        }
        let absolute = std::path::absolute(given).unwrap_or_else(|_| given.into());
        absolute.to_string_lossy().into_owned()
    }

    fn exists(&self, given: &str) -> bool {
        Path::new(given).exists()
    }

    fn model_type(&self, model: &str) -> Option<String> {
        let local = self.beside(model);
        let folder = match local.is_dir() {
            true => local,
            false if self.may_download && HubName::bare(model).is_some() => {
                hub::model(Path::new(model), ModelFiles::WithoutWeights).ok()?
            }
            false => return None,
        };
        let config: Value = serde_json::from_slice(
            &tandem_files::read(&folder.join("config.json"), tandem_files::MAX_CONFIG).ok()?,
        )
        .ok()?;
        config.get("model_type")?.as_str().map(str::to_owned)
    }

    fn columns(&self, train: &str) -> Option<Vec<String>> {
        let row = first_row(&Sources(vec![Source::new(self.beside(train))])).ok()??;
        Some(row.keys().cloned().collect())
    }

    fn num_rows(&self, train: &[String]) -> Option<u64> {
        if train.iter().any(|path| HubName::is_explicit(path)) {
            return None;
        }
        count_rows(&Sources(train.iter().map(|path| Source::new(self.beside(path))).collect())).ok()
    }
}
