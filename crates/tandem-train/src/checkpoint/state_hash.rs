//! Hash of all state in a checkpoint, the same on any number of ranks, and the file of these hashes.
//!
//! The message is the cursor, then each tensor in the order of names: name, shape, elements in row-major
//! order as f32. Parts and their files do not enter it. The background writer computes it from the published
//! checkpoint, so it is a hash of what the disk holds, and a checkpoint is complete before its hash is.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use blake3::{Hash, Hasher};
use serde::{Deserialize, Serialize};

use super::{CHUNK, Checkpoint, Cursor, TensorSpec};
use crate::error::{Result, TrainError};

/// First bytes of the message: its name and version.
const DOMAIN: &[u8; 16] = b"tandem-state-v1\0";

/// A line of `states.jsonl`.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    step: u64,
    blake3: String,
}

impl Checkpoint {
    /// Returns the hash of all state that the next step depends on; `None` soon after `give_up` is set.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn state_hash(&self, give_up: &AtomicBool) -> Result<Option<Hash>> {
        let mut hasher = Hasher::new();
        hasher.update(DOMAIN);
        hash_text(&mut hasher, &decisive(self.cursor()));
        let mut tensors: Vec<&TensorSpec> = self.tensors().collect();
        tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let mut room = vec![0.0; CHUNK];
        for tensor in tensors {
            hash_text(&mut hasher, &tensor.name);
            hash_number(&mut hasher, tensor.shape.len());
            tensor.shape.iter().for_each(|&dim| hash_number(&mut hasher, dim));
            for start in (0..tensor.len()).step_by(CHUNK) {
                if give_up.load(Ordering::Relaxed) {
                    return Ok(None);
                }
                let chunk = &mut room[..CHUNK.min(tensor.len() - start)];
                self.read(&tensor.name, start, chunk)?;
                hasher.update(bytemuck::cast_slice(chunk));
            }
        }
        Ok(Some(hasher.finalize()))
    }
}

/// The cursor as text, without the clock and without evaluations, on which no step depends, and without what follows
/// from the weights.
fn decisive(cursor: &Cursor) -> String {
    let cursor = Cursor { seconds: 0.0, best: None, is_evaluation_due: false, ..cursor.beside_weights() };
    serde_json::to_string(&cursor).expect("a cursor is plain data")
}

fn hash_text(hasher: &mut Hasher, text: &str) {
    hash_number(hasher, text.len());
    hasher.update(text.as_bytes());
}

fn hash_number(hasher: &mut Hasher, number: usize) {
    hasher.update(&(number as u64).to_le_bytes());
}

/// Appends the hash of a step's state to the file of hashes.
pub(super) fn append(path: &Path, step: u64, hash: Hash) -> Result<()> {
    let line = Line { step, blake3: hash.to_hex().to_string() };
    let line = serde_json::to_string(&line).expect("a line is plain data") + "\n";
    let mut file =
        OpenOptions::new().create(true).append(true).open(path).map_err(TrainError::io("open", path))?;
    file.write_all(line.as_bytes()).map_err(TrainError::io("write", path))
}

/// Appends the hash of the state in a checkpoint's folder to the file of hashes, unless `give_up` is set meanwhile.
pub(crate) fn record_state(states: &Path, folder: &Path, give_up: &AtomicBool) -> Result<()> {
    let checkpoint = Checkpoint::open_checked(folder)?;
    match checkpoint.state_hash(give_up)? {
        Some(hash) => append(states, checkpoint.cursor().step, hash),
        None => Ok(()),
    }
}

/// Reads the hashes of states by step. Lines that are none are left out. A missing file has none.
pub(crate) fn read_states(path: &Path) -> Result<BTreeMap<u64, Hash>> {
    let file = match tandem_files::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
        opened => opened.map_err(TrainError::io("open", path))?,
    };
    let parse = |line: Vec<u8>| {
        let Line { step, blake3 } = serde_json::from_slice(&line).ok()?;
        Some((step, Hash::from_hex(blake3).ok()?))
    };
    let lines = BufReader::new(file).split(b'\n');
    let parsed = lines.filter_map(|line| line.map(parse).transpose());
    parsed.collect::<std::io::Result<_>>().map_err(TrainError::io("read", path))
}
