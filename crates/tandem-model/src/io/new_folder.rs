//! Folders that appear whole: made under a temporary name beside their destination, synced and renamed.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{ModelError, Result};

/// Tokenizer and chat template, which go with a model and are copied as they are.
pub(crate) const TOKENIZER_FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
];

/// Makes `destination`, replacing a folder of that name; `fill` writes what shall be in it.
///
/// # Errors
/// If the disk refuses or `fill` fails: nothing is left behind and an older folder stays whole.
pub(crate) fn write_folder(destination: &Path, fill: &mut dyn FnMut(&Path) -> Result<()>) -> Result<()> {
    let name = destination.file_name().and_then(|n| n.to_str());
    let name = name.ok_or_else(|| ModelError::format(destination, "not a name for a folder"))?;
    let parent = destination.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(|e| ModelError::io(parent, e))?;
    let beside = |word: &str| parent.join(format!(".{name}.{word}-{}", std::process::id()));
    let unfinished = Unfinished(beside("writing"));
    let folder = &unfinished.0;
    _ = fs::remove_dir_all(folder);
    fs::create_dir(folder).map_err(|e| ModelError::io(folder, e))?;
    fill(folder)?;
    sync(folder)?;
    // A rename does not replace a folder that holds something: the old one steps aside first.
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
        _ = fs::remove_dir_all(&old);
    }
    sync(parent)
}

/// Removes its folder when dropped, unless that was renamed away.
struct Unfinished(PathBuf);

impl Drop for Unfinished {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

/// Copies the files of those names that `from` has.
pub(crate) fn copy_files(from: &Path, names: &[&str], folder: &Path) -> Result<()> {
    for name in names {
        let source = from.join(name);
        if source.is_file() {
            // Written anew rather than `fs::copy`: a read-only source must not make a read-only copy.
            let bytes = fs::read(&source).map_err(|e| ModelError::io(&source, e))?;
            write_file(&folder.join(name), &bytes)?;
        }
    }
    Ok(())
}

pub(crate) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).expect("JSON values print");
    write_file(path, (text + "\n").as_bytes())
}

fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|e| ModelError::io(path, e))
}

/// Makes the folder's entries durable.
fn sync(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| ModelError::io(folder, e))
}
