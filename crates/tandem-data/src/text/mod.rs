//! Text and token ids: tokenizers, chat templates as on Python, and incremental decoding.

mod assistant_turns;
pub(crate) mod byte_alphabet;
pub mod chat_template;
pub mod decode_stream;
mod folder;
mod python_text;
mod special_tokens;
pub mod stop_strings;
mod strftime;
mod template_budget;
mod template_source;
mod template_text;
pub mod text_stream;
pub mod tokenizer;
mod tokenizer_budget;
pub mod tokenizer_train;
