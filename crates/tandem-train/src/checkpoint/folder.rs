//! The folder of a run's checkpoints: adding one, finding the newest, deleting the oldest.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::save::{Part, part_name, seal, write_part};
use super::{Checkpoint, Cursor, TensorShard};
use crate::disk::{Disk, RealDisk, appears, remove_if_empty};
use crate::error::{Result, TrainError};

/// A folder `checkpoints/`. One run at a time writes to it (see
/// [`RunDir`](crate::run::run_dir::RunDir)), with all of its ranks.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    root: PathBuf,
    disk: Arc<dyn Disk>,
}

/// Result of a search for the newest checkpoint.
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
        Self { root: root.into(), disk: Arc::new(RealDisk) }
    }

    /// The checkpoints of a run in `output`.
    pub fn for_run(output: &Path) -> Self {
        Self::new(output.join("checkpoints"))
    }

    /// Opens the folder on another disk, for tests.
    #[cfg(test)]
    pub(crate) fn on(&self, disk: Arc<dyn Disk>) -> Self {
        Self { disk, ..self.clone() }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Creates the temporary folder of a step's checkpoint. Rank 0 calls this before any rank
    /// writes its part. Leftovers of a killed process are removed.
    pub fn begin(&self, step: u64) -> Result<()> {
        let temporary = self.temporary(step);
        self.disk.create_dir(&self.root).map_err(TrainError::io("create", &self.root))?;
        // What cannot be removed now is told when old checkpoints are deleted.
        let _ = self.sweep();
        self.disk.create_dir(&temporary).map_err(TrainError::io("create", &temporary))
    }

    /// Writes a rank's part. Returns when it is durable and read back, or soon after `give_up` is
    /// set.
    ///
    /// # Errors
    /// The part cannot be written (a full disk, say), or the folder of rank 0 is not visible here.
    pub fn write_part(
        &self,
        step: u64,
        rank: usize,
        num_ranks: usize,
        pieces: &[TensorShard<'_>],
        give_up: &AtomicBool,
    ) -> Result<Part> {
        let temporary = self.temporary(step);
        let is_here = || temporary.exists() || give_up.load(Ordering::Relaxed);
        if rank > 0 && !appears(is_here) {
            return Err(TrainError::NotShared { path: temporary, writer: 0, reader: rank });
        }
        write_part(&*self.disk, &temporary, part_name(rank, num_ranks), pieces, give_up)
    }

    /// Makes the parts of all ranks a checkpoint: the first rank, when they are written. Returns
    /// its folder, durable.
    ///
    /// # Errors
    /// A part is missing, or a file cannot be written. Older checkpoints are unchanged.
    pub fn publish(&self, cursor: &Cursor, parts: &[Part]) -> Result<PathBuf> {
        let temporary = self.temporary(cursor.step);
        seal(&*self.disk, &temporary, cursor, parts)?;
        self.rename(&temporary, cursor.step)
    }

    /// Removes a rank's part of an unfinished checkpoint. Best effort: the next one sweeps again.
    pub fn abandon_part(&self, step: u64, rank: usize, num_ranks: usize) {
        let _ = fs::remove_file(self.temporary(step).join(part_name(rank, num_ranks)));
    }

    /// Removes an unfinished checkpoint, after all ranks have stopped writing.
    pub fn abandon(&self, step: u64) {
        let _ = self.disk.remove_dir(&self.temporary(step));
    }

    /// Path of a step's complete checkpoint.
    pub fn folder_of(&self, step: u64) -> PathBuf {
        self.root.join(folder_name(step))
    }

    /// Temporary path while it is written.
    fn temporary(&self, step: u64) -> PathBuf {
        self.root.join(format!(".{}.tmp", folder_name(step)))
    }

    /// Renames a finished folder to its final name. An existing folder of that name (damaged, or of
    /// the same content) is moved aside first and deleted last, so that a failure can restore it.
    fn rename(&self, temporary: &Path, step: u64) -> Result<PathBuf> {
        let disk = &*self.disk;
        let target = self.folder_of(step);
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
            // The new folder is in place; the next save sweeps leftovers.
            let _ = disk.remove_dir(&aside);
        }
        Ok(target)
    }

    /// Finds the newest complete checkpoint. Torn or damaged ones are skipped and reported.
    pub fn latest(&self) -> Result<Latest> {
        let mut skipped = Vec::new();
        for step in self.steps()?.into_iter().rev() {
            match Checkpoint::open(&self.folder_of(step)) {
                Ok(checkpoint) => return Ok(Latest { checkpoint: Some(checkpoint), skipped }),
                Err(error) => skipped.push(error),
            }
        }
        Ok(Latest { checkpoint: None, skipped })
    }

    /// Deletes all but the newest `keep` checkpoints of steps up to `step`, the one just saved, and the
    /// one of step `best`. Checkpoints of later steps were found damaged on resume; they stay for
    /// inspection until they are overwritten.
    ///
    /// # Errors
    /// The first of those that cannot be deleted, now or when they were old before; the newest `keep` are never touched.
    pub fn prune(&self, keep: usize, step: u64, best: Option<u64>) -> Result<()> {
        let leftovers = self.remove_unnamed(&[".old"]);
        let steps: Vec<u64> = self.steps()?.into_iter().filter(|s| *s <= step).collect();
        let surplus = steps.len().saturating_sub(keep.max(1));
        let old = steps[..surplus].iter().filter(|old| best != Some(**old));
        old.map(|old| self.discard(&self.folder_of(*old))).fold(leftovers, Result::and)
    }

    /// Steps of the folders that carry a checkpoint's name, ascending.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps: Vec<u64> =
            self.names()?.iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Deletes every file that this module writes, and the folder if it is then empty. A link to a folder stays.
    pub fn clear(&self) -> Result<()> {
        self.sweep()?;
        for step in self.steps()? {
            self.discard(&self.folder_of(step))?;
        }
        remove_if_empty(&self.root)
    }

    /// Removes unfinished and half-deleted folders of a killed process.
    ///
    /// # Errors
    /// The first of those that cannot be removed.
    pub(crate) fn sweep(&self) -> Result<()> {
        self.remove_unnamed(&[".tmp", ".old"])
    }

    /// Removes folders that are no checkpoints yet, or any more, with one of these ends.
    fn remove_unnamed(&self, ends: &[&str]) -> Result<()> {
        let is_one = |name: &String| name.starts_with(".step-") && ends.iter().any(|end| name.ends_with(end));
        let remove = |name| {
            let path = self.root.join(name);
            self.disk.remove_dir(&path).map_err(TrainError::io("remove", &path))
        };
        self.names()?.into_iter().filter(is_one).map(remove).fold(Ok(()), Result::and)
    }

    /// Deletes one checkpoint: its name goes first, in one operation.
    fn discard(&self, folder: &Path) -> Result<()> {
        let name = folder.file_name().expect("a checkpoint has a name").to_string_lossy();
        let aside = self.root.join(format!(".{name}.old"));
        self.disk.rename(folder, &aside).map_err(TrainError::io("rename", folder))?;
        self.disk.remove_dir(&aside).map_err(TrainError::io("remove", &aside))
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
