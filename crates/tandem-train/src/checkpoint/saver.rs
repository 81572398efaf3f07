//! Background checkpoint writer of all ranks.
//!
//! ```text
//!             training                          a thread of its own
//! begin       the first rank makes the folder,
//!             each rank copies its share   →    write it, make it durable, read it back
//!  ⋮ steps    at the end of each, ranks tell
//!             one another who is done
//! seal        all are: sizes and checksums
//!             go to the first rank         →    the first: manifest, rename, remove the oldest,
//!                                               hash all state
//!  ⋮ steps
//! published   the first rank tells of it
//! ```
//!
//! At most one checkpoint is in progress: [`Saver::begin`] follows [`Saver::finish`], which waits.
//! Ranks communicate only in `begin`, `seal` and `finish`, at the same point of the run; writer
//! threads never do. Without memory for a copy, the shard is written at once from its place.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use tandem_comm::ProcessGroup;
use tandem_kernels::Device;
use tandem_model::Decoder;

use crate::checkpoint::snapshot::{CheckpointShard, Snapshot};
use crate::checkpoint::state::CheckpointState;
use crate::checkpoint::state_hash::record_state;
use crate::checkpoint::{Checkpoints, Cursor, Part};
use crate::config::Config;
use crate::parallel::DeviceMesh;
use crate::{Result, TrainError};

/// File in the run folder with the hash of all state at each checkpoint, those that are deleted included.
pub(crate) const STATES: &str = "states.jsonl";

/// One rank's side of saving.
pub struct Saver {
    checkpoints: Checkpoints,
    /// File of the hashes of all states.
    states: PathBuf,
    keep: Option<usize>,
    rank: usize,
    num_ranks: usize,
    share: CheckpointShard,
    /// The copy, when it is not being written; `None` also where there is none.
    snapshot: Option<Snapshot>,
    stage: Stage,
    /// Step of the checkpoint that is begun and not complete.
    unfinished: Option<u64>,
    /// Whether all ranks have written their parts.
    all_written: bool,
    /// Tells the writer thread to stop.
    give_up: Arc<AtomicBool>,
    unremoved: Unremoved,
}

/// Old checkpoints that stay.
enum Unremoved {
    None,
    /// Not told yet.
    First(TrainError),
    Told,
}

/// A complete checkpoint.
struct Published {
    path: PathBuf,
    /// Whether old ones could be deleted.
    pruned: Result<()>,
}

/// State of the checkpoint in progress.
enum Stage {
    /// There is none; on the others than the first rank, none that they have to do with.
    Idle,
    /// This rank's part is being written.
    Writing { cursor: Cursor, thread: JoinHandle<(Snapshot, Result<Part>)> },
    /// This rank has written; others may not have.
    Written { cursor: Cursor, part: Part },
    /// All ranks have written (rank 0 only).
    Publishing { thread: JoinHandle<Result<Published>> },
}

impl Saver {
    /// Creates the writer, with this rank's shard and its copy buffer, if any.
    pub fn new(
        config: &Config,
        decoder: &Arc<Decoder>,
        mesh: &mut DeviceMesh,
        snapshot: Option<Snapshot>,
    ) -> Self {
        let share = CheckpointShard::new(decoder, &config.compute, mesh.share());
        let (rank, num_ranks) = (mesh.world().rank(), mesh.world().size());
        Self {
            checkpoints: Checkpoints::for_run(&config.output),
            states: config.output.join(STATES),
            keep: config.train.keep,
            rank,
            num_ranks,
            share,
            snapshot,
            stage: Stage::Idle,
            unfinished: None,
            all_written: false,
            give_up: Arc::default(),
            unremoved: Unremoved::None,
        }
    }

    /// From now on, on another disk.
    #[cfg(test)]
    pub(crate) fn write_on(&mut self, disk: Arc<dyn crate::disk::Disk>) {
        self.checkpoints = self.checkpoints.on(disk);
    }

    /// Path of a step's complete checkpoint.
    pub fn folder_of(&self, step: u64) -> PathBuf {
        self.checkpoints.folder_of(step)
    }

    /// Copies the state and starts writing. Collective; nothing may be in progress.
    ///
    /// # Errors
    /// The folder cannot be created, or, without a copy, the part cannot be written.
    pub fn begin(
        &mut self,
        cursor: &Cursor,
        group: &mut ProcessGroup,
        device: &Device,
        state: CheckpointState<'_>,
    ) -> Result<()> {
        assert!(matches!(self.stage, Stage::Idle), "a checkpoint was begun before the last one was finished");
        let (step, rank, num_ranks) = (cursor.step, self.rank, self.num_ranks);
        (self.unfinished, self.all_written) = (Some(step), false);
        if rank == 0 {
            self.checkpoints.begin(step)?;
        }
        // No rank writes before the folder exists.
        group.barrier()?;
        let (checkpoints, cursor) = (self.checkpoints.clone(), cursor.clone());
        let Some(mut snapshot) = self.snapshot.take() else {
            let pieces = self.share.all_pieces(state);
            let part = checkpoints.write_part(step, rank, num_ranks, &pieces, &self.give_up)?;
            self.stage = Stage::Written { cursor, part };
            state.evict_pages();
            return Ok(());
        };
        snapshot.fill(device, state)?;
        state.evict_pages();
        let (give_up, device) = (self.give_up.clone(), device.clone());
        let thread = spawn(move || {
            let write = || checkpoints.write_part(step, rank, num_ranks, &snapshot.pieces(), &give_up);
            let part = device.time_host_work("write", 0, write);
            (snapshot, part)
        })?;
        self.stage = Stage::Writing { cursor, thread };
        Ok(())
    }

