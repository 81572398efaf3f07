//! The reference's log-probabilities of all rows, on disk and computed.

use std::fs;
use std::path::{Path, PathBuf};

use tandem_comm::{ProcessGroup, Reduction};
use tandem_data::token_cache::TokenCache;
use tandem_kernels::ops::HeadScores;
use tandem_model::{PolicyAndReferenceScores, WeightSource};

use crate::disk::replace_file;
use crate::parallel::StagedExecutor;
use crate::recipe::MicroBatch;
use crate::{Result, TrainError};

/// Summed log-probabilities of the answers of each row: `[chosen, rejected]`, or twice that of a labelled
/// completion. NaN of a row that no step of a run has read.
#[derive(Clone, Debug, PartialEq)]
pub struct RowScores(pub Vec<[f64; 2]>);

/// First bytes of a file of row scores: format name and version.
const MAGIC: &[u8; 16] = b"tandem-ref-v2\0\0\0";

impl RowScores {
    /// The file for the given content key.
    pub fn path(folder: &Path, key: &str) -> PathBuf {
        folder.join(format!("reference-{key}.bin"))
    }

    /// Returns the scores of a micro-batch's sequences; 0 of those that are in no pair.
    pub(super) fn of(&self, batch: &MicroBatch) -> Vec<f64> {
        let mut scores = vec![0.0; batch.forest.num_sequences as usize];
        for (&row, pair) in batch.rows.iter().zip(&batch.pairs) {
            let row = self.0[row as usize];
            for (sequence, score) in pair.iter().zip(row) {
                scores[*sequence as usize] = score;
            }
        }
        scores
    }

    /// Returns whether these rows have scores.
    pub(super) fn has(&self, rows: &[u32]) -> bool {
        rows.iter().all(|&row| !self.0[row as usize][0].is_nan())
    }

    /// Takes the scores of all rows but these, which are sorted, from `earlier` ones.
    pub(super) fn keep(&mut self, rows: &[u32], earlier: Option<&Self>) {
        let mut own = rows.iter().copied().peekable();
        for (row, score) in self.0.iter_mut().enumerate() {
            if own.next_if_eq(&(row as u32)).is_none() {
                *score = earlier.map_or([f64::NAN; 2], |earlier| earlier.0[row]);
            }
        }
    }

    /// Reads scores; `None` if the file is absent, incomplete or damaged, in which case they are
    /// computed again.
    pub fn read(path: &Path, num_rows: usize) -> Option<Self> {
        let bytes = fs::read(path).ok()?;
        let body = bytes.strip_prefix(MAGIC)?;
        let (body, checksum) = body.split_at_checked(num_rows * 16)?;
        if blake3::hash(body).as_bytes() != checksum {
            return None;
        }
        let number = |b: &[u8]| f64::from_le_bytes(b.try_into().expect("eight bytes"));
        Some(Self(body.chunks_exact(16).map(|row| [number(&row[..8]), number(&row[8..])]).collect()))
    }

    /// Writes scores under a temporary name and renames.
    ///
    /// # Errors
    /// The file cannot be written; no partial file stays.
    pub fn write(&self, path: &Path) -> Result<()> {
        let folder = path.parent().expect("a path inside the cache folder");
        fs::create_dir_all(folder).map_err(TrainError::io("write", path))?;
        let body: Vec<u8> = self.0.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
        // Under a free name: processes of several containers may have one number.
        replace_file(path, &[&MAGIC[..], &body, blake3::hash(&body).as_bytes()].concat())
    }

    /// Runs the reference over `batches`, this rank's share, and stores two numbers per row. Scores
    /// of other data ranks are added; every stage receives the last stage's. `idle_rounds` counts
    /// lockstep passes without own work.
    pub fn compute(
        executor: &StagedExecutor<'_>,
        weights: &mut dyn WeightSource,
        cache: &TokenCache,
        group: &mut ProcessGroup,
        batches: impl Iterator<Item = Result<MicroBatch>>,
        idle_rounds: usize,
        mut progress: impl FnMut(u64),
    ) -> Result<Self> {
        let mut rows = vec![[0.0; 2]; cache.num_rows()];
        let mut scores = HeadScores::default();
        let mut done = 0;
        for batch in batches {
            let batch = batch?;
            executor.forward(weights, &batch.forest, PolicyAndReferenceScores::one(&mut scores), false)?;
            weights.release_all();
            if executor.is_last() {
                let sums = batch.sequence_log_probs(&scores);
                for (&row, pair) in batch.rows.iter().zip(&batch.pairs) {
                    rows[row as usize] = pair.map(|sequence| sums[sequence as usize]);
                }
            }
            // Progress as if all ranks were equally far.
            done += (batch.rows.len() * group.size()) as u64;
            progress(done);
        }
        for _ in 0..idle_rounds {
            executor.executor.idle_forward(weights)?;
            weights.release_all();
        }
        if group.size() > 1 {
            group.all_reduce(rows.as_flattened_mut(), Reduction::Sum)?;
        }
        if let Some(stages) = executor.stages {
            stages.broadcast_from_last(rows.as_flattened_mut())?;
        }
        Ok(Self(rows))
    }
}
