//! Writing a checkpoint.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::manifest::{CURSOR, FORMAT, FileEntry, MANIFEST, Manifest};
use super::{CHUNK, Cursor, StateSource, TensorSpec, shard};
use crate::disk::{Disk, DiskFile};
use crate::error::{Result, TrainError};

/// Writes the complete content of a checkpoint into the new folder `folder`, durable and checked. The folder's own name is
/// not made durable here: it is temporary.
pub(super) fn write_folder(
    disk: &dyn Disk,
    folder: &Path,
    cursor: &Cursor,
    state: &(impl StateSource + ?Sized),
    max_shard_bytes: usize,
) -> Result<()> {
    disk.create_dir(folder).map_err(TrainError::io("create", folder))?;
    let tensors = state.tensors();
    let mut names: Vec<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|w| w[0] != w[1]), "two tensors of one name in a checkpoint");
    let shards = shard::cut(&tensors, max_shard_bytes);
    let mut files = Vec::with_capacity(shards.len() + 1);
    for (i, range) in shards.iter().enumerate() {
        let name = format!("state-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        files.push(write_shard(disk, folder, name, &tensors, range.clone(), state)?);
    }
    let text = serde_json::to_string_pretty(cursor).expect("a cursor is plain data");
    files.push(write_text(disk, folder, CURSOR, &text)?);
    let manifest = Manifest { format: FORMAT, step: cursor.step, files };
    let text = serde_json::to_string_pretty(&manifest).expect("a manifest is plain data");
    write_text(disk, folder, MANIFEST, &text)?;
    disk.sync_dir(folder).map_err(TrainError::io("sync", folder))?;
    Manifest::verified(folder).map(|_| ())
}

fn write_shard(
    disk: &dyn Disk,
    folder: &Path,
    name: String,
    tensors: &[TensorSpec],
    range: Range<usize>,
    state: &(impl StateSource + ?Sized),
) -> Result<FileEntry> {
    let mut out = Hashed::create(disk, folder, name)?;
    out.write(&shard::header(&tensors[range.clone()]))?;
    let mut values = vec![0.0f32; CHUNK];
    let mut bytes = vec![0u8; 4 * CHUNK];
    for index in range {
        let length = tensors[index].len();
        for start in (0..length).step_by(CHUNK) {
            let values = &mut values[..CHUNK.min(length - start)];
            state.read(index, start, values)?;
            let bytes = &mut bytes[..4 * values.len()];
            for (bytes, value) in bytes.chunks_exact_mut(4).zip(&*values) {
                bytes.copy_from_slice(&value.to_le_bytes());
            }
            out.write(bytes)?;
        }
    }
    out.finish()
}

fn write_text(disk: &dyn Disk, folder: &Path, name: &str, text: &str) -> Result<FileEntry> {
    let mut out = Hashed::create(disk, folder, name.to_string())?;
    out.write(text.as_bytes())?;
    out.write(b"\n")?;
    out.finish()
}

/// A file that is hashed while it is written.
struct Hashed {
    file: Box<dyn DiskFile>,
    path: PathBuf,
    name: String,
    bytes: u64,
    hasher: blake3::Hasher,
}

impl Hashed {
    fn create(disk: &dyn Disk, folder: &Path, name: String) -> Result<Self> {
        let path = folder.join(&name);
        let file = disk.create(&path).map_err(TrainError::io("create", &path))?;
        Ok(Self { file, path, name, bytes: 0, hasher: blake3::Hasher::new() })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(TrainError::io("write", &self.path))?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn finish(mut self) -> Result<FileEntry> {
        self.file.sync().map_err(TrainError::io("sync", &self.path))?;
        let blake3 = self.hasher.finalize().to_hex().to_string();
        Ok(FileEntry { name: self.name, bytes: self.bytes, blake3 })
    }
}
