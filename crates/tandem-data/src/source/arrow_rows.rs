//! Reader of Parquet and Arrow IPC: batches of columns, written row by row as JSON.
//!
//! A null field inside of a struct is left out, but a message's content: tables have every field of every message. Texts
//! of JSON, which `datasets` writes where rows have different keys, become what they hold.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type,
    UInt64Type,
};
use arrow_array::{Array, RecordBatch, RecordBatchReader, StructArray};
use arrow_schema::extension::{ExtensionType, Json};
use arrow_schema::{ArrowError, DataType, Field, Schema};
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::errors::ParquetError;
use serde::de::IgnoredAny;

use crate::contained::contained;
use crate::error::DataError;
use crate::place::Place;
use crate::source::arrow_ipc::{IpcReader, find_stream};
use crate::source::files::refuse;
use crate::source::reader::{MAX_ROW, RawRow};

/// Rows of Parquet that are decoded at once.
const BATCH_ROWS: usize = 128;

/// Key of the object that stands for a value which rows do not have: its column's type, and what to do.
pub(crate) const ARROW_TYPE: &str = "type of Arrow";

pub(crate) struct ArrowReader {
    path: PathBuf,
    format: &'static str,
    columns: Vec<String>,
    /// Columns that are left out, where a number may be anything.
    ignored: Vec<String>,
    batches: Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>,
    batch: Option<(StructArray, usize)>,
    row: u64,
    num_rows: Option<u64>,
}

impl ArrowReader {
    pub(crate) fn parquet(path: &Path, file: File) -> Result<Self, DataError> {
        // The schema that Arrow keeps in the file may name types that only Arrow has.
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        let opened = contained(|| {
            let builder = ParquetRecordBatchReaderBuilder::try_new_with_options(file, options)?;
            let num_rows = u64::try_from(builder.metadata().file_metadata().num_rows()).ok();
            Ok::<_, ParquetError>((builder.with_batch_size(BATCH_ROWS).build()?, num_rows))
        });
        let opened = opened.map_err(|e| damaged(path, "Parquet", e))?;
        let (reader, num_rows) = opened.map_err(|e| damaged(path, "Parquet", e))?;
        let batches: Box<dyn RecordBatchReader + Send> = Box::new(reader);
        let schema = batches.schema();
        Self::new(path, "Parquet", &schema, Box::new(batches), num_rows)
    }

    pub(crate) fn file(path: &Path, file: File) -> Result<Self, DataError> {
        let mut file = BufReader::with_capacity(1 << 18, file);
        let length = find_stream(&mut file).map_err(|e| damaged(path, "Arrow", e))?;
        Self::stream(path, file.take(length))
    }

    pub(crate) fn stream(path: &Path, input: impl BufRead + Send + 'static) -> Result<Self, DataError> {
        let reader = contained(|| IpcReader::new(input)).map_err(|e| damaged(path, "Arrow", e))?;
        let reader = reader.map_err(|e| damaged(path, "Arrow", e))?;
        let schema = Arc::clone(reader.schema());
        Self::new(path, "Arrow", &schema, Box::new(reader), None)
    }

    fn new(
        path: &Path,
        format: &'static str,
        schema: &Schema,
        batches: Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>,
        num_rows: Option<u64>,
    ) -> Result<Self, DataError> {
        let columns: Vec<String> = schema.fields().iter().map(|field| field.name().clone()).collect();
        if let Some(i) = (1..columns.len()).find(|&i| columns[..i].contains(&columns[i])) {
            return Err(refuse(path, format!("it has two columns `{}`: rename one", columns[i])));
        }
        Ok(Self {
            path: path.to_path_buf(),
            format,
            columns,
            ignored: Vec::new(),
            batches,
            batch: None,
            row: 0,
            num_rows,
        })
    }

    /// Sets the columns that are left out.
    pub(crate) fn ignoring(mut self, columns: &[String]) -> Self {
        self.ignored = columns.to_vec();
        self
    }

    /// Returns the names of the columns.
    pub(crate) fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Returns the part of the rows that was read, if the file says how many there are.
    pub(crate) fn fraction(&self) -> Option<f64> {
        self.num_rows.map(|rows| self.row as f64 / rows.max(1) as f64)
    }

