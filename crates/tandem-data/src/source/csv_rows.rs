//! Reader of CSV and TSV: a header line, then rows of text.

use std::collections::HashSet;
use std::io::{self, BufRead, Read};
use std::path::{Path, PathBuf};

use csv::{ByteRecord, ReaderBuilder};
use serde_json::{Map, Number, Value};

use crate::error::DataError;
use crate::place::Place;
use crate::source::columns::Columns;
use crate::source::files::refuse;
use crate::source::reader::{MAX_ROW, RawRow, too_long};

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Input that ends with an error if one row takes more than [`MAX_ROW`], and finds a quote that is open at the
/// end, where the reader makes a cell of all that follows it.
struct RowInput<R> {
    input: R,
    left: u64,
    separator: u8,
    cell: Cell,
    /// Line of the next byte.
    line: u64,
    is_at_end: bool,
}

/// Place of a byte in a cell.
#[derive(Clone, Copy)]
enum Cell {
    Start,
    Plain,
    /// Within quotes, since this line.
    Quoted(u64),
    /// After a quote that closes the cell, unless another one follows.
    Closed(u64),
}

impl<R> RowInput<R> {
    fn new(input: R, separator: u8) -> Self {
        Self { input, left: MAX_ROW, separator, cell: Cell::Start, line: 1, is_at_end: false }
    }

    /// Returns the line of a quote that nothing closes, once the input has ended.
    fn open_quote(&self) -> Option<u64> {
        match self.cell {
            Cell::Quoted(line) if self.is_at_end => Some(line),
            _ => None,
        }
    }

    fn see(&mut self, byte: u8) {
        self.cell = match (self.cell, byte) {
            (Cell::Quoted(line), b'"') => Cell::Closed(line),
            (Cell::Quoted(line), _) => Cell::Quoted(line),
            (Cell::Closed(line), b'"') => Cell::Quoted(line),
            (Cell::Start, b'"') => Cell::Quoted(self.line),
            (_, b'\r' | b'\n') => Cell::Start,
            (_, byte) if byte == self.separator => Cell::Start,
            _ => Cell::Plain,
        };
        self.line += u64::from(byte == b'\n');
    }
}

impl<R: Read> Read for RowInput<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.is_at_end = count == 0 && !buffer.is_empty();
        for &byte in &buffer[..count] {
            self.see(byte);
        }
        self.left = self
            .left
            .checked_sub(count as u64)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, too_long()))?;
        Ok(count)
    }
}

pub(crate) struct CsvReader<R> {
    path: PathBuf,
    input: csv::Reader<RowInput<R>>,
    /// Names of the columns, and whether their cells are numbers.
    columns: Vec<(String, bool)>,
    record: ByteRecord,
    /// 1 where lines end with CR LF: the reader counts a line when it meets the LF, which is then
    /// the beginning of the next record.
    uncounted: u64,
}

impl<R: BufRead> CsvReader<R> {
    pub(crate) fn new(
        path: &Path,
        mut input: R,
        separator: u8,
        columns: &Columns,
    ) -> Result<Self, DataError> {
        let mut start = input.fill_buf().map_err(DataError::io("reading", path))?;
        // The reader takes no notice of a byte order mark.
        if start.starts_with(BYTE_ORDER_MARK) {
            input.consume(BYTE_ORDER_MARK.len());
            start = input.fill_buf().map_err(DataError::io("reading", path))?;
        }
        let end = start.iter().position(|byte| *byte == b'\n');
        let uncounted = u64::from(end.is_some_and(|end| end > 0 && start[end - 1] == b'\r'));
        let input = RowInput::new(input, separator);
        let mut input = ReaderBuilder::new().delimiter(separator).from_reader(input);
        let header = input.byte_headers().map_err(|e| broken(path, e, 0))?.clone();
        let (mut names, mut seen) = (Vec::new(), HashSet::new());
        for name in &header {
            let Ok(name) = std::str::from_utf8(name) else {
                return Err(refuse(path, "the header line is not UTF-8: write the file again as UTF-8"));
            };
            if !seen.insert(name) {
                return Err(refuse(path, format!("the header line has two columns `{name}`: rename one")));
            }
            names.push((name.to_owned(), columns.is_number(name)));
        }
        Ok(Self { path: path.to_path_buf(), input, columns: names, record: ByteRecord::new(), uncounted })
    }

    /// Returns the names of the columns.
    pub(crate) fn columns(&self) -> impl Iterator<Item = &String> {
        self.columns.iter().map(|(name, _)| name)
    }

    pub(crate) fn next_row(&mut self) -> Result<Option<RawRow>, DataError> {
        self.input.get_mut().left = MAX_ROW;
        let read = self.input.read_byte_record(&mut self.record);
        if let Some(line) = self.input.get_ref().open_quote() {
            return Err(DataError::Cells {
                place: Place { path: self.path.clone(), line },
                reason: "the quote that opens a cell on this line is never closed; close it, write \"\" for a quote within \
                         quotes, or put a cell that begins with a quote in quotes"
                    .into(),
            });
        }
        if !read.map_err(|e| broken(&self.path, e, self.uncounted))? {
            return Ok(None);
        }
        let line = self.record.position().map_or(0, csv::Position::line) + self.uncounted;
        let mut row = Map::new();
        for ((name, is_number), cell) in self.columns.iter().zip(&self.record) {
            let Ok(text) = std::str::from_utf8(cell) else {
                let place = Place { path: self.path.clone(), line };
                let found = format!("\"{}\"", cell.escape_ascii());
                return Err(DataError::Type { place, key: name.clone(), expected: "UTF-8", found });
            };
            let number = || text.trim().parse().ok().and_then(Number::from_f64).map(Value::Number);
            let value = match is_number {
                true if text.trim().is_empty() => Value::Null,
                true => number().unwrap_or_else(|| text.into()),
                false => text.into(),
            };
            row.insert(name.clone(), value);
        }
        let text = serde_json::to_vec(&row).expect("texts and numbers are JSON");
        Ok(Some(RawRow { line, text }))
    }
}

fn broken(path: &Path, error: csv::Error, uncounted: u64) -> DataError {
    let line = error.position().map_or(1, |position| position.line() + uncounted);
    let place = Place { path: path.to_path_buf(), line };
    match error.into_kind() {
        csv::ErrorKind::Io(e) => DataError::io("reading", path)(e),
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => DataError::Cells {
            place,
            reason: format!(
                "expected {expected_len} cells, as in the header line, found {len}; quote cells with separators or line ends"
            ),
        },
        other => DataError::Cells { place, reason: format!("{other:?}") },
    }
}
