//! Untrusted files: models, adapters, data sets and configurations that may come from anywhere.
//!
//! [`open`] takes regular files only: a pipe would wait for a writer, a device has no end. [`read`] and
//! [`read_text`] stop at a limit. [`Map`] is a file in memory that may become shorter meanwhile.
//! [`TokenizerOverride`] says which tokenizer files of an adapter's folder are used.

mod map;
mod tokenizer;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

pub use map::Map;
pub use tokenizer::{CHAT_TEMPLATE, FURTHER_TEMPLATES, TOKENIZER_FILES, TokenizerOverride};

/// Limit of a file that is read whole and parsed as a tree of values: configurations, token lists, run files.
pub const MAX_CONFIG: u64 = 16 << 20;

/// Limit of a `tokenizer.json`, and of an index of weights.
pub const MAX_TABLE: u64 = 48 << 20;

/// Opens a regular file.
///
/// # Errors
/// As [`File::open`]; `InvalidInput` for a named pipe, a device, a socket or a folder.
pub fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        // Opening a named pipe would wait for its writer, opening a terminal would take it.
        options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    }
    let file = options.open(path).map_err(explained)?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{}, expected a regular file", name(kind))))
}

/// Reads a whole file of at most `limit` bytes.
///
/// # Errors
/// As [`open`]; `InvalidInput` for a longer file.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, length) = open_short(path, limit)?;
    // The length is a promise of the file system: some have files of 0 bytes that say something.
    let mut bytes = Vec::with_capacity(length as usize);
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(too_long(limit));
    }
    Ok(bytes)
}

/// Checks that a file can be opened and has at most `limit` bytes.
///
/// # Errors
/// As [`read`].
pub fn check(path: &Path, limit: u64) -> io::Result<()> {
    open_short(path, limit).map(|_| ())
}

/// Opens a file of at most `limit` bytes, and returns its length, too.
fn open_short(path: &Path, limit: u64) -> io::Result<(File, u64)> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    if length > limit { Err(too_long(limit)) } else { Ok((file, length)) }
}

fn too_long(limit: u64) -> io::Error {
    let limit = limit >> 20;
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("longer than {limit} MiB, the most that is read of such a file"),
    )
}

/// Reads a whole text of at most `limit` bytes.
///
/// # Errors
/// As [`read`]; `InvalidData` if it is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read(path, limit)?).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        io::Error::new(io::ErrorKind::InvalidData, format!("not UTF-8 text, from byte {place} on"))
    })
}

/// Gives errors of the path's own kind, which say that it is no file to read, the kind of a wrong input.
fn explained(error: io::Error) -> io::Error {
    #[cfg(unix)]
    if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ELOOP | libc::ENODEV)) {
        return io::Error::new(io::ErrorKind::InvalidInput, error.to_string());
    }
    error
}

/// Names what is there instead of a regular file.
fn name(kind: std::fs::FileType) -> &'static str {
    if kind.is_dir() {
        return "a folder";
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a named pipe";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
        if kind.is_socket() {
            return "a socket";
        }
    }
    "no file"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let link = folder.path().join("loop");
        std::os::unix::fs::symlink("loop", &link).unwrap();
        let kinds = [
            (pipe.as_path(), "a named pipe, expected a regular file"),
            (Path::new("/dev/zero"), "a device, expected a regular file"),
            (folder.path(), "a folder, expected a regular file"),
            (&link, "Too many levels of symbolic links (os error 40)"),
        ];
        for (path, expected) in kinds {
            let error = read(path, 100).unwrap_err();
            assert_eq!((error.kind(), &*error.to_string()), (io::ErrorKind::InvalidInput, expected));
        }
    }

    #[test]
    fn a_limit_holds_even_if_the_length_is_not_known() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, vec![b'a'; 1 << 20]).unwrap();
        assert_eq!(read(&file, 1 << 20).unwrap().len(), 1 << 20);
        let error = read(&file, (1 << 20) - 1).unwrap_err();
        assert_eq!(error.to_string(), "longer than 0 MiB, the most that is read of such a file");
        // Its length is 0.
        let endless = read(Path::new("/proc/self/maps"), 10).unwrap_err();
        assert_eq!(endless.kind(), io::ErrorKind::InvalidInput);
        assert!(read_text(Path::new("/proc/self/maps"), 1 << 24).unwrap().contains("[stack]"));
    }

    #[test]
    fn text_that_is_no_text_is_told_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, b"abc\xff").unwrap();
        assert_eq!(read_text(&file, 10).unwrap_err().to_string(), "not UTF-8 text, from byte 3 on");
    }
}
