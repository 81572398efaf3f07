//! Check of weight files before a run does anything else.

use std::path::Path;

use tandem_model::{ModelError, ModelFolder};

use crate::config::{Config, Weights};
use crate::recipe::for_method;
use crate::{Fault, Result, TrainError, chain};

/// Checks the headers of the files that a run starts from against the files' lengths.
///
/// # Errors
/// A file is missing or malformed; the message has the key that names it.
pub(crate) fn check_all(config: &Config) -> Result<()> {
    let folder = for_method(config.method).open_folder(config, &config.model)?;
    folder.check_copied()?;
    match &config.weights {
        Weights::Random => {}
        Weights::Folder => check("model", &config.model, folder)?,
        Weights::File(path) => check("weights", path, folder.with_weights(path))?,
    }
    match &config.reference.model {
        Some(path) => check("reference.model", path, ModelFolder::open(path)?),
        None => Ok(()),
    }
}

/// Checks the file of `weights`, if the config has that key.
///
/// # Errors
/// It cannot be read, or lacks bytes that its headers promise; the message names the key.
pub fn check_given(config: &Config) -> Result<()> {
    let Weights::File(path) = &config.weights else { return Ok(()) };
    check("weights", path, for_method(config.method).open_folder(config, &config.model)?.with_weights(path))
}

fn check(key: &str, path: &Path, folder: ModelFolder) -> Result<()> {
    folder.check_weights().map_err(|error| match &error {
        ModelError::Io { source, .. } if Fault::of_io(source) == Fault::Own => error.into(),
        _ => {
            let reason = format!("`{key}` = {}: {}", path.display(), chain(&error));
            TrainError::Mismatch { reason }
        }
    })
}
