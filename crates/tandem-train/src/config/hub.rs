//! Names of the hub among a config's paths, and their replacement by local files.
//!
//! The config is read twice. The first reading checks every key and collects names; only then are
//! files downloaded; the second reading takes the local paths. The resolved config therefore names
//! snapshots, whose folder is the commit, and a run's other code knows no hub.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use tandem_hub::{HubError, HubName};

use super::error::{ConfigError, Place, Problem, Result};
use super::judges::{JudgeSection, read_judges};
use super::reader::Entry;
use super::{Config, Weights};

/// Part of the hub that a key names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HubPart {
    /// A model.
    Model,
    /// A model of which only config and tokenizer are read.
    ModelWithoutWeights,
    /// A PEFT adapter.
    Adapter,
    /// Rows.
    Rows,
}

/// A name of the hub in a config.
#[derive(Clone, Debug)]
pub struct HubUse {
    /// Place of the value.
    pub place: Place,
    /// Full key.
    pub key: String,
    /// Text of the value.
    pub text: String,
    /// Part of the hub.
    pub part: HubPart,
    /// The name.
    pub name: HubName,
}

/// Downloads a name and returns its local files, one unless the part is rows.
pub type Fetch<'a> = &'a mut dyn FnMut(&HubUse) -> Result<Vec<PathBuf>, HubError>;

/// Names found so far, and local paths by key and text.
#[derive(Clone, Default)]
pub(super) struct Lookup(Rc<RefCell<Found>>);

#[derive(Default)]
struct Found {
    names: Vec<HubUse>,
    local: Vec<(String, String, Vec<PathBuf>)>,
}

impl Entry {
    /// Reads a path or a name of the hub, of a model or an adapter. An existing path comes first.
    pub(crate) fn path_or_name(&self, part: HubPart) -> Result<PathBuf> {
        Ok(self.paths_or_name(part)?.swap_remove(0))
    }

    /// Reads a path, or rows of the hub as `hf://owner/name/split`.
    pub(crate) fn rows_or_name(&self) -> Result<Vec<PathBuf>> {
        self.paths_or_name(HubPart::Rows)
    }

    fn paths_or_name(&self, part: HubPart) -> Result<Vec<PathBuf>> {
        let text = self.string()?;
        let (name, unresolved) = if HubName::is_explicit(text) {
            let name = HubName::explicit(text).map_err(|reason| self.conflict(reason))?;
            (name, PathBuf::from(text))
        } else {
            let path = self.path()?;
            match HubName::in_place_of(&path, text) {
                Some(name) => (name, path),
                None => return Ok(vec![path]),
            }
        };
        let mut found = self.lookup().0.borrow_mut();
        let local = found.local.iter().find(|(key, given, _)| *key == self.key && given == text);
        if let Some((.., paths)) = local {
            return Ok(paths.clone());
        }
        let (place, key, text) = (self.place().clone(), self.key.clone(), text.to_owned());
        found.names.push(HubUse { place, key, text, part, name });
        Ok(vec![unresolved])
    }
}

impl Lookup {
    /// Downloads all names; `false` if there are none.
    fn resolve(&self, weights: &Weights, fetch: Fetch<'_>) -> Result<bool> {
        let names = std::mem::take(&mut self.0.borrow_mut().names);
        for mut wanted in names.iter().cloned() {
            if wanted.key == "model" && *weights != Weights::Folder {
                wanted.part = HubPart::ModelWithoutWeights;
            }
            let is_explicit = HubName::is_explicit(&wanted.text);
            let error = |remark: String, reason, is_mistake| ConfigError {
                place: wanted.place.clone(),
                problem: Problem::Hub { key: wanted.key.clone(), remark, reason, is_mistake },
            };
            if wanted.part == HubPart::Rows && !is_explicit {
                let reason = format!(
                    "there is no such file; rows of the hub are written hf://{}/train, with the name of a split",
                    wanted.name.repository()
                );
                return Err(error(wanted.text.clone(), reason, true));
            }
            let remark = match is_explicit {
                true => wanted.text.clone(),
                false => format!("no such path as {}; read as a name of the hub", wanted.text),
            };
            let paths =
                fetch(&wanted).map_err(|failed| error(remark, in_words(&failed), failed.is_mistake()))?;
            self.0.borrow_mut().local.push((wanted.key, wanted.text, paths));
        }
        Ok(!names.is_empty())
    }
}

impl Config {
    /// Reads a config as [`Config::load`] does, and replaces names of the hub by local paths. The
    /// whole config is checked before anything is downloaded.
    ///
    /// # Errors
    /// As [`Config::load`]; [`Problem::Hub`] if `fetch` fails.
    pub fn load_fetched<S: AsRef<str>>(path: &Path, overrides: &[S], fetch: Fetch<'_>) -> Result<Self> {
        let text = tandem_files::read_text(path, tandem_files::MAX_CONFIG)
            .map_err(|source| ConfigError::unreadable(path, &source))?;
        Self::parse_fetched(&text, path, overrides, fetch)
    }

    /// Reads a text as [`Config::load_fetched`] reads the file `path`, which need not exist: errors name it,
    /// and relative paths start from its folder.
    ///
    /// # Errors
    /// As [`Config::load_fetched`].
    pub fn parse_fetched<S: AsRef<str>>(
        text: &str,
        path: &Path,
        overrides: &[S],
        fetch: Fetch<'_>,
    ) -> Result<Self> {
        let lookup = Lookup::default();
        let config = Self::parse(text, path, overrides, &lookup)?;
        match lookup.resolve(&config.weights, fetch)? {
            false => Ok(config),
            true => Self::parse(text, path, overrides, &lookup),
        }
    }
}

/// Reads judges as [`load_judges`](super::load_judges) does, and replaces names of the hub by local
/// paths.
///
/// # Errors
/// As [`Config::load_fetched`].
pub fn load_judges_fetched(path: &Path, fetch: Fetch<'_>) -> Result<Vec<JudgeSection>> {
    let lookup = Lookup::default();
    let judges = read_judges(path, &lookup)?;
    match lookup.resolve(&Weights::Folder, fetch)? {
        false => Ok(judges),
        true => read_judges(path, &lookup),
    }
}

/// An error of the hub and its cause.
fn in_words(error: &HubError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
