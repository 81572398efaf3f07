//! Layout and writing of the token cache's file.
//!
//! ```text
//! header   32 × u64, its last four a checksum of the others
//! data     u32 words: per row its ids, followed by
//!          supervised: the marks, one byte each, padded to a word
//!          reward: the margin, f32
//!          unpaired: the label, 0 or 1
//!          prompt: the row's JSON, padded to a word
//! rows     one entry of 40 bytes per row
//! report   JSON
//! ```
//! Numbers are little-endian; the header has a BLAKE3 checksum of every section. Equal rows give equal
//! files, whatever the format of the data: the key is in the file's name and, with the lines of the
//! rows, in the file of [`Places`](crate::place::Places) beside it.

use std::io::{self, Read, Seek, SeekFrom, Write};

use bytemuck::{Pod, Zeroable};

use crate::cache::checksum;
use crate::report::Report;
use crate::rows::row::TokenRow;
use crate::source::record::RowKind;

/// Version of the layout and of the rules that make a row's tokens.
pub(crate) const FORMAT_VERSION: u64 = 5;
/// Kinds by their number in the header.
const KINDS: [RowKind; 5] =
    [RowKind::Preference, RowKind::Supervised, RowKind::Reward, RowKind::Prompt, RowKind::Unpaired];
const MAGIC: u64 = u64::from_le_bytes(*b"TANDEMTK");
pub(crate) const HEADER_BYTES: usize = size_of::<Header>();

#[cfg(target_endian = "big")]
compile_error!("the token cache maps little-endian numbers");

/// The first 256 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Zeroable, Pod)]
pub(crate) struct Header {
    magic: u64,
    version: u64,
    kind: u64,
    /// Length of the data section in words (padded to an even number).
    pub num_words: u64,
    /// Number of entries in the row section.
    pub num_rows: u64,
    /// Length of the report in bytes.
    pub report_bytes: u64,
    unused: [u64; 6],
    data_checksum: [u8; 32],
    rows_checksum: [u8; 32],
    report_checksum: [u8; 32],
    unused_too: [u64; 4],
    pub header_checksum: [u8; 32],
}

/// Position and division of a row's words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Zeroable, Pod)]
pub(crate) struct RowEntry {
    /// Index of the first word.
    pub start: u64,
    /// Number of the prompt's ids; 0 for supervised rows.
    pub prompt: u32,
    /// Number of ids of the chosen response, the completion or the supervised row; for prompts, bytes of the row's
    /// JSON.
    pub chosen: u32,
    /// Number of the rejected response's ids; 0 for supervised rows.
    pub rejected: u32,
    /// Number of leading ids that both sequences share; 0 for supervised rows.
    pub shared: u32,
    /// Number of leading prompt ids that chosen and rejected do not see.
    pub unseen: [u32; 2],
    /// Number of the row in the files, from 0.
    pub row: u64,
}

impl Header {
    pub(super) fn kind(&self) -> RowKind {
        KINDS[self.kind as usize]
    }

    /// Returns the byte offsets of data, rows, report and end.
    pub(super) fn offsets(&self) -> Option<[usize; 4]> {
        let data = HEADER_BYTES;
        let rows = usize::try_from(self.num_words).ok()?.checked_mul(4)?.checked_add(data)?;
        let report =
            usize::try_from(self.num_rows).ok()?.checked_mul(size_of::<RowEntry>())?.checked_add(rows)?;
        Some([data, rows, report, usize::try_from(self.report_bytes).ok()?.checked_add(report)?])
    }

