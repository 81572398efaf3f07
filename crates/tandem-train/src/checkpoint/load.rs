//! Reading a checkpoint.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::manifest::{CURSOR, Manifest, broken, read_text};
use super::{CHUNK, Cursor, TensorSpec, shard};
use crate::error::{Result, TrainError};

/// A complete, verified checkpoint. Tensors stay in their files until they are asked for, and are read piece by piece
/// straight to where they go: opening one takes no memory.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    cursor: Cursor,
    tensors: Vec<Stored>,
    files: Vec<File>,
}

#[derive(Debug)]
struct Stored {
    spec: TensorSpec,
    /// Index into `files`.
    file: usize,
    /// Bytes from the start of the file.
    offset: u64,
}

impl Checkpoint {
    /// Opens the folder of one checkpoint, checking every file's size and checksum.
    ///
    /// # Errors
    /// If something is missing, damaged or of another version, naming it.
    pub fn open(path: &Path) -> Result<Self> {
        let manifest = Manifest::verified(path)?;
        if !manifest.files.iter().any(|f| f.name == CURSOR) {
            return Err(broken(path, format!("the manifest does not list {CURSOR}")));
        }
        let cursor: Cursor = serde_json::from_str(&read_text(path, CURSOR)?)
            .map_err(|e| broken(path, format!("{CURSOR}: {e}")))?;
        if cursor.step != manifest.step {
            let (in_cursor, in_manifest) = (cursor.step, manifest.step);
            return Err(broken(
                path,
                format!("{CURSOR} is of step {in_cursor}, the manifest of step {in_manifest}"),
            ));
        }
        let mut checkpoint =
            Self { path: path.to_path_buf(), cursor, tensors: Vec::new(), files: Vec::new() };
        for entry in manifest.files.iter().filter(|f| f.name.ends_with(".safetensors")) {
            let full = path.join(&entry.name);
            let mut file = File::open(&full).map_err(TrainError::io("open", &full))?;
            let index = checkpoint.files.len();
            let stored = shard::read_header(path, &entry.name, &mut file)?;
            checkpoint.tensors.extend(stored.into_iter().map(|(spec, offset)| Stored {
                spec,
                file: index,
                offset,
            }));
            checkpoint.files.push(file);
        }
        Ok(checkpoint)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the run stood.
    pub fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Every tensor, in the order of writing.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorSpec> {
        self.tensors.iter().map(|t| &t.spec)
    }

    /// Checks that there is a tensor of this name and shape.
    ///
    /// # Errors
    /// If there is none, or it has another shape: the checkpoint is of another model.
    pub fn check_tensor(&self, spec: &TensorSpec) -> Result<()> {
        let TensorSpec { name, shape } = spec;
        let Some(stored) = self.tensors().find(|t| t.name == *name) else {
            return Err(broken(&self.path, format!("it has no tensor {name:?}")));
        };
        if stored.shape != *shape {
            let found = &stored.shape;
            return Err(broken(
                &self.path,
                format!("tensor {name:?} has shape {found:?}, expected {shape:?}"),
            ));
        }
        Ok(())
    }

    /// Copies elements `start..start + out.len()` of a tensor (row-major) into `out`.
    ///
    /// # Errors
    /// If there is no such tensor or it is shorter, or the file cannot be read.
    pub fn read(&self, name: &str, start: usize, out: &mut [f32]) -> Result<()> {
        let stored = self
            .tensors
            .iter()
            .find(|t| t.spec.name == name)
            .ok_or_else(|| broken(&self.path, format!("it has no tensor {name:?}")))?;
        let (end, length) = (start + out.len(), stored.spec.len());
        if end > length {
            let shape = &stored.spec.shape;
            return Err(broken(
                &self.path,
                format!(
                    "tensor {name:?} has shape {shape:?}, {length} elements; elements {start}..{end} were asked for"
                ),
            ));
        }
        let mut bytes = vec![0u8; 4 * CHUNK.min(out.len())];
        let mut offset = stored.offset + 4 * start as u64;
        for values in out.chunks_mut(CHUNK) {
            let bytes = &mut bytes[..4 * values.len()];
            self.files[stored.file]
                .read_exact_at(bytes, offset)
                .map_err(TrainError::io("read", &self.path))?;
            for (bytes, value) in bytes.chunks_exact(4).zip(values.iter_mut()) {
                *value = f32::from_le_bytes(bytes.try_into().expect("chunks of 4"));
            }
            offset += bytes.len() as u64;
        }
        Ok(())
    }
}
