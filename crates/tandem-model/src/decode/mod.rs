//! Generation with a key/value cache: several prompts, several completions of each, with continuous
//! batching.
//!
//! A prompt's keys and values are computed and cached once for all of its completions. Each step
//! extends every running completion by one token; one that ends makes room for the next at once.
//!
//! On a CPU a completion does not depend on the rest of the batch, and every distribution is to the bit
//! that of a training pass over prompt and completion as two segments, in f32 and in bf16. On a GPU,
//! products of few rows may differ from products of many in the last bit.
//!
//! Ranks with sharded weights generate in lockstep: each runs a pass when another does ([`Lockstep`]).
//! Tensor-parallel ranks generate the same completions together ([`Generator::over`]);
//! log-probabilities then differ from those of one rank by the order of f32 sums. A
//! [mixture](Generator::mixed) samples from two models, whose weights come from [`Sources`].

mod admission;
mod batch;
mod cache;
#[cfg(test)]
mod distributions;
mod generator;
mod meet;
mod model;
mod models;
mod request;
mod rows;
mod sample;
mod sources;
mod text;
mod waiting;

pub use generator::{Generator, GeneratorOptions, OnToken};
pub use meet::{Lockstep, SingleRank};
pub use request::{Answer, Finish, Flow, NewToken, Request};
pub use sample::Sampling;
pub use sources::Sources;
