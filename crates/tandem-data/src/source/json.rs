//! Streaming reader of JSON rows: the lines of JSONL or the elements of one JSON array, with line
//! numbers.
//!
//! The file's first character selects the format. The reader only finds where an element ends, so
//! memory stays bounded and rows can be parsed in parallel.

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use crate::error::DataError;
use crate::place::Place;
use crate::source::reader::{MAX_ROW, RawRow, too_long};

enum Layout {
    Lines,
    /// Inside the brackets. After the first element a comma must precede the next one.
    Array {
        any: bool,
    },
    Ended,
}

/// Sequential reader of one file.
pub(crate) struct JsonReader<R> {
    path: PathBuf,
    input: R,
    layout: Layout,
    line: u64,
    bytes: u64,
}

impl<R: BufRead> JsonReader<R> {
    pub(crate) fn new(path: &Path, input: R) -> Result<Self, DataError> {
        let mut reader = Self { path: path.to_path_buf(), input, layout: Layout::Lines, line: 1, bytes: 0 };
        if reader.buffer()?.starts_with("\u{feff}".as_bytes()) {
            reader.consume(3);
        }
        if reader.peek()? == Some(b'[') {
            reader.consume(1);
            reader.layout = Layout::Array { any: false };
        }
        Ok(reader)
    }

    #[cfg(test)]
    fn bytes_read(&self) -> u64 {
        self.bytes
    }

    /// Returns the next row, without blank lines.
    pub(crate) fn next_row(&mut self) -> Result<Option<RawRow>, DataError> {
        match self.layout {
            Layout::Lines => self.next_line(),
            Layout::Array { any } => self.next_element(any),
            Layout::Ended => Ok(None),
        }
    }

    fn next_line(&mut self) -> Result<Option<RawRow>, DataError> {
        loop {
            let mut text = Vec::new();
            let count = (&mut self.input)
                .take(MAX_ROW + 1)
                .read_until(b'\n', &mut text)
                .map_err(DataError::io("reading", &self.path))?;
            if count == 0 {
                return Ok(None);
            }
            self.check_length(text.len(), self.line)?;
            self.bytes += count as u64;
            let line = self.line;
            self.line += 1;
            if !text.iter().all(u8::is_ascii_whitespace) {
                return Ok(Some(RawRow { line, text }));
            }
        }
    }

    fn next_element(&mut self, any: bool) -> Result<Option<RawRow>, DataError> {
        let mut next = self.peek()?;
        if any && next == Some(b',') {
            self.consume(1);
            next = self.peek()?;
            if next == Some(b']') {
                return Err(self.broken("an element is missing between `,` and `]`"));
            }
        } else if any && next.is_some_and(|b| b != b']') {
            return Err(self.broken("expected `,` or `]` between the elements of the array"));
        }
        match next {
            None => Err(self.broken("the file ends inside the array: `]` is missing")),
            Some(b']') => {
                self.consume(1);
                self.layout = Layout::Ended;
                match self.peek()? {
                    None => Ok(None),
                    Some(_) => Err(self.broken("something follows the array's `]`")),
                }
            }
            Some(_) => {
                self.layout = Layout::Array { any: true };
                self.element().map(Some)
            }
        }
    }

    /// Consumes one JSON value by counting brackets outside of strings.
    fn element(&mut self) -> Result<RawRow, DataError> {
        let mut row = RawRow { line: self.line, text: Vec::new() };
        let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
        loop {
            let buffer = self.buffer()?;
            if buffer.is_empty() {
                self.line = row.line;
                return Err(self.broken("the file ends inside this element"));
            }
            let mut taken = 0;
            let mut lines = 0;
            let mut done = false;
            for &byte in buffer {
                // A bare number or word ends at the first byte that cannot belong to it.
                if depth == 0
                    && !in_string
                    && (matches!(byte, b',' | b']' | b'}') || byte.is_ascii_whitespace())
                {
                    done = true;
                    break;
                }
                taken += 1;
                lines += u64::from(byte == b'\n');
                if in_string {
                    in_string = escaped || byte != b'"';
                    escaped = !escaped && byte == b'\\';
                } else {
                    match byte {
                        b'"' => in_string = true,
                        b'{' | b'[' => depth += 1,
                        b'}' | b']' => depth -= 1,
                        _ => continue,
                    }
                }
                if depth == 0 && !in_string {
                    done = true;
                    break;
                }
            }
            row.text.extend_from_slice(&buffer[..taken]);
            let length = row.text.len();
            self.line += lines;
            self.bytes += taken as u64;
            self.input.consume(taken);
            self.check_length(length, row.line)?;
            if done {
                return Ok(row);
            }
        }
    }

