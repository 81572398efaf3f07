//! Formats of files, by name and by content.

use std::path::Path;

use crate::error::DataError;
use crate::source::files::refuse;

/// Format of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// JSON lines, or one array.
    Json,
    /// Text with a header line, separated by this byte.
    Table(u8),
    Parquet,
    /// Arrow IPC with a footer (Feather 2).
    ArrowFile,
    ArrowStream,
}

/// Compression of a whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

/// Bytes at the beginning of a file that [`Format::detect`] reads.
pub(crate) const HEAD: usize = 64;

const KNOWN: &str = ".jsonl, .json, .csv, .tsv, .parquet or .arrow, each also with .gz or .zst after it";

impl Compression {
    /// Detects the compression by content, and checks that the name agrees.
    pub(crate) fn detect(path: &Path, head: &[u8]) -> Result<Self, DataError> {
        let named = match extension(path).as_str() {
            "gz" | "gzip" => Self::Gzip,
            "zst" | "zstd" => Self::Zstd,
            _ => Self::None,
        };
        let found = match head {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => Self::None,
        };
        match (named, found) {
            _ if named == found => Ok(found),
            (Self::None, _) if named_format(path).is_none() => Ok(found),
            (Self::None, Self::Gzip) => Err(refuse(path, "compressed with gzip: add .gz to its name")),
            (Self::None, _) => Err(refuse(path, "compressed with zstd: add .zst to its name")),
            _ => Err(refuse(
                path,
                format!("not compressed as its name says ({}): copy it again, or rename it", begins(head)),
            )),
        }
    }
}

impl Format {
    /// Detects the format of what `head` begins, and checks that the name agrees.
    pub(crate) fn detect(path: &Path, head: &[u8]) -> Result<Self, DataError> {
        let found = match head {
            [b'P', b'A', b'R', b'1', ..] => Some(Self::Parquet),
            [b'A', b'R', b'R', b'O', b'W', b'1', ..] => Some(Self::ArrowFile),
            [0xff, 0xff, 0xff, 0xff, ..] => Some(Self::ArrowStream),
            _ => None,
        };
        if head.starts_with(b"version https://git-lfs") {
            return Err(refuse(path, "a pointer of Git LFS, not the data: fetch them with `git lfs pull`"));
        }
        if matches!(head, [0xff, 0xfe, ..] | [0xfe, 0xff, ..]) && found.is_none() {
            return Err(refuse(path, "its text is UTF-16, expected UTF-8: save it as UTF-8"));
        }
        let is_text = found.is_none() && !head.iter().take(HEAD).any(|byte| *byte == 0);
        match (named_format(path), found) {
            (Some(named @ (Self::Json | Self::Table(_))), None) if is_text => Ok(named),
            (Some(named @ Self::Parquet), Some(Self::Parquet)) => Ok(named),
            (Some(Self::ArrowFile), Some(found @ (Self::ArrowFile | Self::ArrowStream))) => Ok(found),
            (None, Some(found)) => Ok(found),
            (None, None) => {
                let first = head.iter().find(|byte| !byte.is_ascii_whitespace());
                let bom = head.starts_with("\u{feff}".as_bytes());
                if bom || matches!(first, None | Some(b'{' | b'[')) {
                    return Ok(Self::Json);
                }
                Err(refuse(
                    path,
                    format!("the format is not known by its name: expected {KNOWN}; it {}", begins(head)),
                ))
            }
            (Some(named), Some(found)) => Err(refuse(
                path,
                format!("{} by its name, {} by its content: rename it", named.name(), found.name()),
            )),
            (Some(named), None) => Err(refuse(
                path,
                format!("not {}: it {}; download or write it again", named.name(), begins(head)),
            )),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Json => "JSON",
            Self::Table(b'\t') => "TSV",
            Self::Table(_) => "CSV",
            Self::Parquet => "Parquet",
            Self::ArrowFile | Self::ArrowStream => "Arrow",
        }
    }
}

/// Returns the format that the name says, without a compression's extension.
fn named_format(path: &Path) -> Option<Format> {
    let inner = match extension(path).as_str() {
        "gz" | "gzip" | "zst" | "zstd" => path.with_extension(""),
        _ => path.to_path_buf(),
    };
    Some(match extension(&inner).as_str() {
        "jsonl" | "json" | "ndjson" => Format::Json,
        "csv" => Format::Table(b','),
        "tsv" => Format::Table(b'\t'),
        "parquet" => Format::Parquet,
        "arrow" | "ipc" | "feather" => Format::ArrowFile,
        _ => return None,
    })
}

fn extension(path: &Path) -> String {
    path.extension().unwrap_or_default().to_string_lossy().to_ascii_lowercase()
}

fn begins(head: &[u8]) -> String {
    if head.is_empty() {
        return "is empty".into();
    }
    let shown = &head[..head.len().min(16)];
    format!("begins with \"{}\"", shown.escape_ascii())
}
