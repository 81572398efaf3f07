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
//! Tensors are logical: whole, named by the model. A rank writes *pieces* of them, runs of elements, so that ranks write at
//! the same time and nothing is written twice. A tensor that one rank writes whole stands in its file as it is; a piece is
//! named `policy/block.3.qkv_weight[4096..8192]` after its elements (row-major), and the shape of the tensor stands in the
//! file's metadata under the tensor's name. A rank that holds only some columns of a matrix names them too:
//! `policy/block.3.out_weight[0..8192|64..128]` are elements of the matrix that columns 64 to 127 make. So a checkpoint can
//! be read by any number of ranks, each of which reads what it needs. Values are copied bit by bit, NaN payloads included; optimiser
//! states that are kept in fewer bits are written as f32, from which they become again what they were.
//!
//! The first rank makes a folder of a temporary name ([`Checkpoints::begin`]); each rank writes its file there, makes it
//! durable and reads it back ([`Checkpoints::write_part`]); when all have, the first writes the manifest and only then
//! renames ([`Checkpoints::publish`]). So a folder named `step-…` was complete when it got its name, and a process killed at
//! any moment, or a full disk, leaves the older ones as they were. [`Checkpoints::latest`] checks every byte again before it
//! trusts one.

mod cursor;
mod folder;
mod load;
mod manifest;
mod online;
mod save;
mod saver;
mod shard;
pub mod snapshot;
pub mod state;

pub use cursor::Cursor;
pub use folder::{Checkpoints, Latest};
pub use load::Checkpoint;
pub use online::{Answer, Batch, CompletedPrompt, JudgeScore, OnlineState};
pub use save::Part;
pub use saver::Saver;

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

    /// Whether there are no elements.
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
    /// The elements. What is kept in fewer bits is written as the f32 that it stands for.
    pub data: StatesView<'a>,
}

impl<'a> TensorShard<'a> {
    /// A run of the tensor itself.
    pub fn of(tensor: TensorSpec, start: usize, data: &'a [f32]) -> Self {
        Self { columns: 0..tensor.columns(), tensor, start, data: data.into() }
    }

    /// Its place in its columns.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.data.len()
    }
}

#[cfg(test)]
mod tests;
