//! Reading a checkpoint.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::manifest::{CURSOR, Manifest, broken, read_text};
use super::shard::Entry;
use super::{Cursor, TensorSpec, shard};
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
    /// In the order of their elements, of which none is missing.
    pieces: Vec<StoredPiece>,
}

#[derive(Debug)]
struct StoredPiece {
    /// Elements of the tensor.
    range: Range<usize>,
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
        let manifest = Manifest::read(path)?;
        manifest.verify(path)?;
        Self::of(path, &manifest)
    }

    /// As [`Checkpoint::open`], of one that another rank has just checked: reads no more than the headers.
    ///
    /// # Errors
    /// If something is missing or of another version, naming it.
    pub fn open_checked(path: &Path) -> Result<Self> {
        Self::of(path, &Manifest::read(path)?)
    }

    fn of(path: &Path, manifest: &Manifest) -> Result<Self> {
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
        let (mut tensors, mut files) = (Vec::<Stored>::new(), Vec::new());
        let mut places = HashMap::new();
        for file_entry in manifest.files.iter().filter(|f| f.name.ends_with(".safetensors")) {
            let full = path.join(&file_entry.name);
            let mut file = File::open(&full).map_err(TrainError::io("open", &full))?;
            for Entry { tensor, range, offset } in shard::read_header(path, &file_entry.name, &mut file)? {
                let place = *places.entry(tensor.name.clone()).or_insert_with(|| {
                    tensors.push(Stored { spec: tensor.clone(), pieces: Vec::new() });
                    tensors.len() - 1
                });
                let stored = &mut tensors[place];
                if stored.spec != tensor {
                    let (name, a, b) = (&tensor.name, &stored.spec.shape, &tensor.shape);
                    return Err(broken(
                        path,
                        format!("tensor {name:?} has shape {a:?} in one file and {b:?} in another"),
                    ));
                }
                stored.pieces.push(StoredPiece { range, file: files.len(), offset });
            }
            files.push(file);
        }
        for stored in &mut tensors {
            stored.check(path)?;
        }
        Ok(Self { path: path.to_path_buf(), cursor, tensors, files })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the run stood.
    pub fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Every tensor, in the order in which files name them first.
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
        for piece in &stored.pieces {
            let (from, to) = (piece.range.start.max(start), piece.range.end.min(end));
            if from < to {
                let bytes = bytemuck::cast_slice_mut(&mut out[from - start..to - start]);
                let offset = piece.offset + 4 * (from - piece.range.start) as u64;
                self.files[piece.file]
                    .read_exact_at(bytes, offset)
                    .map_err(TrainError::io("read", &self.path))?;
            }
        }
        Ok(())
    }
}

impl Stored {
    /// Orders the pieces and checks that they are the whole tensor, once.
    fn check(&mut self, path: &Path) -> Result<()> {
        self.pieces.sort_unstable_by_key(|piece| piece.range.start);
        let mut next = 0;
        for StoredPiece { range, .. } in &self.pieces {
            if range.start != next {
                let (name, found) = (&self.spec.name, range.start);
                return Err(broken(
                    path,
                    format!("tensor {name:?}: a piece begins with element {found}, expected {next}"),
                ));
            }
            next = range.end;
        }
        if next == self.spec.len() {
            return Ok(());
        }
        let (name, length) = (&self.spec.name, self.spec.len());
        Err(broken(path, format!("tensor {name:?}: its pieces end with element {next} of {length}")))
    }
}