    /// Returns a hash of the tokens and their rows' numbers.
    pub(super) fn content_hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.kind.to_le_bytes()).update(&self.data_checksum).update(&self.rows_checksum);
        hasher.finalize()
    }

    fn checksum(&self) -> [u8; 32] {
        let bytes = bytemuck::bytes_of(self);
        blake3::hash(&bytes[..HEADER_BYTES - 32]).into()
    }

    /// Reads a file of `length` bytes and checks header and sections. The inner error says why the
    /// file is invalid.
    pub(super) fn verify(mut file: impl Read + Send, length: u64) -> io::Result<Result<Self, &'static str>> {
        if length < HEADER_BYTES as u64 {
            return Ok(Err("it is shorter than its header"));
        }
        let mut header = Self::zeroed();
        file.read_exact(bytemuck::bytes_of_mut(&mut header))?;
        let ends = match header.check(length) {
            Ok(ends) => ends,
            Err(reason) => return Ok(Err(reason)),
        };
        let checksums = [header.data_checksum, header.rows_checksum, header.report_checksum];
        for (section, checksum) in ends.windows(2).zip(checksums) {
            let bytes = (section[1] - section[0]) as u64;
            if checksum::hash(file.by_ref().take(bytes))? != checksum {
                return Ok(Err("its content is damaged"));
            }
        }
        Ok(Ok(header))
    }

    /// Checks the header and returns the offsets of the file's sections.
    fn check(&self, length: u64) -> Result<[usize; 4], &'static str> {
        if self.magic != MAGIC {
            return Err("it does not begin as a token cache");
        }
        if self.version != FORMAT_VERSION {
            return Err("it has another format version");
        }
        if self.header_checksum != self.checksum() || self.kind >= KINDS.len() as u64 {
            return Err("its header is damaged");
        }
        let offsets = self.offsets().ok_or("its header is damaged")?;
        if length != offsets[3] as u64 {
            return Err("its length is not what the header says");
        }
        Ok(offsets)
    }
}

/// Bytes written and hashed at once; a long piece is hashed on all cores.
const BUFFER_BYTES: usize = 1 << 20;

/// Writer of a cache. It holds a buffer and the row entries (40 bytes each) in memory.
pub(crate) struct CacheWriter<W: Write + Seek> {
    out: W,
    kind: RowKind,
    /// Bytes of the data section, buffer included.
    num_bytes: u64,
    buffer: Vec<u8>,
    hasher: blake3::Hasher,
    pub rows: Vec<RowEntry>,
}

impl<W: Write + Seek> CacheWriter<W> {
    /// Creates a writer and leaves room for the header.
    pub(super) fn new(mut out: W, kind: RowKind) -> io::Result<Self> {
        out.write_all(&[0; HEADER_BYTES])?;
        let (buffer, hasher) = (Vec::with_capacity(BUFFER_BYTES), blake3::Hasher::new());
        Ok(Self { out, kind, num_bytes: 0, buffer, hasher, rows: Vec::new() })
    }

    /// Appends the tokens of row `number` of the files.
    pub(super) fn push(&mut self, row: &TokenRow, number: u64) -> io::Result<()> {
        let mut entry = RowEntry {
            start: self.num_bytes / 4,
            prompt: 0,
            chosen: 0,
            rejected: 0,
            shared: 0,
            unseen: [0, 0],
            row: number,
        };
        match row {
            TokenRow::Pair { prompt, unseen, chosen, rejected, margin } => {
                let shared = row.as_pair().map_or(0, |pair| pair.shared());
                [entry.prompt, entry.chosen, entry.rejected, entry.shared] =
                    [prompt.len(), chosen.len(), rejected.len(), shared].map(|n| n as u32);
                entry.unseen = unseen.map(|n| n as u32);
                for ids in [prompt, chosen, rejected] {
                    self.write(bytemuck::cast_slice(ids))?;
                }
                if self.kind == RowKind::Reward {
                    self.write(&margin.to_le_bytes())?;
                }
            }
            TokenRow::Unpaired { prompt, completion, label } => {
                [entry.prompt, entry.chosen] = [prompt.len(), completion.len()].map(|n| n as u32);
                for ids in [prompt, completion] {
                    self.write(bytemuck::cast_slice(ids))?;
                }
                self.write(&u32::from(*label).to_le_bytes())?;
            }
            TokenRow::Scored { tokens, scored } => {
                entry.chosen = tokens.len() as u32;
                self.write(bytemuck::cast_slice(tokens))?;
                self.write_padded(scored)?;
            }
            TokenRow::Prompt { tokens, row } => {
                [entry.prompt, entry.chosen] = [tokens.len(), row.len()].map(|n| n as u32);
                self.write(bytemuck::cast_slice(tokens))?;
                self.write_padded(row.as_bytes())?;
            }
        }
        self.rows.push(entry);
        Ok(())
    }

