//! Training state on disk: all of it or none of it.
//!
//! ```text
//! checkpoints/step-000200/
//!   state-00001-of-00002.safetensors   logical tensors, f32: masters and optimiser states
//!   state-00002-of-00002.safetensors
//!   cursor.json                        where in the run and in the data
//!   manifest.json                      size and BLAKE3 checksum of every other file
//! ```
//!
//! [`Checkpoints::save`] writes under a temporary name, makes the files durable, reads them back against the manifest, and
//! only then renames; so a folder named `step-…` was complete when it got its name, and a process killed at any moment, or
//! a full disk, leaves the older ones as they were. [`Checkpoints::latest`] checks every byte again before it trusts one.
//!
//! Tensors are logical (whole, named by the model), so a checkpoint does not depend on how a run was spread over ranks.
//! Values are copied bit by bit, NaN payloads included.

mod cursor;
mod folder;
mod load;
mod manifest;
mod save;
mod shard;

pub use cursor::Cursor;
pub use folder::{Checkpoints, Latest};
pub use load::Checkpoint;

use crate::error::Result;

/// Elements moved at once between a [`StateSource`] and a file.
const CHUNK: usize = 1 << 18;

/// Name and shape of a stored tensor of f32.
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

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a checkpoint is made from: tensors handed out piece by piece, so that nobody needs a second copy of the state.
pub trait StateSource {
    /// Every tensor, in the order of writing.
    fn tensors(&self) -> Vec<TensorSpec>;

    /// Copies elements `start..start + out.len()` of tensor `index` (row-major) into `out`.
    ///
    /// # Errors
    /// If the elements cannot be read from where they live.
    fn read(&self, index: usize, start: usize, out: &mut [f32]) -> Result<()>;
}

/// A tensor in host memory.
#[derive(Clone, Debug)]
pub struct NamedTensor<'a> {
    /// Name and shape.
    pub spec: TensorSpec,
    /// Elements, row-major.
    pub data: &'a [f32],
}

impl StateSource for [NamedTensor<'_>] {
    fn tensors(&self) -> Vec<TensorSpec> {
        self.iter().map(|t| t.spec.clone()).collect()
    }

    fn read(&self, index: usize, start: usize, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self[index].data[start..start + out.len()]);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