    pub(crate) fn next_row(&mut self) -> Result<Option<RawRow>, DataError> {
        let decoded = contained(|| self.decode_row());
        decoded.unwrap_or_else(|e| {
            // The decoder's state is unknown now.
            (self.batches, self.batch) = (Box::new(std::iter::empty()), None);
            Err(damaged(&self.path, self.format, format!("after row {}: {e}", self.row)))
        })
    }

    fn decode_row(&mut self) -> Result<Option<RawRow>, DataError> {
        loop {
            if let Some((batch, at)) = &mut self.batch
                && *at < batch.len()
            {
                let mut text = Vec::new();
                let written = write_row(batch, *at, &self.ignored, &mut text);
                *at += 1;
                self.row += 1;
                let place = || Place { path: self.path.clone(), line: self.row };
                written.map_err(|(column, Unwritable { expected, found })| DataError::Type {
                    place: place(),
                    key: column,
                    expected,
                    found: format!(
                        "{found}; write null there, or leave the column out with data.ignore_columns"
                    ),
                })?;
                // As in files of text, so that a row is read in every format or in none.
                if text.len() as u64 > MAX_ROW {
                    let reason = format!("row {}: it is longer than {} MiB as JSON", self.row, MAX_ROW >> 20);
                    return Err(refuse(&self.path, reason));
                }
                return Ok(Some(RawRow { line: self.row, text }));
            }
            self.batch = match self.batches.next() {
                None => return Ok(None),
                Some(Ok(batch)) => Some((batch.into(), 0)),
                Some(Err(e)) => {
                    return Err(damaged(&self.path, self.format, format!("after row {}: {e}", self.row)));
                }
            };
        }
    }
}

fn damaged(path: &Path, format: &str, error: impl std::fmt::Display) -> DataError {
    let error = error.to_string();
    let remedy = if error.contains("Disabled feature") {
        "write it with the compression snappy, zstd, gzip or lz4"
    } else {
        "the file is cut off or damaged: download or write it again"
    };
    refuse(path, format!("cannot read the {format} file ({error}); {remedy}"))
}

/// A value that cannot be written as JSON.
struct Unwritable {
    expected: &'static str,
    found: String,
}

/// Writes a row without ignored columns, whose values may be such that cannot be written.
///
/// # Errors
/// The name of a column with such a value.
fn write_row(
    array: &StructArray,
    i: usize,
    ignored: &[String],
    out: &mut Vec<u8>,
) -> Result<(), (String, Unwritable)> {
    out.push(b'{');
    let columns = array.fields().iter().zip(array.columns());
    for (at, (field, column)) in columns.filter(|(field, _)| !ignored.contains(field.name())).enumerate() {
        if at > 0 {
            out.push(b',');
        }
        write_text(field.name(), out);
        out.push(b':');
        write_value(field, column, i, out).map_err(|value| (field.name().clone(), value))?;
    }
    out.push(b'}');
    Ok(())
}

fn write_struct(array: &StructArray, i: usize, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    out.push(b'{');
    let mut any = false;
    // A message that calls a tool has a content of null.
    let is_message = array.column_by_name("role").is_some();
    for (field, column) in array.fields().iter().zip(array.columns()) {
        let is_kept = is_message && field.name() == "content";
        if !is_kept && column.is_null(i) {
            continue;
        }
        if std::mem::replace(&mut any, true) {
            out.push(b',');
        }
        write_text(field.name(), out);
        out.push(b':');
        write_value(field, column, i, out)?;
    }
    out.push(b'}');
    Ok(())
}