    /// Returns whether this rank is still writing. Does not wait.
    pub fn is_writing(&mut self) -> Result<bool> {
        match &self.stage {
            Stage::Writing { thread, .. } if !thread.is_finished() => Ok(true),
            _ => self.join().map(|()| false),
        }
    }

    /// Completes the checkpoint on rank 0. Collective, after all ranks have written.
    pub fn seal(&mut self, group: &mut ProcessGroup) -> Result<()> {
        let (cursor, part) = match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Written { cursor, part } => (cursor, part),
            other => {
                self.stage = other;
                return Ok(());
            }
        };
        let records = group.gather(&part.to_record(), &vec![Part::RECORD; self.num_ranks])?;
        if self.rank > 0 {
            self.unfinished = None;
            return Ok(());
        }
        self.all_written = true;
        let (records, _) = records.as_chunks();
        let parts: Vec<Part> = records.iter().map(Part::from_record).collect();
        let (checkpoints, keep) = (self.checkpoints.clone(), self.keep);
        let (states, give_up) = (self.states.clone(), self.give_up.clone());
        let thread = spawn(move || {
            let path = checkpoints.publish(&cursor, &parts)?;
            tracing::debug!("complete and durable: {}", path.display());
            let best = cursor.best.as_ref().map(|best| best.step);
            // Somebody else's file in an old one is no reason to lose the steps since.
            let pruned = keep.map_or(Ok(()), |keep| checkpoints.prune(keep, cursor.step, best));
            record_state(&states, &path, &give_up)?;
            Ok(Published { path, pruned })
        })?;
        self.stage = Stage::Publishing { thread };
        Ok(())
    }

    /// The folder of a checkpoint that has become complete since the last call; on the first rank.
    /// Does not wait.
    pub fn published(&mut self) -> Result<Option<PathBuf>> {
        match &self.stage {
            Stage::Publishing { thread } if thread.is_finished() => self.join_publishing(),
            _ => Ok(None),
        }
    }

    /// Returns why an old checkpoint could not be deleted, the first time.
    pub fn take_unremoved(&mut self) -> Option<TrainError> {
        match std::mem::replace(&mut self.unremoved, Unremoved::Told) {
            Unremoved::First(error) => Some(error),
            other => {
                self.unremoved = other;
                None
            }
        }
    }

    /// Waits for the checkpoint in progress. Collective; rank 0 returns the folder.
    pub fn finish(&mut self, group: &mut ProcessGroup) -> Result<Option<PathBuf>> {
        self.join()?;
        self.seal(group)?;
        self.join_publishing()
    }

    /// Waits for this rank's part and takes the copy back.
    fn join(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Writing { cursor, thread } => {
                let (snapshot, part) = ended(thread);
                self.snapshot = Some(snapshot);
                self.stage = Stage::Written { cursor, part: part? };
            }
            other => self.stage = other,
        }
        Ok(())
    }

    fn join_publishing(&mut self) -> Result<Option<PathBuf>> {
        match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Publishing { thread } => {
                let Published { path, pruned } = ended(thread)?;
                self.unfinished = None;
                if let (Unremoved::None, Err(error)) = (&self.unremoved, pruned) {
                    self.unremoved = Unremoved::First(error);
                }
                Ok(Some(path))
            }
            other => {
                self.stage = other;
                Ok(None)
            }
        }
    }
}

impl Drop for Saver {
    /// After an error the checkpoint stays unfinished. A rank removes its part to free the disk;
    /// the next run sweeps the rest of the folder.
    fn drop(&mut self) {
        self.give_up.store(true, Ordering::Relaxed);
        match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Writing { thread, .. } => drop(thread.join()),
            Stage::Publishing { thread } => drop(thread.join()),
            Stage::Idle | Stage::Written { .. } => {}
        }
        if let Some(step) = self.unfinished {
            if self.all_written || self.num_ranks == 1 {
                self.checkpoints.abandon(step);
            } else {
                self.checkpoints.abandon_part(step, self.rank, self.num_ranks);
            }
        }
    }
}

fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    let thread = thread::Builder::new().name("checkpoint".to_owned()).spawn(work);
    thread.map_err(TrainError::io("start a thread to write", std::path::Path::new("checkpoints")))
}

/// Joins a thread and propagates its panic.
fn ended<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
