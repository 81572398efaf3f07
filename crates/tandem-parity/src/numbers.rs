//! Numbers from JSON and raw bytes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

pub(crate) fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

/// Path of the data file of a kind, `plain` or `conv`.
pub(crate) fn data_file(folder: &Path, kind: &str) -> PathBuf {
    folder.join("data").join(format!("pref_{kind}.jsonl"))
}

/// Parses a list of numbers; other values become NaN, which no tolerance admits.
pub(crate) fn floats(value: &Value) -> Vec<f64> {
    value.as_array().into_iter().flatten().map(|v| v.as_f64().unwrap_or(f64::NAN)).collect()
}

/// Parses a list of token ids.
pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().into_iter().flatten().filter_map(|v| u32::try_from(v.as_u64()?).ok()).collect()
}

/// Little-endian f32.
pub(crate) fn f32s(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
}
