//! The folder of a run's checkpoints: adding one, finding the newest, deleting the oldest.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::save::write_folder;
use super::{Checkpoint, Cursor, StateSource};
use crate::disk::{Disk, RealDisk};
use crate::error::{Result, TrainError};

/// Data bytes of one safetensors file.
const MAX_SHARD_BYTES: usize = 4 << 30;

/// A folder `checkpoints/`. One process at a time writes to it (see [`RunDir`](crate::run_dir::RunDir)).
#[derive(Clone, Debug)]
pub struct Checkpoints {
    root: PathBuf,
}

/// What a search for the newest checkpoint found.
#[derive(Debug)]
pub struct Latest {
    /// The newest complete one, if any.
    pub checkpoint: Option<Checkpoint>,
    /// Newer ones that cannot be used, with the reason; to be shown as warnings.
    pub skipped: Vec<TrainError>,
}

impl Checkpoints {
    /// The checkpoints under `root`, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Saves `state` as `step-NNNNNN` of the cursor's step. Returns the new folder, durable and verified.
    ///
    /// # Errors
    /// If anything cannot be written (a full disk, say) or `state` cannot be read. What was unfinished is removed and every
    /// older checkpoint is as it was.
    pub fn save(&self, cursor: &Cursor, state: &(impl StateSource + ?Sized)) -> Result<PathBuf> {
        self.save_on(&RealDisk, cursor, state, MAX_SHARD_BYTES)
    }

    pub(super) fn save_on(
        &self,
        disk: &dyn Disk,
        cursor: &Cursor,
        state: &(impl StateSource + ?Sized),
        max_shard_bytes: usize,
    ) -> Result<PathBuf> {
        disk.create_dir(&self.root).map_err(TrainError::io("create", &self.root))?;
        self.sweep(disk)?;
        let temporary = self.root.join(format!(".{}.tmp", folder_name(cursor.step)));
        let saved = write_folder(disk, &temporary, cursor, state, max_shard_bytes)
            .and_then(|()| self.publish(disk, &temporary, cursor.step));
        if saved.is_err() {
            // Best effort: the error to report is the first one, and the next save sweeps again.
            let _ = disk.remove_dir(&temporary);
        }
        saved
    }

    /// Gives a finished folder its name. One of that name, which is damaged or of the same content (a run resumes from the
    /// newest that is whole), is moved aside first and deleted last, so that a failure can put it back.
    fn publish(&self, disk: &dyn Disk, temporary: &Path, step: u64) -> Result<PathBuf> {
        let target = self.root.join(folder_name(step));
        let aside = self.root.join(format!(".{}.old", folder_name(step)));
        let replaces = target.exists();
        if replaces {
            disk.rename(&target, &aside).map_err(TrainError::io("rename", &target))?;
        }
        if let Err(error) = disk.rename(temporary, &target) {
            if replaces {
                let _ = disk.rename(&aside, &target);
            }
            return Err(TrainError::io("rename to", &target)(error));
        }
        disk.sync_dir(&self.root).map_err(TrainError::io("sync", &self.root))?;
        if replaces {
            // The new one stands; what could not be removed now is swept by the next save.
            let _ = disk.remove_dir(&aside);
        }
        Ok(target)
    }

    /// The newest complete checkpoint. Those that are torn or damaged are passed over and reported.
    ///
    /// # Errors
    /// If the folder itself cannot be listed.
    pub fn latest(&self) -> Result<Latest> {
        let mut skipped = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            match Checkpoint::open(&self.root.join(folder_name(step))) {
                Ok(checkpoint) => return Ok(Latest { checkpoint: Some(checkpoint), skipped }),
                Err(error) => skipped.push(error),
            }
        }
        Ok(Latest { checkpoint: None, skipped })
    }

    /// Deletes all but the newest `keep` checkpoints of steps up to `step`, the one just saved. Those of later steps were
    /// found damaged when the run resumed before them; they are left for a person to look at until they are overwritten.
    ///
    /// # Errors
    /// If one cannot be deleted; the newest `keep` are never touched.
    pub fn prune(&self, keep: usize, step: u64) -> Result<()> {
        let steps: Vec<u64> = self.steps()?.into_iter().filter(|s| *s <= step).collect();
        let surplus = steps.len().saturating_sub(keep.max(1));
        for old in &steps[..surplus] {
            self.discard(&RealDisk, &self.root.join(folder_name(*old)))?;
        }
        Ok(())
    }

    /// Steps of the folders that carry a checkpoint's name, ascending.
    ///
    /// # Errors
    /// If the folder exists and cannot be listed.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps: Vec<u64> =
            self.names()?.iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Deletes everything this module ever wrote, and the folder if nothing else is in it.
    ///
    /// # Errors
    /// If something cannot be deleted.
    pub fn clear(&self) -> Result<()> {
        self.sweep(&RealDisk)?;
        for step in self.steps()? {
            self.discard(&RealDisk, &self.root.join(folder_name(step)))?;
        }
        match fs::remove_dir(&self.root) {
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
                Err(TrainError::io("remove", &self.root)(e))
            }
            _ => Ok(()),
        }
    }

    /// Removes what a killed process left: unfinished and half-deleted folders.
    fn sweep(&self, disk: &dyn Disk) -> Result<()> {
        for name in self.names()? {
            if name.starts_with(".step-") && (name.ends_with(".tmp") || name.ends_with(".old")) {
                let path = self.root.join(name);
                disk.remove_dir(&path).map_err(TrainError::io("remove", &path))?;
            }
        }
        Ok(())
    }

    /// Deletes one checkpoint: its name goes first, in one operation.
    fn discard(&self, disk: &dyn Disk, folder: &Path) -> Result<()> {
        let name = folder.file_name().expect("a checkpoint has a name").to_string_lossy();
        let aside = self.root.join(format!(".{name}.old"));
        disk.rename(folder, &aside).map_err(TrainError::io("rename", folder))?;
        disk.remove_dir(&aside).map_err(TrainError::io("remove", &aside))
    }

    fn names(&self) -> Result<Vec<String>> {
        let listing = match fs::read_dir(&self.root) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(TrainError::io("list", &self.root))?,
        };
        let mut names = Vec::new();
        for entry in listing {
            let entry = entry.map_err(TrainError::io("list", &self.root))?;
            names.extend(entry.file_name().into_string());
        }
        Ok(names)
    }
}

/// `step-000200`.
fn folder_name(step: u64) -> String {
    format!("step-{step:06}")
}
