//! Writer of an uncompressed zip, as `torch.save` makes it: one member after another, each aligned.
//!
//! Format: PKWARE APPNOTE 6.3.10, sections 4.3 (records) and 4.5.3 (zip64).

use std::io::{self, Seek, SeekFrom, Write};

use super::zip::{CENTRAL, END, END64, END64_LOCATOR, LOCAL};

/// Alignment of members in bytes: `torch.load(mmap=True)` maps tensors where they are.
const ALIGNMENT: u64 = 64;
/// Tag of the extra field that pads a member, as torch has it.
const PADDING: u16 = u16::from_le_bytes(*b"FB");
/// Tag of the extra field of 64-bit sizes.
const WIDE: u16 = 1;
/// The first of January 1980: the same model gives the same bytes.
const DATE: u16 = 0x21;
/// Offset of the checksum in a local header.
const CHECKSUM: u64 = 14;

/// Zip file being written. Contents go to the member that was begun last.
pub(super) struct ZipWriter<W> {
    out: W,
    at: u64,
    members: Vec<Member>,
    checksum: crc32fast::Hasher,
    /// Sizes and offsets from here on stand in zip64 fields.
    wide_from: u64,
}

struct Member {
    name: String,
    start: u64,
    data: u64,
    size: u64,
    checksum: u32,
}

impl<W: Write + Seek> ZipWriter<W> {
    pub(super) fn new(out: W) -> Self {
        Self::with_wide_from(out, u64::from(u32::MAX))
    }

    fn with_wide_from(out: W, wide_from: u64) -> Self {
        Self { out, at: 0, members: Vec::new(), checksum: crc32fast::Hasher::new(), wide_from }
    }

    /// Starts a member of `size` bytes, which the following writes bring.
    pub(super) fn begin(&mut self, name: String, size: u64) -> io::Result<()> {
        self.end()?;
        let start = self.at;
        let wide = size >= self.wide_from;
        let mut extra = Vec::new();
        if wide {
            extra.extend(WIDE.to_le_bytes());
            extra.extend(16_u16.to_le_bytes());
            extra.extend(size.to_le_bytes());
            extra.extend(size.to_le_bytes());
        }
        let before = start + 30 + (name.len() + extra.len() + 4) as u64;
        let padding = before.next_multiple_of(ALIGNMENT) - before;
        extra.extend(PADDING.to_le_bytes());
        extra.extend((padding as u16).to_le_bytes());
        extra.resize(extra.len() + padding as usize, b'Z');
        let narrow = if wide { u32::MAX } else { size as u32 };
        let mut header = LOCAL.to_le_bytes().to_vec();
        for field in [version(wide), 0, 0, 0, DATE] {
            header.extend(field.to_le_bytes());
        }
        // The checksum is known, and filled in, at the member's end.
        for field in [0, narrow, narrow] {
            header.extend(field.to_le_bytes());
        }
        header.extend((name.len() as u16).to_le_bytes());
        header.extend((extra.len() as u16).to_le_bytes());
        header.extend(name.as_bytes());
        header.extend(extra);
        self.out.write_all(&header)?;
        self.at += header.len() as u64;
        self.members.push(Member { name, start, data: self.at, size, checksum: 0 });
        Ok(())
    }

    /// Ends the member that was begun last.
    ///
    /// # Panics
    /// If other than its number of bytes was written.
    fn end(&mut self) -> io::Result<()> {
        let Some(member) = self.members.last_mut() else { return Ok(()) };
        assert_eq!(self.at - member.data, member.size, "bytes of {}", member.name);
        member.checksum = std::mem::take(&mut self.checksum).finalize();
        self.out.seek(SeekFrom::Start(member.start + CHECKSUM))?;
        self.out.write_all(&member.checksum.to_le_bytes())?;
        self.out.seek(SeekFrom::Start(self.at))?;
        Ok(())
    }

    /// Writes the directory.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.end()?;
        let start = self.at;
        let mut directory = Vec::new();
        for member in &self.members {
            self.directory_entry(member, &mut directory);
        }
        let (count, size) = (self.members.len() as u64, directory.len() as u64);
        let end64 = start + size;
        directory.extend(END64.to_le_bytes());
        directory.extend(44_u64.to_le_bytes());
        directory.extend([version(true), version(true)].map(u16::to_le_bytes).concat());
        directory.extend([0; 8]);
        directory.extend([count, count, size, start].map(u64::to_le_bytes).concat());
        directory.extend(END64_LOCATOR.to_le_bytes());
        directory.extend([0; 4]);
        directory.extend(end64.to_le_bytes());
        directory.extend(1_u32.to_le_bytes());
        directory.extend(END.to_le_bytes());
        directory.extend([0; 4]);
        directory.extend([count.min(u64::from(u16::MAX)) as u16; 2].map(u16::to_le_bytes).concat());
        let narrow = |wide: u64| wide.min(u64::from(u32::MAX)) as u32;
        directory.extend([narrow(size), narrow(start)].map(u32::to_le_bytes).concat());
        directory.extend([0; 2]);
        self.out.write_all(&directory)?;
        Ok(self.out)
    }

    fn directory_entry(&self, member: &Member, out: &mut Vec<u8>) {
        let wide = member.size >= self.wide_from || member.start >= self.wide_from;
        let narrow = |field: u64| if wide { u32::MAX } else { field as u32 };
        out.extend(CENTRAL.to_le_bytes());
        for field in [version(true), version(wide), 0, 0, 0, DATE] {
            out.extend(field.to_le_bytes());
        }
        for field in [member.checksum, narrow(member.size), narrow(member.size)] {
            out.extend(field.to_le_bytes());
        }
        let extra_len: u16 = if wide { 28 } else { 0 };
        for field in [member.name.len() as u16, extra_len, 0, 0, 0] {
            out.extend(field.to_le_bytes());
        }
        out.extend([0; 4]);
        out.extend(narrow(member.start).to_le_bytes());
        out.extend(member.name.as_bytes());
        if wide {
            out.extend([WIDE, 24].map(u16::to_le_bytes).concat());
            out.extend([member.size, member.size, member.start].map(u64::to_le_bytes).concat());
        }
    }
}

impl<W: Write> Write for ZipWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.checksum.update(&bytes[..written]);
        self.at += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Version of the format that a reader needs.
fn version(wide: bool) -> u16 {
    if wide { 45 } else { 20 }
}

#[cfg(test)]
mod tests {
    use super::super::zip::members;
    use super::*;

    #[test]
    fn members_come_back_with_narrow_and_wide_fields() {
        for wide_from in [0, 200, u64::from(u32::MAX)] {
            let mut zip = ZipWriter::with_wide_from(io::Cursor::new(Vec::new()), wide_from);
            let contents = [("a/data.pkl", vec![1; 300]), ("a/data/0", vec![2; 7]), ("a/empty", vec![])];
            for (name, bytes) in &contents {
                zip.begin((*name).into(), bytes.len() as u64).unwrap();
                zip.write_all(bytes).unwrap();
            }
            let file = zip.finish().unwrap().into_inner();
            let found = members(&file).unwrap();
            assert_eq!(found.len(), contents.len());
            for (name, bytes) in &contents {
                let range = found[*name].clone();
                assert_eq!(range.start % 64, 0, "{name}");
                assert_eq!(file[range], **bytes, "{name} with wide fields from {wide_from}");
            }
            // The checksum of 300 ones, from Python's zlib.crc32.
            assert_eq!(file[14..18], 0xdfce_6777_u32.to_le_bytes());
        }
    }
}
