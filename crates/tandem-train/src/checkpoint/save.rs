//! Writes one rank's part of a checkpoint, and the manifest over all parts.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::manifest::{CURSOR, FORMAT, FileEntry, MANIFEST, Manifest};
use super::{CHUNK, Cursor, TensorShard, shard};
use crate::disk::{Disk, DiskFile, appears};
use crate::error::{Result, TrainError};

/// A rank's verified file, as reported to rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    bytes: u64,
    blake3: blake3::Hash,
}

impl Part {
    /// Bytes of a record.
    pub const RECORD: usize = 8 + blake3::OUT_LEN;

    /// Encodes it for sending to rank 0.
    pub fn to_record(&self) -> [u8; Self::RECORD] {
        let mut record = [0; Self::RECORD];
        record[..8].copy_from_slice(&self.bytes.to_le_bytes());
        record[8..].copy_from_slice(self.blake3.as_bytes());
        record
    }

    /// Back from bytes.
    pub fn from_record(record: &[u8; Self::RECORD]) -> Self {
        let (bytes, hash) = record.split_first_chunk::<8>().expect("a record is longer");
        let hash = hash.try_into().expect("the rest of a record is a hash");
        Self { bytes: u64::from_le_bytes(*bytes), blake3: blake3::Hash::from_bytes(hash) }
    }

    pub(super) fn entry(&self, name: String) -> FileEntry {
        FileEntry { name, bytes: self.bytes, blake3: self.blake3.to_hex().to_string() }
    }
}

/// `state-00001-of-00004.safetensors`, of rank 0.
pub(super) fn part_name(rank: usize, num_ranks: usize) -> String {
    format!("state-{:05}-of-{num_ranks:05}.safetensors", rank + 1)
}

/// Writes pieces into a new file, syncs it and reads it back. Stops between two chunks once
/// `give_up` is set.
pub(super) fn write_part(
    disk: &dyn Disk,
    folder: &Path,
    name: String,
    pieces: &[TensorShard<'_>],
    give_up: &AtomicBool,
) -> Result<Part> {
    let mut out = Hashed::create(disk, folder, name.clone())?;
    out.write(&shard::header(pieces))?;
    let mut room = Vec::new();
    for piece in pieces {
        for start in (0..piece.data.len()).step_by(CHUNK) {
            if give_up.load(Ordering::Relaxed) {
                return Err(TrainError::io("write", &out.path)(io::ErrorKind::Interrupted.into()));
            }
            let chunk = piece.data.range(start..piece.data.len().min(start + CHUNK));
            let values = chunk.as_f32().unwrap_or_else(|| {
                room.resize(chunk.len(), 0.0);
                chunk.read(&mut room);
                &room
            });
            out.write(bytemuck::cast_slice(values))?;
        }
    }
    let part = out.finish()?;
    part.entry(name).verify(folder)?;
    Ok(part)
}

/// Writes and syncs cursor and manifest. The temporary folder name is not synced here.
pub(super) fn seal(disk: &dyn Disk, folder: &Path, cursor: &Cursor, parts: &[Part]) -> Result<()> {
    let mut files = Vec::with_capacity(parts.len() + 1);
    for (rank, part) in parts.iter().enumerate() {
        let name = part_name(rank, parts.len());
        let path = folder.join(&name);
        if !appears(|| path.metadata().map_or(0, |found| found.len()) == part.bytes) {
            return Err(TrainError::NotShared { path, writer: rank, reader: 0 });
        }
        files.push(part.entry(name));
    }
    let text = serde_json::to_string_pretty(cursor).expect("a cursor is plain data");
    files.push(write_text(disk, folder, CURSOR, &text)?.entry(CURSOR.to_owned()));
    let manifest = Manifest { format: FORMAT, step: cursor.step, ranks: parts.len(), files };
    let text = serde_json::to_string_pretty(&manifest).expect("a manifest is plain data");
    write_text(disk, folder, MANIFEST, &text)?;
    disk.sync_dir(folder).map_err(TrainError::io("sync", folder))
}

fn write_text(disk: &dyn Disk, folder: &Path, name: &str, text: &str) -> Result<Part> {
    let mut out = Hashed::create(disk, folder, name.to_owned())?;
    out.write(text.as_bytes())?;
    out.write(b"\n")?;
    out.finish()
}

/// A file that is hashed while it is written.
struct Hashed {
    file: Box<dyn DiskFile>,
    path: PathBuf,
    bytes: u64,
    hasher: blake3::Hasher,
}

impl Hashed {
    fn create(disk: &dyn Disk, folder: &Path, name: String) -> Result<Self> {
        let path = folder.join(name);
        let file = disk.create(&path).map_err(TrainError::io("create", &path))?;
        Ok(Self { file, path, bytes: 0, hasher: blake3::Hasher::new() })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(TrainError::io("write", &self.path))?;
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn finish(mut self) -> Result<Part> {
        self.file.sync().map_err(TrainError::io("sync", &self.path))?;
        Ok(Part { bytes: self.bytes, blake3: self.hasher.finalize() })
    }
}