    fn buffer(&mut self) -> Result<&[u8], DataError> {
        self.input.fill_buf().map_err(DataError::io("reading", &self.path))
    }

    /// Skips white space and returns the next byte without consuming it.
    fn peek(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            let buffer = self.buffer()?;
            let Some(&byte) = buffer.first() else { return Ok(None) };
            if !byte.is_ascii_whitespace() {
                return Ok(Some(byte));
            }
            let run = buffer.iter().take_while(|b| b.is_ascii_whitespace()).count();
            let lines = buffer[..run].iter().filter(|&&b| b == b'\n').count();
            self.line += lines as u64;
            self.consume(run);
        }
    }

    fn consume(&mut self, count: usize) {
        self.bytes += count as u64;
        self.input.consume(count);
    }

    fn check_length(&self, length: usize, line: u64) -> Result<(), DataError> {
        if length as u64 <= MAX_ROW {
            return Ok(());
        }
        let place = Place { path: self.path.clone(), line };
        Err(DataError::Json { place, reason: too_long() })
    }

    fn broken(&self, reason: &str) -> DataError {
        let place = Place { path: self.path.clone(), line: self.line };
        DataError::Json { place, reason: reason.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use super::*;

    /// Reads through a buffer of `capacity` bytes, so that elements span several fills.
    fn rows(text: &str, capacity: usize) -> Result<Vec<(u64, String)>, String> {
        let input = BufReader::with_capacity(capacity, text.as_bytes());
        let mut reader = JsonReader::new(Path::new("f"), input).map_err(|e| e.to_string())?;
        let mut rows = Vec::new();
        while let Some(row) = reader.next_row().map_err(|e| e.to_string())? {
            rows.push((row.line, String::from_utf8(row.text).unwrap().trim_end().to_string()));
        }
        assert_eq!(reader.bytes_read(), text.len() as u64);
        Ok(rows)
    }

    #[test]
    fn lines_keep_their_numbers_across_blank_lines() {
        let expected = vec![(2, "{\"a\":1}".to_string()), (4, "{\"b\":2}".to_string())];
        assert_eq!(rows("\n{\"a\":1}\r\n   \n{\"b\":2}", 64).unwrap().len(), 2);
        assert_eq!(rows("\u{feff}{\"a\":1}\n{\"b\":2}\n", 8).unwrap()[0].1, "{\"a\":1}");
        // Leading white space is skipped while the format is detected, and still counts as lines.
        assert_eq!(rows("\n{\"a\":1}\n\n{\"b\":2}\n", 4).unwrap(), expected);
        assert!(rows("", 8).unwrap().is_empty());
    }

    #[test]
    fn array_elements_are_found_whatever_the_buffer() {
        let text = "[\n {\"a\": \"]}\\\"[\"},\n\n [1, {\"b\": []}] , 3\n, \"x,\"]\n";
        let expected = [(2, "{\"a\": \"]}\\\"[\"}"), (4, "[1, {\"b\": []}]"), (4, "3"), (5, "\"x,\"")];
        for capacity in [3, 5, 7, 64] {
            let found = rows(text, capacity).unwrap();
            let found: Vec<_> = found.iter().map(|(line, text)| (*line, text.as_str())).collect();
            assert_eq!(found, expected, "capacity {capacity}");
        }
        assert!(rows("[]", 8).unwrap().is_empty());
    }

    #[test]
    fn broken_arrays_name_the_line() {
        assert!(rows("[{}\n{}]", 8).unwrap_err().contains("f:2: not valid JSON: expected `,`"));
        assert!(
            rows("[{},\n{\"a\"", 8).unwrap_err().contains("f:2: not valid JSON: the file ends inside this")
        );
        assert!(rows("[{}\n,{}", 8).unwrap_err().contains("`]` is missing"));
        assert!(rows("[{}]\n{}", 8).unwrap_err().contains("f:2: not valid JSON: something follows"));
        assert!(rows("[{},]", 8).unwrap_err().contains("between `,` and `]`"));
    }
}
