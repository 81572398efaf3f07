//! Rows of data sets, in every format.

use tandem_data::prepare::prepare;
use tandem_data::progress::Silent;
use tandem_data::record::RowKind;
use tandem_data::row::RowOptions;
use tandem_data::source::Sources;
use tandem_data::source::peek::fitting_kinds;

use crate::{scratch, tiny};

/// Reads JSON lines, one JSON array, or a table with a header line.
pub(crate) fn text(bytes: &[u8]) {
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    let name = if matches!(first, Some(b'{' | b'[')) { "rows.jsonl" } else { "rows.csv" };
    read(name, bytes);
}

/// Reads Parquet, Arrow, and compressed files, which their first bytes tell apart.
pub(crate) fn columns(bytes: &[u8]) {
    read("rows", bytes);
}

fn read(name: &str, bytes: &[u8]) {
    let folder = scratch::with_file("rows", name, bytes);
    let sources = Sources::from(folder.join(name));
    let kinds = fitting_kinds(&sources).unwrap_or_default();
    let mut options = RowOptions::new(kinds.first().copied().unwrap_or(RowKind::Preference));
    options.max_length = Some(64);
    let _ = prepare(&sources, tiny::tokenizer(), &options, &folder.join("cache"), &Silent);
    // The cache of an input is of no use to another.
    let _ = std::fs::remove_dir_all(folder.join("cache"));
}
