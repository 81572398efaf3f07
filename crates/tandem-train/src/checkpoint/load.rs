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

/// A complete, verified checkpoint. Tensors stay in their files until they are asked for, and are
/// read piece by piece straight to where they go: opening one takes no memory.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    cursor: Cursor,
    tensors: Vec<Stored>,
    /// Index into `tensors` by name.
    places: HashMap<String, usize>,
    files: Vec<File>,
}

#[derive(Debug)]
struct Stored {
    spec: TensorSpec,
    /// From left to right, without a gap.
    windows: Vec<Window>,
}

/// Some columns of a tensor, or all of them.
#[derive(Debug)]
struct Window {
    columns: Range<usize>,
    /// Pieces in element order, without gaps.
    pieces: Vec<StoredPiece>,
}

#[derive(Debug)]
struct StoredPiece {
    /// Elements of the window.
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
    /// A file is missing, damaged or of another version.
    pub fn open(path: &Path) -> Result<Self> {
        let manifest = Manifest::read(path)?;
        manifest.verify(path)?;
        Self::from_manifest(path, &manifest)
    }

    /// Opens a checkpoint that another rank has verified; reads only headers.
    ///
    /// # Errors
    /// A file is missing or of another version.
    pub fn open_checked(path: &Path) -> Result<Self> {
        Self::from_manifest(path, &Manifest::read(path)?)
    }

    fn from_manifest(path: &Path, manifest: &Manifest) -> Result<Self> {
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
            let mut file = tandem_files::open(&full).map_err(TrainError::io("open", &full))?;
            for entry in shard::read_header(path, &file_entry.name, &mut file)? {
                let Entry { tensor, columns, range, offset } = entry;
                let place = *places.entry(tensor.name.clone()).or_insert_with(|| {
                    tensors.push(Stored { spec: tensor.clone(), windows: Vec::new() });
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
                stored.window(columns).pieces.push(StoredPiece { range, file: files.len(), offset });
            }
            files.push(file);
        }
        for stored in &mut tensors {
            stored.check(path)?;
        }
        Ok(Self { path: path.to_path_buf(), cursor, tensors, places, files })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Position of the run.
    pub fn cursor(&self) -> &Cursor {
        &self.cursor
    }

    /// Every tensor, in the order in which files name them first.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorSpec> {
        self.tensors.iter().map(|t| &t.spec)
    }

    /// Checks that a tensor of this name and shape exists.
    ///
    /// # Errors
    /// The tensor is missing or has another shape: the checkpoint is of another model.
    pub fn check_tensor(&self, spec: &TensorSpec) -> Result<()> {
        let TensorSpec { name, shape } = spec;
        let stored = self.stored(name)?;
        if stored.spec.shape != *shape {
            let found = &stored.spec.shape;
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
    /// The tensor is missing or shorter, or the file cannot be read.
    pub fn read(&self, name: &str, start: usize, out: &mut [f32]) -> Result<()> {
        let stored = self.stored(name)?;
        let (end, length) = (start + out.len(), stored.spec.len());
        if end > length {
            let shape = &stored.spec.shape;
            return Err(broken(
                &self.path,
                format!(
                    "tensor {name:?} has shape {shape:?}, {length} elements; cannot read elements {start}..{end}"
                ),
            ));
        }
        let width = stored.spec.columns();
        for window in &stored.windows {
            let columns = &window.columns;
            if columns.len() == width {
                self.read_window(window, start, out)?;
                continue;
            }
            // A range of the tensor is, for some columns, a range in each row.
            for row in start / width..end.div_ceil(width) {
                let from = (row * width + columns.start).max(start);
                let to = (row * width + columns.end).min(end);
                if from < to {
                    let first = row * columns.len() + from - row * width - columns.start;
                    self.read_window(window, first, &mut out[from - start..to - start])?;
                }
            }
        }
        Ok(())
    }

    /// Copies elements `start..start + out.len()` of a window into `out`.
    fn read_window(&self, window: &Window, start: usize, out: &mut [f32]) -> Result<()> {
        let end = start + out.len();
        let first = window.pieces.partition_point(|piece| piece.range.end <= start);
        for piece in window.pieces[first..].iter().take_while(|piece| piece.range.start < end) {
            let (from, to) = (piece.range.start.max(start), piece.range.end.min(end));
            let bytes = bytemuck::cast_slice_mut(&mut out[from - start..to - start]);
            let offset = piece.offset + 4 * (from - piece.range.start) as u64;
            let read = self.files[piece.file].read_exact_at(bytes, offset);
            read.map_err(TrainError::io("read", &self.path))?;
        }
        Ok(())
    }

    fn stored(&self, name: &str) -> Result<&Stored> {
        let place = self.places.get(name);
        let place = place.ok_or_else(|| broken(&self.path, format!("it has no tensor {name:?}")))?;
        Ok(&self.tensors[*place])
    }
}

impl Stored {
    /// Stored pieces of these columns.
    fn window(&mut self, columns: Range<usize>) -> &mut Window {
        let place = self.windows.iter().position(|window| window.columns == columns);
        let place = place.unwrap_or_else(|| {
            self.windows.push(Window { columns, pieces: Vec::new() });
            self.windows.len() - 1
        });
        &mut self.windows[place]
    }

    /// Orders windows and pieces and checks that they are the whole tensor, once.
    fn check(&mut self, path: &Path) -> Result<()> {
        let (name, columns, length) = (&self.spec.name, self.spec.columns(), self.spec.len());
        let wrong = |reason| Err(broken(path, format!("tensor {name:?}: {reason}")));
        self.windows.sort_unstable_by_key(|window| window.columns.start);
        let mut left = 0;
        for window in &mut self.windows {
            let Window { columns: Range { start, end }, pieces } = window;
            if *start != left {
                return wrong(format!("columns begin with {start}, expected {left}"));
            }
            left = *end;
            pieces.sort_unstable_by_key(|piece| piece.range.start);
            let mut next = 0;
            for StoredPiece { range, .. } in pieces {
                if range.start != next {
                    return wrong(format!("a piece begins with element {}, expected {next}", range.start));
                }
                next = range.end;
            }
            let length = length.checked_div(columns).unwrap_or(0) * (*end - *start);
            if next != length {
                return wrong(format!("its pieces end with element {next} of {length}"));
            }
        }
        if left != columns {
            return wrong(format!("its columns end with {left} of {columns}"));
        }
        Ok(())
    }
}
