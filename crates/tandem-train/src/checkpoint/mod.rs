//! Training state on disk: all of it or none of it.
//!
//! ```text
//! checkpoints/step-000200/
//!   state-00001-of-00002.safetensors   what the first of two ranks has written: masters and optimiser states, f32
//!   state-00002-of-00002.safetensors   the second's
//!   cursor.json                        where in the run and in the data
//!   manifest.json                      size and BLAKE3 checksum of every other file
//! ```
//!
//! Tensors are logical: whole and named by the model. A rank writes *pieces*, ranges of elements,
//! so that ranks write in parallel and nothing is written twice. A tensor written whole keeps its
//! name; a piece is named after its row-major elements, `policy/block.3.qkv_weight[4096..8192]`,
//! and the metadata holds the tensor's shape. A rank with some columns of a matrix names them too:
//! `policy/block.3.out_weight[0..8192|64..128]` are elements of the matrix of columns 64 to 127.
//! Any number of ranks can read a checkpoint. Values are copied bit by bit, NaN payloads included.
//! Optimizer states kept in fewer bits are written as f32 and convert back to the same bits.
//!
//! Rank 0 creates a temporary folder ([`Checkpoints::begin`]). Each rank writes its file, syncs it
//! and reads it back ([`Checkpoints::write_part`]). Rank 0 then writes the manifest and renames the
//! folder ([`Checkpoints::publish`]). A folder named `step-…` is therefore complete, and a kill or
//! a full disk leaves the older ones intact. [`Checkpoints::latest`] verifies every byte before it
//! returns one.

mod compare;
mod cursor;
mod export;
mod folder;
mod load;
mod manifest;
mod online;
mod save;
mod saver;
mod shard;
pub(crate) mod snapshot;
pub(crate) mod state;
pub(crate) mod state_hash;

pub use compare::{Comparison, ElementDifference, compare};
pub use cursor::{BestEvaluation, Cursor};
pub use export::export;
pub use folder::{Checkpoints, Latest};
pub use load::Checkpoint;
pub use online::{Answer, Batch, CompletedPrompt, JudgeScore, Message, OnlineState, Turn};
pub use save::Part;
pub(crate) use saver::STATES;
pub use saver::Saver;
pub(crate) use state_hash::{read_states, record_state};

use std::ops::Range;

use tandem_kernels::StatesView;

/// Elements moved at once between memory and a file.
const CHUNK: usize = 1 << 18;

#[cfg(target_endian = "big")]
compile_error!("checkpoints are written as they lie in memory, which must be little-endian");

/// Name and shape of a tensor of f32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Unique name.
    pub name: String,
    /// Shape, slowest dimension first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of columns: the last dimension.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Returns whether the piece is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A run of a tensor's elements, or of the matrix that some of its columns make, in host memory.
#[derive(Clone)]
pub struct TensorShard<'a> {
    /// The whole tensor.
    pub tensor: TensorSpec,
    /// The columns, usually all.
    pub columns: Range<usize>,
    /// The element (row-major) of these columns with which the piece begins.
    pub start: usize,
    /// The elements; states in fewer bits are converted to f32.
    pub data: StatesView<'a>,
}

impl<'a> TensorShard<'a> {
    /// A run of the tensor itself.
    pub fn new(tensor: TensorSpec, start: usize, data: &'a [f32]) -> Self {
        Self { columns: 0..tensor.columns(), tensor, start, data: data.into() }
    }

    /// Offset within its columns.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.data.len()
    }
}

#[cfg(test)]
mod tests;
