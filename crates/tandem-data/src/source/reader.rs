//! Sequential reader of the rows of one file, whatever its format and compression.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::DataError;
use crate::source::arrow_rows::ArrowReader;
use crate::source::columns::Columns;
use crate::source::csv_rows::CsvReader;
use crate::source::format::{Compression, Format, HEAD};
use crate::source::json::JsonReader;

/// Unparsed row.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RawRow {
    /// 1-based line on which the row starts; for Parquet and Arrow, the row's number.
    pub line: u64,
    /// Bytes of one JSON value.
    pub text: Vec<u8>,
}

/// Maximum bytes of a row of text, which bounds memory if a file lacks line ends or is a bomb.
pub(crate) const MAX_ROW: u64 = 16 << 20;

/// Says that a row is longer than [`MAX_ROW`].
pub(crate) fn too_long() -> String {
    format!("the row is longer than {} MiB: is a line end, a quote or a bracket missing?", MAX_ROW >> 20)
}

type Input = Box<dyn BufRead + Send>;

enum Rows {
    Json(JsonReader<Input>),
    Csv(Box<CsvReader<Input>>),
    Arrow(Box<ArrowReader>),
}

/// Sequential reader of one file. Memory is bounded by a row, a page of Parquet or a batch of Arrow.
pub(crate) struct RowReader {
    rows: Rows,
    bytes: Arc<AtomicU64>,
    size: u64,
}

impl RowReader {
    /// Opens a file and detects its format.
    pub(crate) fn open(path: &Path, columns: &Columns) -> Result<Self, DataError> {
        let failed = |e| DataError::io("reading", path)(e);
        let Opened { mut file, size, bytes, compression, mut input, format } = Opened::new(path)?;
        let rows = match format {
            Format::Json => Rows::Json(JsonReader::new(path, input)?),
            Format::Table(separator) => Rows::Csv(Box::new(CsvReader::new(path, input, separator, columns)?)),
            Format::ArrowStream => {
                Rows::Arrow(Box::new(ArrowReader::stream(path, input)?.ignoring(&columns.ignored)))
            }
            Format::Parquet | Format::ArrowFile => {
                // Both are read from their end.
                if compression != Compression::None {
                    file = tempfile::tempfile().map_err(DataError::io("decompressing", path))?;
                    io::copy(&mut input, &mut file).map_err(failed)?;
                    file.rewind().map_err(failed)?;
                }
                drop(input);
                let rows = match format {
                    Format::Parquet => ArrowReader::parquet(path, file)?,
                    _ => ArrowReader::file(path, file)?,
                };
                Rows::Arrow(Box::new(rows.ignoring(&columns.ignored)))
            }
        };
        Ok(Self { rows, bytes, size })
    }

    /// Returns the names of the columns, if the file's beginning or end lists them.
    pub(crate) fn columns(&self) -> Option<Vec<String>> {
        match &self.rows {
            Rows::Json(_) => None,
            Rows::Csv(rows) => Some(rows.columns().cloned().collect()),
            Rows::Arrow(rows) => Some(rows.columns().to_vec()),
        }
    }

    /// Returns the bytes of the file that were read; an estimate for Parquet and Arrow files.
    pub(crate) fn bytes_read(&self) -> u64 {
        match &self.rows {
            Rows::Arrow(rows) => match rows.fraction() {
                Some(fraction) => (self.size as f64 * fraction) as u64,
                None => self.bytes.load(Ordering::Relaxed),
            },
            _ => self.bytes.load(Ordering::Relaxed),
        }
    }

    /// Returns the next row, without blank lines.
    pub(crate) fn next_row(&mut self) -> Result<Option<RawRow>, DataError> {
        match &mut self.rows {
            Rows::Json(rows) => rows.next_row(),
            Rows::Csv(rows) => rows.next_row(),
            Rows::Arrow(rows) => rows.next_row(),
        }
    }
}

/// Returns the format of a file, whose name must agree.
pub(crate) fn format_of(path: &Path) -> Result<Format, DataError> {
    Opened::new(path).map(|opened| opened.format)
}

/// File whose beginning was looked at.
struct Opened {
    file: File,
    size: u64,
    bytes: Arc<AtomicU64>,
    compression: Compression,
    /// Decompressed content.
    input: Input,
    format: Format,
}

impl Opened {
    fn new(path: &Path) -> Result<Self, DataError> {
        let failed = |e| DataError::io("reading", path)(e);
        let mut file = tandem_files::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let mut head = Vec::new();
        (&mut file).take(HEAD as u64).read_to_end(&mut head).map_err(failed)?;
        file.rewind().map_err(failed)?;
        let bytes = Arc::new(AtomicU64::new(0));
        let compression = Compression::detect(path, &head)?;
        let counted = Counted { file: file.try_clone().map_err(failed)?, bytes: bytes.clone() };
        let counted = BufReader::with_capacity(1 << 18, counted);
        let mut input: Input = match compression {
            Compression::None => Box::new(counted),
            Compression::Gzip => buffered(flate2::bufread::MultiGzDecoder::new(counted)),
            Compression::Zstd => buffered(zstd::stream::read::Decoder::with_buffer(counted).map_err(failed)?),
        };
        if compression != Compression::None {
            let start = input.fill_buf().map_err(failed)?;
            head = start[..start.len().min(HEAD)].to_vec();
        }
        let format = Format::detect(path, &head)?;
        Ok(Self { file, size, bytes, compression, input, format })
    }
}

fn buffered(input: impl Read + Send + 'static) -> Input {
    Box::new(BufReader::with_capacity(1 << 18, Decompressed(input)))
}

/// Decompressed data, whose errors say what they mean.
struct Decompressed<R>(R);

impl<R: Read> Read for Decompressed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let explain = |e: io::Error| match e.kind() {
            io::ErrorKind::Interrupted => e,
            // The system's own errors keep their kind; the others are about the file.
            kind => io::Error::new(
                if e.raw_os_error().is_some() { kind } else { io::ErrorKind::InvalidData },
                format!("the compressed data are cut off or damaged ({e}): copy the file again"),
            ),
        };
        self.0.read(buffer).map_err(explain)
    }
}

/// File that counts the bytes that are read.
struct Counted {
    file: File,
    bytes: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}
