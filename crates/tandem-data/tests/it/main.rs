//! Data files, chat templates, the tokenizer, the token cache and forests.

mod bad_input;
mod cache;
mod fixture;
mod forest;
mod formats;
mod golden;
mod reply;
mod sentencepiece;
mod shapes;
mod templates;
mod tokenizer;
