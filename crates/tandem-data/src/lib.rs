//! Formats → records → chat template → tokens (cached, memory-mapped) → forests.
//!
//! * `source/`: [`Sources`](source::Sources) name the files; a [`Record`](record::Record) is a row.
//! * `text/`: [`Tokenizer`](tokenizer::Tokenizer) and [`ChatTemplate`](chat_template::ChatTemplate)
//!   match transformers, given the files of a model's folder.
//! * `rows/`: [`row::tokenise`] turns a record into TRL's tokens; [`prompts`] reads prompts.
//! * `cache/`: [`prepare`](prepare::prepare) does all of that once and stores a
//!   [`TokenCache`](token_cache::TokenCache) for later runs.
//! * `batch/`: [`order`] selects the rows of each step; [`ForestBuilder`](forest::ForestBuilder)
//!   packs rows into a batch.
//! * [`Report`](report::Report) lists the rows that were dropped or changed.
//!
//! A folder imports from folders before it in this list; `batch/` and `cache/` are independent.

#![warn(unreachable_pub)]

mod batch;
mod cache;
mod contained;
pub mod error;
mod place;
pub mod progress;
pub mod report;
mod rows;
pub mod source;
mod text;

pub use batch::{forest, order};
pub use cache::{prepare, token_cache};
pub use error::DataError;
pub use rows::{prompts, row, show};
pub use source::{columns, record, shapes};
pub use text::{chat_template, decode_stream, stop_strings, text_stream, tokenizer, tokenizer_train};

/// The result of reading or preparing data.
pub type Result<T, E = DataError> = std::result::Result<T, E>;
