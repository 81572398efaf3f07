//! Generation with a key/value cache: several prompts, several answers to each, in one batch that texts enter and leave.
//!
//! A prompt's keys and values are computed and kept once for all of its answers. Each step continues every text that
//! is under way by one token; a text that ends makes room for the next one at once.
//!
//! On a processor a text does not depend on what else is in the batch, and the log-probabilities of an f32 model are to the bit
//! those of a training pass over prompt and answer as two segments. On a device [`for_few_rows`](tandem_kernels::Device::for_few_rows),
//! and on a GPU, products of few rows may differ from products of many in the last bit.
//!
//! Ranks whose weights are gathered from all of them generate side by side: each walks when another does ([`Meet`]). Ranks that hold
//! slices of a decoder generate the same text together ([`Generator::over`]); its log-probabilities are those of the whole but for the
//! order of f32 sums.
//! A [mixture](Generator::mixed) draws from two models, whose weights come from [`Sources`].

mod admission;
mod batch;
mod cache;
mod generator;
mod meet;
mod model;
mod models;
mod request;
mod rows;
mod sample;
mod sources;
mod text;

pub use generator::{Generator, GeneratorOptions, OnToken};
pub use meet::{Alone, Meet};
pub use request::{Answer, Finish, Flow, NewToken, Request};
pub use sample::Sampling;
pub use sources::Sources;