fn write_value(field: &Field, array: &dyn Array, i: usize, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    if array.is_null(i) {
        out.extend_from_slice(b"null");
        return Ok(());
    }
    macro_rules! number {
        ($type:ty) => {
            write_json(&array.as_primitive::<$type>().value(i), out)
        };
    }
    macro_rules! dictionary {
        ($($key:ident => $type:ty),*) => {
            match array.data_type() {
                DataType::Dictionary(key, _) => match **key {
                    $(DataType::$key => {
                        let array = array.as_dictionary::<$type>();
                        return write_value(field, array.values(), array.keys().value(i) as usize, out);
                    })*
                    _ => write_opaque(array, out),
                },
                _ => write_opaque(array, out),
            }
        };
    }
    match array.data_type() {
        DataType::Null => out.extend_from_slice(b"null"),
        DataType::Boolean => write_json(&array.as_boolean().value(i), out),
        DataType::Int8 => number!(Int8Type),
        DataType::Int16 => number!(Int16Type),
        DataType::Int32 => number!(Int32Type),
        DataType::Int64 => number!(Int64Type),
        DataType::UInt8 => number!(UInt8Type),
        DataType::UInt16 => number!(UInt16Type),
        DataType::UInt32 => number!(UInt32Type),
        DataType::UInt64 => number!(UInt64Type),
        DataType::Float32 => {
            let value = array.as_primitive::<Float32Type>().value(i);
            write_float(&value, value.into(), out)?;
        }
        DataType::Float64 => {
            let value = array.as_primitive::<Float64Type>().value(i);
            write_float(&value, value, out)?;
        }
        DataType::Utf8 => write_text_of(field, array.as_string::<i32>().value(i), out)?,
        DataType::LargeUtf8 => write_text_of(field, array.as_string::<i64>().value(i), out)?,
        DataType::Utf8View => write_text_of(field, array.as_string_view().value(i), out)?,
        DataType::Struct(_) => write_struct(array.as_struct(), i, out)?,
        DataType::List(item) => write_list(item, &*array.as_list::<i32>().value(i), out)?,
        DataType::LargeList(item) => write_list(item, &*array.as_list::<i64>().value(i), out)?,
        DataType::FixedSizeList(item, _) => write_list(item, &*array.as_fixed_size_list().value(i), out)?,
        DataType::Map(entry, _) => write_list(entry, &array.as_map().value(i), out)?,
        _ => dictionary!(
            Int8 => Int8Type, Int16 => Int16Type, Int32 => Int32Type, Int64 => Int64Type,
            UInt8 => UInt8Type, UInt16 => UInt16Type, UInt32 => UInt32Type, UInt64 => UInt64Type
        ),
    }
    Ok(())
}

fn write_list(item: &Field, items: &dyn Array, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    out.push(b'[');
    for i in 0..items.len() {
        if i > 0 {
            out.push(b',');
        }
        write_value(item, items, i, out)?;
    }
    out.push(b']');
    Ok(())
}

/// Writes `value`, which is `number`.
fn write_float(value: &impl serde::Serialize, number: f64, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    if !number.is_finite() {
        return Err(Unwritable {
            expected: "finite, or null where there is no number",
            found: number.to_string(),
        });
    }
    write_json(value, out);
    Ok(())
}

/// Writes a value that is no part of a row, such as a date or bytes: an object, which every key of a
/// row refuses with its type.
fn write_opaque(array: &dyn Array, out: &mut Vec<u8>) {
    let remedy = match array.data_type() {
        DataType::Float16
        | DataType::Decimal32(..)
        | DataType::Decimal64(..)
        | DataType::Decimal128(..)
        | DataType::Decimal256(..) => "float64",
        DataType::RunEndEncoded(..) => "plain values, without run-end encoding",
        _ => "text or numbers",
    };
    out.push(b'{');
    write_text(ARROW_TYPE, out);
    out.push(b':');
    write_text(&format!("{}; write the column as {remedy}", array.data_type()), out);
    out.push(b'}');
}

/// Writes the text of a field, or what it holds if the field's texts are JSON.
fn write_text_of(field: &Field, text: &str, out: &mut Vec<u8>) -> Result<(), Unwritable> {
    if field.extension_type_name() != Some(Json::NAME) {
        write_text(text, out);
        return Ok(());
    }
    if let Err(why) = serde_json::from_str::<IgnoredAny>(text) {
        let shown: String = text.chars().take(60).collect();
        let found = format!("{shown:?} ({why}), in a column whose type is JSON");
        return Err(Unwritable { expected: "JSON", found });
    }
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

fn write_text(text: &str, out: &mut Vec<u8>) {
    write_json(&text, out);
}

/// Writes a finite number, a text or a truth value.
fn write_json(value: &impl serde::Serialize, out: &mut Vec<u8>) {
    serde_json::to_writer(out, value).expect("memory takes every value");
}
