//! Readers of files and sockets that come from strangers, each as a function of bytes.
//!
//! A [`Target`] ends for any input: with a value or with an error, never with a panic, an abort or
//! unbounded memory. Two programs run the same functions:
//!
//! * `tests/smoke.rs`, on every toolchain: the committed seeds in `fuzz/corpus/`, and [mutations](mutate) of
//!   them that a seed decides.
//! * `cargo +nightly fuzz run -O NAME`, which looks for inputs that reach new code.

#![warn(unreachable_pub)]

mod adapters;
mod chat;
mod gguf;
pub mod mutate;
mod plans;
mod requests;
mod rows;
mod scratch;
mod stores;
pub mod tiny;
mod weights;

/// Reader under test.
#[derive(Clone, Copy)]
pub struct Target {
    /// Name of the target, of its file in `fuzz/fuzz_targets` and of its folder in `fuzz/corpus`.
    pub name: &'static str,
    /// Reads an input. It panics only where the reader does.
    pub run: fn(&[u8]),
    /// Mutated inputs of an ordinary test run.
    pub rounds: usize,
}

/// Every target.
pub const TARGETS: [Target; 14] = [
    Target { name: "safetensors", run: weights::safetensors, rounds: 4000 },
    Target { name: "policy_pt", run: weights::policy_pt, rounds: 4000 },
    Target { name: "gguf", run: gguf::gguf, rounds: 2000 },
    Target { name: "model_config", run: plans::model_config, rounds: 400 },
    Target { name: "run_toml", run: plans::run_toml, rounds: 2000 },
    Target { name: "peft_config", run: adapters::peft_config, rounds: 4000 },
    Target { name: "peft_weights", run: adapters::peft_weights, rounds: 4000 },
    Target { name: "rows_text", run: rows::text, rounds: 600 },
    Target { name: "rows_columns", run: rows::columns, rounds: 600 },
    Target { name: "tokenizer", run: chat::tokenizer, rounds: 600 },
    Target { name: "chat_template", run: chat::template, rounds: 2000 },
    Target { name: "request", run: requests::body, rounds: 4000 },
    Target { name: "store_server", run: stores::server, rounds: 400 },
    Target { name: "store_client", run: stores::client, rounds: 400 },
];

/// Returns the target of a name.
///
/// # Panics
/// If there is none.
pub fn target(name: &str) -> Target {
    *TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| panic!("no target {name}"))
}