    /// Writes rows, report and header, which completes the file. Returns the header's checksum, too.
    pub(super) fn finish(mut self, report: &Report) -> io::Result<(W, [u8; 32])> {
        if !self.num_bytes.is_multiple_of(8) {
            self.write(&[0; 4])?; // the row entries hold u64, so they start at a multiple of 8
        }
        self.empty_buffer()?;
        let rows: &[u8] = bytemuck::cast_slice(&self.rows);
        let report = serde_json::to_vec(report)?;
        self.out.write_all(rows)?;
        self.out.write_all(&report)?;
        let mut header = Header {
            magic: MAGIC,
            version: FORMAT_VERSION,
            kind: KINDS.iter().position(|&kind| kind == self.kind).expect("every kind is listed") as u64,
            num_words: self.num_bytes / 4,
            num_rows: self.rows.len() as u64,
            report_bytes: report.len() as u64,
            unused: [0; 6],
            data_checksum: self.hasher.finalize().into(),
            rows_checksum: blake3::hash(rows).into(),
            report_checksum: blake3::hash(&report).into(),
            unused_too: [0; 4],
            header_checksum: [0; 32],
        };
        header.header_checksum = header.checksum();
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(bytemuck::bytes_of(&header))?;
        self.out.flush()?;
        Ok((self.out, header.header_checksum))
    }

    /// Writes bytes and pads to a word.
    fn write_padded(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write(bytes)?;
        self.write(&[0; 3][..bytes.len().next_multiple_of(4) - bytes.len()])
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.num_bytes += bytes.len() as u64;
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() < BUFFER_BYTES { Ok(()) } else { self.empty_buffer() }
    }

    fn empty_buffer(&mut self) -> io::Result<()> {
        self.hasher.update_rayon(&self.buffer);
        self.out.write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with limited room.
    struct Disk(io::Cursor<Vec<u8>>, usize);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.0.position() as usize + bytes.len() > self.1 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.0.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Seek for Disk {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            self.0.seek(to)
        }
    }

    fn write(room: usize) -> io::Result<Vec<u8>> {
        let disk = Disk(io::Cursor::default(), room);
        let mut writer = CacheWriter::new(disk, RowKind::Supervised)?;
        for length in [3usize, 1, 6] {
            let row = TokenRow::Scored { tokens: vec![7; length], scored: vec![1; length] };
            writer.push(&row, length as u64)?;
        }
        Ok(writer.finish(&Report::default())?.0.0.into_inner())
    }

    fn verify(file: &[u8]) -> Result<Header, &'static str> {
        Header::verify(file, file.len() as u64).unwrap()
    }

    #[test]
    fn a_full_disk_is_reported_wherever_it_happens_and_leaves_no_valid_file() {
        let whole = write(usize::MAX).unwrap();
        assert_eq!(verify(&whole).unwrap().num_rows, 3);
        for room in 0..whole.len() {
            assert_eq!(write(room).unwrap_err().kind(), io::ErrorKind::StorageFull);
            assert!(verify(&whole[..room]).is_err());
        }
        // The header is written last: until then the file is no valid cache.
        let mut unfinished = whole.clone();
        unfinished[..HEADER_BYTES].fill(0);
        assert!(verify(&unfinished).is_err());
    }
}
