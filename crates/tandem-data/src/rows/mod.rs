//! Rows as token ids: tokenising a record, reading prompts, showing a row.

pub mod prompts;
mod reply;
pub mod row;
pub mod show;
pub(crate) mod tokens;
