//! Rows as token ids: tokenising a record, reading prompts, showing a row.

pub mod prompts;
pub mod row;
pub mod show;
pub(crate) mod tokens;
