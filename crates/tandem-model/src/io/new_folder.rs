//! Folders written atomically: under a temporary name beside the destination, synced and renamed.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde_json::Value;
use tandem_files::{FURTHER_TEMPLATES, TOKENIZER_FILES};

use crate::{ModelError, Result};

/// Files beside tokenizer and weights that are copied: defaults of generation, and what turns images
/// into the input of a vision–language model.
pub(crate) const FURTHER_FILES: [&str; 4] = [
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

/// Returns whether saving a model or an adapter writes a file of that name.
pub fn is_model_file(name: &str) -> bool {
    const OTHERS: [&str; 5] = [
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ];
    [&TOKENIZER_FILES[..], &FURTHER_FILES, &OTHERS].concat().contains(&name)
        || (name.starts_with("model-") && name.ends_with(".safetensors"))
}

/// Makes `destination`; `fill` writes its contents. They replace those of a folder of that name; what is no
/// [model's file](is_model_file) there stays.
///
/// # Errors
/// If the disk refuses or `fill` fails: nothing is left behind, and an older folder stays whole.
pub(crate) fn write_folder(destination: &Path, fill: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
    let name = destination.file_name().and_then(|n| n.to_str());
    let name = name.ok_or_else(|| ModelError::format(destination, "not a name for a folder"))?;
    let parent = destination.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(|e| ModelError::io(parent, e))?;
    let beside = |word: &str| parent.join(format!(".{name}.{word}-{}", std::process::id()));
    let unfinished = Unfinished(beside("writing"));
    let folder = &unfinished.0;
    _ = fs::remove_dir_all(folder);
    fs::create_dir(folder).map_err(|e| {
        // The temporary name means nothing to the user.
        let reason = format!("cannot create a folder there: {e}");
        ModelError::io(destination, std::io::Error::new(e.kind(), reason))
    })?;
    fill(folder)?;
    sync(folder)?;
    // A rename does not replace a folder with contents: the old one is renamed first.
    let old = beside("old");
    let replaces = destination.exists();
    if replaces {
        _ = fs::remove_dir_all(&old);
        fs::rename(destination, &old).map_err(|e| ModelError::io(destination, e))?;
    }
    if let Err(error) = fs::rename(folder, destination) {
        if replaces {
            _ = fs::rename(&old, destination);
        }
        return Err(ModelError::io(destination, error));
    }
    if replaces {
        keep_others(&old, destination)?;
        _ = fs::remove_dir_all(&old);
    }
    sync(parent)
}

/// Finishes what processes that were killed while they wrote the folder `destination` have left beside it:
/// removes unfinished folders, and moves what is no [model's file](is_model_file) back from replaced ones, or
/// these as a whole where nothing has replaced them. Nobody may be writing the folder.
///
/// # Errors
/// If the disk refuses.
pub fn recover_folder(destination: &Path) -> Result<()> {
    let (Some(parent), Some(name)) = (destination.parent(), destination.file_name()) else { return Ok(()) };
    let listing = match fs::read_dir(parent) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        listing => listing.map_err(|e| ModelError::io(parent, e))?,
    };
    let mut paths = Vec::new();
    for entry in listing {
        paths.push(entry.map_err(|e| ModelError::io(parent, e))?.path());
    }
    let prefix = |word: &str| format!(".{}.{word}-", name.to_string_lossy());
    let (writing, old) = (prefix("writing"), prefix("old"));
    let is_left = |path: &Path, prefix: &str| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.strip_prefix(prefix).is_some_and(|id| id.parse::<u32>().is_ok()) && path.is_dir()
    };
    for path in paths.iter().filter(|path| is_left(path, &old)) {
        if destination.exists() {
            keep_others(path, destination)?;
            fs::remove_dir_all(path).map_err(|e| ModelError::io(path, e))?;
        } else {
            fs::rename(path, destination).map_err(|e| ModelError::io(destination, e))?;
        }
    }
    for path in paths.iter().filter(|path| is_left(path, &writing)) {
        fs::remove_dir_all(path).map_err(|e| ModelError::io(path, e))?;
    }
    Ok(())
}

