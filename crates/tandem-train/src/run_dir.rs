//! The folder a run writes: who may use it, and what may be deleted from it.
//!
//! ```text
//! runs/first/
//!   config.toml      resolved
//!   plan.json        what was planned
//!   metrics.jsonl    one line per step and per evaluation
//!   checkpoints/     see `checkpoint`
//!   final/           the trained model, an ordinary HF folder
//!   .lock            held while a run is going; empty or stale ones mean nothing
//! ```

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

use crate::checkpoint::Checkpoints;
use crate::config::Config;
use crate::error::{Result, TrainError};

/// First line of every `config.toml` written here: tells it from one that a person put into the folder.
const CONFIG_HEADER: &str =
    "# The resolved config of this run, written by tandem. Paths are absolute, defaults written out.\n";

/// What to do with a folder that already holds a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Refuse it.
    Fresh,
    /// Continue the run.
    Resume,
    /// Delete what the earlier run wrote, and nothing else.
    Overwrite,
}

/// A run folder, locked against other processes for as long as this value lives (also against being killed: the system
/// drops the lock with the process).
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    start: Start,
    _lock: File,
}

impl RunDir {
    /// Creates or takes over the folder and locks it. Nothing of an earlier run is touched before [`RunDir::begin`].
    ///
    /// # Errors
    /// If it holds a run and `start` is [`Start::Fresh`], another process holds its lock, its `config.toml` is not ours, or a
    /// file operation fails.
    pub fn open(path: &Path, start: Start) -> Result<Self> {
        fs::create_dir_all(path).map_err(TrainError::io("create", path))?;
        let lock = lock(path)?;
        let dir = Self { path: path.to_path_buf(), start, _lock: lock };
        dir.refuse_foreign_config()?;
        let found = dir.leftovers();
        if start == Start::Fresh && !found.is_empty() {
            return Err(TrainError::UsedRunDir { path: dir.path, found });
        }
        Ok(dir)
    }

    /// Starts the run, once all input is known to be good: deletes what an overwritten run wrote, and writes the resolved
    /// config and the plan.
    ///
    /// # Errors
    /// If something cannot be deleted or written.
    pub fn begin(&self, config: &Config, plan: &str) -> Result<()> {
        if self.start == Start::Overwrite {
            self.clear()?;
        }
        replace(&self.config_path(), format!("{CONFIG_HEADER}{}", config.to_toml()).as_bytes())?;
        replace(&self.plan_path(), plan.as_bytes())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.toml`.
    pub fn config_path(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// `plan.json`.
    pub fn plan_path(&self) -> PathBuf {
        self.path.join("plan.json")
    }

    /// `metrics.jsonl`.
    pub fn metrics_path(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// `final/`.
    pub fn final_path(&self) -> PathBuf {
        self.path.join("final")
    }

    /// `checkpoints/`.
    pub fn checkpoints(&self) -> Checkpoints {
        Checkpoints::new(self.path.join("checkpoints"))
    }

    fn leftovers(&self) -> Vec<&'static str> {
        ["config.toml", "plan.json", "metrics.jsonl", "checkpoints", "final"]
            .into_iter()
            .filter(|name| self.path.join(name).exists())
            .collect()
    }

    /// Deletes what a run writes. Files of other names stay, and so do the folders they are in.
    fn clear(&self) -> Result<()> {
        for path in [self.config_path(), self.plan_path(), self.metrics_path()] {
            remove_file(&path)?;
        }
        self.checkpoints().clear()?;
        self.clear_final()
    }

    fn clear_final(&self) -> Result<()> {
        let folder = self.final_path();
        let listing = match fs::read_dir(&folder) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            other => other.map_err(TrainError::io("list", &folder))?,
        };
        for entry in listing {
            let entry = entry.map_err(TrainError::io("list", &folder))?;
            if entry.file_name().to_str().is_some_and(is_model_file) {
                remove_file(&entry.path())?;
            }
        }
        match fs::remove_dir(&folder) {
            Err(e) if e.kind() != ErrorKind::DirectoryNotEmpty => Err(TrainError::io("remove", &folder)(e)),
            _ => Ok(()),
        }
    }

    fn refuse_foreign_config(&self) -> Result<()> {
        let path = self.config_path();
        match fs::read_to_string(&path) {
            Ok(text) if !text.starts_with(CONFIG_HEADER) => Err(TrainError::ForeignFile { path }),
            Err(e) if e.kind() != ErrorKind::NotFound => Err(TrainError::io("read", &path)(e)),
            _ => Ok(()),
        }
    }
}

/// Whether a file of that name in a model folder is one that saving a model writes.
fn is_model_file(name: &str) -> bool {
    const NAMES: [&str; 11] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
    ];
    NAMES.contains(&name) || (name.starts_with("model-") && name.ends_with(".safetensors"))
}

fn lock(folder: &Path) -> Result<File> {
    let path = folder.join(".lock");
    let mut options = OpenOptions::new();
    let mut file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(&path)
        .map_err(TrainError::io("create", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // What the holder wrote is a courtesy; without it the refusal stands all the same.
            let _ = file.read_to_string(&mut holder);
            let holder = if holder.is_empty() { "unknown process".into() } else { holder.trim().to_string() };
            return Err(TrainError::LockedRunDir { path: folder.to_path_buf(), holder });
        }
        Err(TryLockError::Error(e)) => return Err(TrainError::io("lock", &path)(e)),
    }
    let name = format!("process {}\n", std::process::id());
    file.set_len(0)
        .and_then(|()| file.rewind())
        .and_then(|()| file.write_all(name.as_bytes()))
        .map_err(TrainError::io("write", &path))?;
    Ok(file)
}

/// Writes a small file so that a reader sees the old content or the new one.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let mut file = File::create(&temporary).map_err(TrainError::io("create", &temporary))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(TrainError::io("write", &temporary))?;
    fs::rename(&temporary, path).map_err(TrainError::io("rename to", path))
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(TrainError::io("remove", path)(e)),
        _ => Ok(()),
    }
}
