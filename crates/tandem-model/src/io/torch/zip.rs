//! Members of an uncompressed zip with 64-bit sizes, as `torch.save` writes it.
//!
//! Format: PKWARE APPNOTE 6.3.10, sections 4.3 (records) and 4.5.3 (zip64). Written by hand because
//! only byte ranges of a mapped file are needed: no decompression, no reader, no copy. Every access
//! is bounds-checked.

use std::collections::HashMap;
use std::ops::Range;

pub(super) const END: u32 = 0x0605_4b50;
pub(super) const END64_LOCATOR: u32 = 0x0706_4b50;
pub(super) const END64: u32 = 0x0606_4b50;
pub(super) const CENTRAL: u32 = 0x0201_4b50;
pub(super) const LOCAL: u32 = 0x0403_4b50;

/// Most members that are read.
const MAX_MEMBERS: u64 = 1 << 20;

/// Returns the byte range of each member, by name.
pub(super) fn members(file: &[u8]) -> Result<HashMap<String, Range<usize>>, String> {
    if file.get(..4) != Some(&LOCAL.to_le_bytes()) {
        return Err("not a zip: written by a torch older than 1.6, or not by torch.save".into());
    }
    let broken = || String::from("the zip's directory is missing or broken: the file was probably cut short");
    let (mut offset, count) = directory(file).ok_or_else(broken)?;
    if count > MAX_MEMBERS {
        return Err(format!(
            "the zip has {count} members, expected at most {MAX_MEMBERS}: one for each storage"
        ));
    }
    let mut members = HashMap::new();
    for _ in 0..count {
        let (name, range, next) = member(file, offset).ok_or_else(broken)??;
        members.insert(name, range);
        offset = next;
    }
    Ok(members)
}

/// Returns the offset of the central directory and the number of its entries.
fn directory(file: &[u8]) -> Option<(usize, u64)> {
    // The end record is 22 bytes and a comment of at most 65535.
    let last = file.len().checked_sub(22)?;
    let first = last.saturating_sub(65_535);
    let end = (first..=last).rev().find(|&i| u32_at(file, i) == Some(END))?;
    let locator = end.checked_sub(20).filter(|&i| u32_at(file, i) == Some(END64_LOCATOR));
    match locator {
        Some(locator) => {
            let end64 = usize::try_from(u64_at(file, locator + 8)?).ok()?;
            (u32_at(file, end64)? == END64).then_some(())?;
            Some((usize::try_from(u64_at(file, end64.checked_add(48)?)?).ok()?, u64_at(file, end64 + 32)?))
        }
        None => Some((u32_at(file, end + 16)? as usize, u64::from(u16_at(file, end + 10)?))),
    }
}

type Member = (String, Range<usize>, usize);

/// Returns the member whose central record is at `at`, and the offset of the next record. `None` if
/// the file ends inside.
fn member(file: &[u8], at: usize) -> Option<Result<Member, String>> {
    (u32_at(file, at)? == CENTRAL).then_some(())?;
    let method = u16_at(file, at + 10)?;
    let name_len = usize::from(u16_at(file, at + 28)?);
    let extra_len = usize::from(u16_at(file, at + 30)?);
    let comment_len = usize::from(u16_at(file, at + 32)?);
    let name = String::from_utf8_lossy(file.get(at + 46..at + 46 + name_len)?).into_owned();
    if method != 0 {
        return Some(Err(format!("{name} is compressed, which torch.save never does")));
    }
    let extra = file.get(at + 46 + name_len..at + 46 + name_len + extra_len)?;
    let mut wide = zip64_fields(extra);
    // A 32-bit field of all ones has its value in the zip64 extra field: first sizes (whole,
    // stored), then offset.
    let mut field = |narrow: u32| if narrow == u32::MAX { wide.next() } else { Some(u64::from(narrow)) };
    let whole = field(u32_at(file, at + 24)?)?;
    let stored = field(u32_at(file, at + 20)?)?;
    let local = usize::try_from(field(u32_at(file, at + 42)?)?).ok()?;
    (whole == stored && u32_at(file, local)? == LOCAL).then_some(())?;
    let header = 30 + usize::from(u16_at(file, local + 26)?) + usize::from(u16_at(file, local + 28)?);
    let start = local.checked_add(header)?;
    let end = start.checked_add(usize::try_from(whole).ok()?)?;
    (end <= file.len()).then_some(())?;
    Some(Ok((name, start..end, at + 46 + name_len + extra_len + comment_len)))
}

/// Returns the 64-bit numbers of the zip64 extra field (tag 1).
fn zip64_fields(mut extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut fields: &[u8] = &[];
    while let (Some(tag), Some(len)) = (u16_at(extra, 0), u16_at(extra, 2)) {
        let Some(body) = extra.get(4..4 + usize::from(len)) else { break };
        if tag == 1 {
            fields = body;
        }
        extra = &extra[4 + usize::from(len)..];
    }
    fields.chunks_exact(8).filter_map(|f| u64_at(f, 0))
}

fn u16_at(file: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(file.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(file: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(file.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(file: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(file.get(at..at.checked_add(8)?)?.try_into().ok()?))
}