/// Moves what is no model's file from the folder that was replaced.
fn keep_others(old: &Path, new: &Path) -> Result<()> {
    for entry in fs::read_dir(old).map_err(|e| ModelError::io(old, e))? {
        let name = entry.map_err(|e| ModelError::io(old, e))?.file_name();
        let place = new.join(&name);
        let is_models = |name: &str| is_model_file(name) || name == FURTHER_TEMPLATES;
        if !name.to_str().is_some_and(is_models) && !place.exists() {
            fs::rename(old.join(&name), &place).map_err(|e| ModelError::io(&place, e))?;
        }
    }
    Ok(())
}

/// Makes the file `destination`, replacing a file of that name; `fill` gets its temporary path and
/// writes it.
///
/// # Errors
/// If the disk refuses or `fill` fails: nothing is left behind, and an older file stays whole.
pub(crate) fn write_new_file(
    destination: &Path,
    fill: &mut dyn FnMut(&Path, File) -> Result<File>,
) -> Result<()> {
    let name = destination.file_name().and_then(|n| n.to_str());
    let name = name.ok_or_else(|| ModelError::format(destination, "not a name for a file"))?;
    let parent = destination.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(|e| ModelError::io(parent, e))?;
    let unfinished = Unfinished(parent.join(format!(".{name}.writing-{}", std::process::id())));
    let path = &unfinished.0;
    let file = fill(path, File::create(path).map_err(|e| ModelError::io(path, e))?)?;
    file.sync_all().map_err(|e| ModelError::io(path, e))?;
    fs::rename(path, destination).map_err(|e| ModelError::io(destination, e))?;
    sync(parent)
}

/// Temporary folder or file, removed when dropped unless it was renamed.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        if fs::remove_file(&self.0).is_err() {
            _ = fs::remove_dir_all(&self.0);
        }
    }
}

/// Checks that those of the named files that `from` has can be copied.
pub(crate) fn check_files(from: &Path, names: &[&str]) -> Result<()> {
    for source in names.iter().map(|name| from.join(name)).filter(|source| source.exists()) {
        tandem_files::check(&source, tandem_files::MAX_TABLE).map_err(|e| ModelError::io(&source, e))?;
    }
    Ok(())
}

/// Copies those of the named files that `from` has.
pub(crate) fn copy_files(from: &Path, names: &[&str], folder: &Path) -> Result<()> {
    for name in names {
        let source = from.join(name);
        if source.is_file() {
            // Not `fs::copy`, which would make a read-only copy of a read-only source.
            let bytes = tandem_files::read(&source, tandem_files::MAX_TABLE)
                .map_err(|e| ModelError::io(&source, e))?;
            write_file(&folder.join(name), &bytes)?;
        }
    }
    Ok(())
}

/// Copies the chat templates beside the default one.
pub(crate) fn copy_further_templates(from: &Path, folder: &Path) -> Result<()> {
    let from = from.join(FURTHER_TEMPLATES);
    let Ok(entries) = fs::read_dir(&from) else { return Ok(()) };
    let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
    let mut names: Vec<_> = names.collect::<std::io::Result<_>>().map_err(|e| ModelError::io(&from, e))?;
    names.retain(|name| Path::new(name).extension().is_some_and(|extension| extension == "jinja"));
    let names: Vec<&str> = names.iter().filter_map(|name| name.to_str()).collect();
    if names.is_empty() {
        return Ok(());
    }
    let to = folder.join(FURTHER_TEMPLATES);
    fs::create_dir(&to).map_err(|e| ModelError::io(&to, e))?;
    copy_files(&from, &names, &to)?;
    sync(&to)
}

pub(crate) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("JSON values print");
    write_file(path, (text + "\n").as_bytes())
}

pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| ModelError::io(path, e))
}

/// Syncs the folder's entries to disk.
fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| ModelError::io(folder, e))
}
