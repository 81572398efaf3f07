//! Formats → records → chat template → tokens (cached, memory-mapped) → forests.
//!
//! * [`Sources`](source::Sources) name the files, [`Record`](record::Record) is a row of them.
//! * [`Tokenizer`](tokenizer::Tokenizer) and [`ChatTemplate`](chat_template::ChatTemplate) do what transformers does
//!   with the files of a model's folder; [`row::tokenise`] makes TRL's tokens of a record.
//! * [`prompts`] reads rows that are to be answered and judged.
//! * [`prepare`](prepare::prepare) does all of it once and leaves a [`TokenCache`](token_cache::TokenCache) for later runs.
//! * [`ForestBuilder`](forest::ForestBuilder) packs rows into a batch; [`order`] says which rows, when.
//! * [`Report`](report::Report) tells what happened to rows that did not pass unchanged.

mod cache_file;
pub mod chat_template;
mod checksum;
pub mod decode_stream;
pub mod error;
pub mod forest;
mod mersenne;
pub mod order;
pub mod prepare;
pub mod progress;
pub mod prompts;
mod python_text;
mod reader;
pub mod record;
pub mod report;
pub mod row;
pub mod show;
pub mod source;
mod special_tokens;
pub mod stop_strings;
mod strftime;
pub mod text_stream;
pub mod token_cache;
pub mod tokenizer;
pub mod tokenizer_train;

pub use error::DataError;

/// The result of reading or preparing data.
pub type Result<T, E = DataError> = std::result::Result<T, E>;
